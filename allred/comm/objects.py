"""Picklable objects as bytes that a communicator can move. For settings, state and error messages, not for speed.

Pickle runs code when it loads: the ranks of one job trust each other, as everywhere in MPI.
"""

import pickle
from typing import TYPE_CHECKING, Any

import numpy as np

from allred.arrays import Array, as_bytes
from allred.comm.work import Steps
from allred.errors import InputError

if TYPE_CHECKING:
    from allred.comm.communicator import Communicator


def dumps(value: Any) -> Array:
    """An object's bytes. Raises InputError if it cannot be pickled."""
    try:
        return np.frombuffer(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL), np.uint8)
    except Exception as error:
        raise InputError(f"a {type(value).__name__} cannot be pickled ({error})") from error


def gather(comm: "Communicator", data: Array) -> Steps[list[Any]]:
    """The objects of all ranks, from this one's bytes, in rank order."""
    length = np.array([data.nbytes], np.int64)
    lengths = np.empty(comm.size, np.int64)
    yield from comm._allgather(as_bytes(length), as_bytes(lengths), [length.nbytes] * comm.size)
    everything = np.empty(int(lengths.sum()), np.uint8)
    yield from comm._allgather(data, everything, lengths.tolist())
    return [pickle.loads(part.data) for part in np.split(everything, np.cumsum(lengths)[:-1])]


def cast(comm: "Communicator", data: Array, root: int) -> Steps[Any]:
    """The root's object, from its bytes; those of the others do not matter."""
    length = np.array([data.nbytes], np.int64)
    yield from comm._broadcast(as_bytes(length), root)
    if comm.rank != root:
        data = np.empty(int(length[0]), np.uint8)
    yield from comm._broadcast(data, root)
    return pickle.loads(data.data)
