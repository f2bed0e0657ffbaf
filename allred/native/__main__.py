"""`python -m allred.native` says whether the C extension is there; `make` runs it after every install."""

from allred import native

print("C extension: built" if native.available else f"C extension: {native.reason}\n  allred goes on without it")
