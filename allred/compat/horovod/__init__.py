"""Unmodified programs for Horovod: `import horovod.torch` finds allred.

    python -m allred.compat.horovod train.py --epochs 3     also -m package.train
    horovodrun -np 4 python train.py
    import allred.compat.horovod                            in a program, before it imports horovod

It is active only if one of these asks for it. If Horovod itself is installed, the first and the third raise
ImportError, and horovodrun is Horovod's own. docs/from-horovod.md has the differences.
"""

from allred.compat import horovod_import

horovod_import.activate()
