"""Memory that the ranks of a node share, one copy for all: for parameters and optimizer states.

A NodeMemory is a file without a name, which every rank of the node maps (backends/segment.py). It exists as long as an
array in it exists on any rank, also after shutdown().
"""

import math
import mmap
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from allred.arrays import Array

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


def any_shared(values: Sequence[Any]) -> bool:
    """Return whether `is_shared` for any numpy array in `values`."""
    return bool(ranges) and any(type(value) is np.ndarray and is_shared(value) for value in values)


def is_shared(array: Array) -> bool:
    """Whether the ranks of this node have `array` in one memory."""
    if not ranges:
        return False
    address = array.__array_interface__["data"][0]
    return any(start <= address < stop for start, stop in ranges.items())
