"""Picklable objects as bytes that a backend can move: for settings, state and error messages, not for speed.

Unpickling can run any code: the ranks of one job trust each other, as everywhere in MPI.
"""

import pickle
from typing import Any

import numpy as np

from allred.arrays import Array, as_bytes
from allred.comm.backends.backend import Backend
from allred.comm.work import Steps
from allred.errors import InputError


def dumps(value: Any) -> Array:
    """Pickle an object into a uint8 array. Raises InputError if it cannot be pickled."""
    try:
        return np.frombuffer(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL), np.uint8)
    except Exception as error:
        raise InputError(f"a {type(value).__name__} cannot be pickled ({error})") from error


def gather(backend: Backend, data: Array) -> Steps[list[Any]]:
    """Return the objects of all ranks in rank order. data: this rank's pickled object."""
    length = np.array([data.nbytes], np.int64)
    lengths = np.empty(backend.size, np.int64)
    yield from backend.allgather(as_bytes(length), as_bytes(lengths), [length.nbytes] * backend.size)
    everything = np.empty(int(lengths.sum()), np.uint8)
    yield from backend.allgather(data, everything, lengths.tolist())
    return [pickle.loads(part.data) for part in np.split(everything, np.cumsum(lengths)[:-1])]


def broadcast(backend: Backend, data: Array, root: int) -> Steps[Any]:
    """Return the root's object. data: this rank's pickled object; only the root's is used."""
    length = np.array([data.nbytes], np.int64)
    yield from backend.broadcast(as_bytes(length), root)
    if backend.rank != root:
        data = np.empty(int(length[0]), np.uint8)
    yield from backend.broadcast(data, root)
    return pickle.loads(data.data)
