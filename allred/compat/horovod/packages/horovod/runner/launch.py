"""horovodrun as a function, from allred."""

import sys

from allred.compat.horovodrun.command import main

__all__ = ["run_commandline"]


def run_commandline() -> None:
    """Run horovodrun with the arguments of this process, and exit."""
    sys.exit(main(sys.argv[1:]))
