"""python -m allred.compat.horovodrun: the command horovodrun."""

import sys

from allred.compat.horovodrun.command import script

if __name__ == "__main__":
    sys.exit(script())
