"""The fusion buffer: one piece of the communicator's memory per dtype, made once, packed and unpacked in C."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from allred import arrays, native
from allred.arrays import Array
from allred.comm.base import Communicator


class FusionBuffer:
    """Room for one bucket of up to `bucket_bytes` in each dtype that is asked for."""

    def __init__(self, communicator: Communicator, bucket_bytes: int) -> None:
        self._communicator = communicator
        self._bucket_bytes = bucket_bytes
        self._memory: dict[np.dtype[Any], Array] = {}

    def pack(self, tensors: Sequence[Array]) -> Array:
        """The tensors (contiguous, of one dtype) one after the other: a flat view of the buffer."""
        dtype = tensors[0].dtype
        if dtype not in self._memory:
            self._memory[dtype] = self._communicator.allocate(self._bucket_bytes // dtype.itemsize, dtype)
        memory = self._memory[dtype]
        native.pack([arrays.as_buffer(tensor) for tensor in tensors], arrays.as_buffer(memory))
        return memory[: sum(tensor.size for tensor in tensors)]

    def unpack(self, tensors: Sequence[Array]) -> None:
        """Fill the tensors, which were packed last, from the buffer."""
        memory = self._memory[tensors[0].dtype]
        native.unpack([arrays.as_buffer(tensor) for tensor in tensors], arrays.as_buffer(memory))
