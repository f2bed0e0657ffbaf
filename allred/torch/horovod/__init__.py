"""The functions and classes of horovod.torch 0.28, with its arguments, defaults and results, on allred.

`import allred.torch as hvd` has all of them. docs/from-horovod.md lists the differences.
"""
