"""Tensor fusion: which gradients are reduced together (`Plan`), and the memory they are packed into (`FusionBuffer`).

The plan is a pure function of names, shapes and dtypes. A bucket holds tensors of one dtype, in their order, up to
`bucket_bytes`. A tensor of half that size or more gets a bucket of its own and is reduced in place: copying it into a
fusion buffer would cost more than the call it saves.
"""

import dataclasses
import functools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from allred import arrays, native
from allred.arrays import Array

if TYPE_CHECKING:
    from allred.comm.communicator import Communicator


class Tensor(NamedTuple):
    """Name, shape and dtype of an array."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def elements(self) -> int:
        return arrays.size_of(self.shape)

    @property
    def nbytes(self) -> int:
        return self.elements * self.dtype.itemsize

    def __str__(self) -> str:
        return f"'{self.name}' {arrays.describe(self.shape, self.dtype)}"


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Tensors reduced together: their dtype, their indices in the plan, and their number of elements in total."""

    dtype: np.dtype[Any]
    indices: tuple[int, ...]
    count: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """The tensors of a step and their buckets. Each property is computed once, at its first use.

    >>> small, large = Tensor("b", (4,), np.dtype("f4")), Tensor("w", (1024,), np.dtype("f4"))
    >>> [bucket.indices for bucket in Plan((small, large, small), bucket_bytes=4096).buckets]
    [(1,), (0, 2)]
    """

    tensors: tuple[Tensor, ...]
    bucket_bytes: int

    @functools.cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets, in the order in which they are reduced; every non-empty tensor is in exactly one."""
        done: list[Bucket] = []
        open_buckets: dict[np.dtype[Any], tuple[list[int], int]] = {}  # by dtype: indices, number of elements

        def close(dtype: np.dtype[Any]) -> None:
            indices, count = open_buckets.pop(dtype)
            done.append(Bucket(dtype, tuple(indices), count))

        for index in self.nonempty:
            elements, dtype = self.tensors[index].elements, self.tensors[index].dtype
            if 2 * elements * dtype.itemsize >= self.bucket_bytes:
                done.append(Bucket(dtype, (index,), elements))
                continue
            if dtype in open_buckets and (open_buckets[dtype][1] + elements) * dtype.itemsize > self.bucket_bytes:
                close(dtype)
            indices, count = open_buckets.get(dtype, ([], 0))
            indices.append(index)
            open_buckets[dtype] = indices, count + elements
        for dtype in list(open_buckets):
            close(dtype)
        return tuple(done)

    @functools.cached_property
    def nonempty(self) -> list[int]:
        return [index for index, tensor in enumerate(self.tensors) if tensor.elements]

    @functools.cached_property
    def dtypes(self) -> tuple[np.dtype[Any], ...]:
        return tuple(dict.fromkeys(self.tensors[index].dtype for index in self.nonempty))

    @functools.cached_property
    def floats(self) -> dict[np.dtype[Any], list[int]]:
        """The indices of the tensors of each floating-point dtype."""
        found: dict[np.dtype[Any], list[int]] = {}
        for index, tensor in enumerate(self.tensors):
            if arrays.is_float(tensor.dtype):
                found.setdefault(tensor.dtype, []).append(index)
        return found

    @functools.cached_property
    def lines(self) -> tuple[str, ...]:
        """One line per tensor: ranks with equal lines and equal bucket_bytes have equal plans."""
        return tuple(map(str, self.tensors))

    @functools.cached_property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def largest(self, dtype: np.dtype[Any]) -> int:
        return max(bucket.count for bucket in self.buckets if bucket.dtype == dtype)


class FusionBuffer:
    """Memory for one bucket at a time in each dtype; it grows to the largest bucket. C packs and unpacks it."""

    def __init__(self, communicator: "Communicator") -> None:
        self._communicator = weakref.proxy(communicator)
        self._memory: dict[np.dtype[Any], Array] = {}

    def pack(self, tensors: Sequence[Array], largest: int) -> Array:
        """Copy contiguous tensors of one dtype behind each other. Returns a flat view, valid until the next pack.
        largest: the number of elements of the largest bucket of this dtype."""
        dtype = tensors[0].dtype
        if dtype not in self._memory or self._memory[dtype].size < largest:
            self._memory[dtype] = self._communicator.backend.allocate(largest, dtype)
        memory = self._memory[dtype]
        native.pack([arrays.as_buffer(tensor) for tensor in tensors], arrays.as_buffer(memory))
        return memory[: sum(tensor.size for tensor in tensors)]

    def unpack(self, tensors: Sequence[Array]) -> None:
        memory = self._memory[tensors[0].dtype]
        native.unpack([arrays.as_buffer(tensor) for tensor in tensors], arrays.as_buffer(memory))


_buffers: "weakref.WeakKeyDictionary[Communicator, FusionBuffer]" = weakref.WeakKeyDictionary()


def buffer_of(communicator: "Communicator") -> FusionBuffer:
    """Return the buffer of a communicator. All optimizers share it: their reductions do not run at the same time."""
    if communicator not in _buffers:
        _buffers[communicator] = FusionBuffer(communicator)
    return _buffers[communicator]
