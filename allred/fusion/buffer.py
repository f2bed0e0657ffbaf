"""The fusion buffer: one piece of a communicator's memory per dtype, kept for good, packed and unpacked in C."""

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from allred import arrays, native
from allred.arrays import Array
from allred.comm.communicator import Communicator


class FusionBuffer:
    """Room for one bucket at a time in each dtype; it grows to the largest bucket there was."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = weakref.proxy(communicator)
        self._memory: dict[np.dtype[Any], Array] = {}

    def pack(self, tensors: Sequence[Array], room: int) -> Array:
        """The tensors (contiguous, of one dtype) one after the other: a flat view, valid until the next pack.

        room: elements that the largest bucket may have.
        """
        dtype = tensors[0].dtype
        if dtype not in self._memory or self._memory[dtype].size < room:
            self._memory[dtype] = self._communicator.allocate(room, dtype)
        memory = self._memory[dtype]
        native.pack([arrays.as_buffer(tensor) for tensor in tensors], arrays.as_buffer(memory))
        return memory[: sum(tensor.size for tensor in tensors)]

    def unpack(self, tensors: Sequence[Array]) -> None:
        """Fill the tensors, which were packed last, from the buffer."""
        memory = self._memory[tensors[0].dtype]
        native.unpack([arrays.as_buffer(tensor) for tensor in tensors], arrays.as_buffer(memory))


_buffers: "weakref.WeakKeyDictionary[Communicator, FusionBuffer]" = weakref.WeakKeyDictionary()


def buffer_of(communicator: Communicator) -> FusionBuffer:
    """The buffer of a communicator: one for all that reduce over it, since they do so one after the other."""
    if communicator not in _buffers:
        _buffers[communicator] = FusionBuffer(communicator)
    return _buffers[communicator]
