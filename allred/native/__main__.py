"""`python -m allred.native` prints whether the C extension is built; `make` runs it after every install."""

from allred import native

print("C extension: built" if native.available else f"C extension: {native.reason}\n  allred works without it, slower")
