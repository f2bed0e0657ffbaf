"""`python -m allred.native` prints whether the C extension is built; `make` runs it after every install."""

import sys

from allred import native

if len(sys.argv) > 1:
    sys.exit("usage: python -m allred.native: print whether the C extension is built")

print("C extension: built" if native.available else f"C extension: {native.reason}\n  allred works without it, slower")
