"""Picklable objects over a communicator: broadcast_object, allgather_object. For settings and state, not for speed.

Pickle runs code when it loads: the ranks of one job trust each other, as everywhere in MPI.
"""

import pickle
from typing import TYPE_CHECKING, Any

import numpy as np

from allred import arrays
from allred.comm.work import Steps

if TYPE_CHECKING:
    from allred.comm.base import Communicator


def gather_objects(comm: "Communicator", value: Any) -> Steps[list[Any]]:
    """Every rank's object, in rank order: for use inside an operation, without a header of its own."""
    data = _dumps(value)
    length = np.array([data.nbytes], np.int64)
    lengths = np.empty(comm.size, np.int64)
    yield from comm._allgather(arrays.as_bytes(length), arrays.as_bytes(lengths), [length.nbytes] * comm.size)
    everything = np.empty(int(lengths.sum()), np.uint8)
    yield from comm._allgather(data, everything, lengths.tolist())
    return [pickle.loads(part.data) for part in np.split(everything, np.cumsum(lengths)[:-1])]


def allgather_object(comm: "Communicator", value: Any, name: str = "") -> list[Any]:
    """Every rank's object, in rank order."""
    data = _dumps(value)
    lengths = comm.allgather(np.array([data.nbytes], np.int64), name).wait()
    everything = comm.allgather(data, name).wait()
    return [pickle.loads(part.data) for part in np.split(everything, np.cumsum(lengths)[:-1])]


def broadcast_object(comm: "Communicator", value: Any, root: int = 0, name: str = "") -> Any:
    """The root's object, on every rank; on the root, the object itself."""
    data = _dumps(value) if comm.rank == root else np.empty(0, np.uint8)
    length = comm.broadcast(np.array([data.nbytes], np.int64), root, name).wait()
    if comm.rank != root:
        data = np.empty(int(length[0]), np.uint8)
    received = comm.broadcast(data, root, name).wait()
    return value if comm.rank == root else pickle.loads(received.data)


def _dumps(value: Any) -> arrays.Array:
    return np.frombuffer(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL), np.uint8)
