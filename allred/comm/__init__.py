"""Communicators: the contract (base), its backends (single, mpi), and the collectives as functions."""
