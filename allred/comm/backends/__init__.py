"""Backends: primitives over flat arrays, on one rank, MPI, shared memory, or GPUs; and the selection of one."""
