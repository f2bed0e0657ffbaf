"""Memory that the ranks of a node share, one copy for all: for parameters and optimizer states.

A NodeMemory is a file without a name, which every rank of the node maps (backends/segment.py). It exists as long as an
array in it exists on any rank, also after shutdown().
"""

import contextlib
import math
import mmap
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from allred import world
from allred.arrays import Array
from allred.comm.backends import segment

if TYPE_CHECKING:
    from allred.comm.communicator import Communicator

_ALIGNMENT = 64  # bytes; different arrays have no cache line in common
ranges: dict[int, int] = {}  # first address of each block in this process, and the address behind it


class NodeMemory:
    """One memory for all ranks of the node, initially zeros. ranks: those that share it."""

    def __init__(self, memory: mmap.mmap, ranks: list[int]) -> None:
        self.ranks = ranks
        self._memory, self._used = memory, 0
        whole = np.frombuffer(memory, np.uint8)
        start = whole.__array_interface__["data"][0]
        ranges[start] = start + whole.nbytes
        weakref.finalize(memory, ranges.pop, start, None)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return the next array in the block. All ranks make the same arrays in the same order."""
        count = math.prod(shape)
        raw = np.frombuffer(self._memory, np.uint8, count * dtype.itemsize, self._used) if count else np.empty(0, "u1")
        self._used += size_in_block(shape, dtype)
        return raw.view(dtype).reshape(shape)


def size_in_block(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    """Return the bytes that an array takes in a block."""
    return -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def ranks_of_node(number: int, ranks: Sequence[int]) -> list[int]:
    """Return the workers in `ranks` that are on the node of worker `number`."""
    sets = world.current().process_sets
    return [number] if sets is None else [rank for rank in ranks if sets.facts[rank].node == sets.facts[number].node]


def allocate(communicator: "Communicator", nbytes: int, title: str) -> NodeMemory | None:
    """Make a block on each node; None on all ranks if a rank cannot map it. Collective; all ranks pass the same
    `nbytes`. title: of the exchanges, in errors."""
    mine = ranks_of_node(communicator.number, communicator.active.ranks)
    memory, offer = None, None
    if communicator.number == mine[0]:
        with contextlib.suppress(OSError):
            memory, offer = segment.offer(max(nbytes, mmap.PAGESIZE))
    offers = communicator.allgather_object(offer, title).wait()
    offer = offers[list(communicator.active.ranks).index(mine[0])]
    if memory is None and offer is not None:
        memory = segment.accept(offer)
    mapped = communicator.allgather_object(memory is not None, title).wait()
    return NodeMemory(memory, mine) if memory is not None and all(mapped) else None


def any_shared(values: Sequence[Any]) -> bool:
    """Return whether `is_shared` for any numpy array in `values`."""
    return bool(ranges) and any(type(value) is np.ndarray and is_shared(value) for value in values)


def is_shared(array: Array) -> bool:
    """Whether the ranks of this node have `array` in one memory."""
    if not ranges:
        return False
    address = array.__array_interface__["data"][0]
    return any(start <= address < stop for start, stop in ranges.items())
