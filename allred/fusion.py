"""Tensor fusion: which gradients are reduced together (`Plan`), and the memory they are packed into (`FusionBuffer`).

The plan is a pure function of names, shapes and dtypes. Backend shm needs no buckets: it reduces a group as one stream
(`fuses`, see modes/reducer.py).
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from allred import arrays, native, nest
from allred.arrays import Array


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
        return f"{nest.quoted(self.name)} {arrays.describe(self.shape, self.dtype)}"


def assign_buckets(sizes: Sequence[int], dtypes: Sequence[Any], limit_bytes: int) -> list[list[int]]:
    """Assign tensors to buckets of one dtype and at most `limit_bytes`. Return the tensors' indices for each bucket.

    A tensor of half the limit or more has a bucket of its own, and is reduced in place: a copy into a fusion buffer
    would cost more than the call it saves. Empty tensors are in no bucket. sizes: bytes of each tensor.

    >>> assign_buckets([4, 8, 0, 100, 4], ["f", "d", "f", "f", "f"], limit_bytes=16)
    [[1], [3], [0, 4]]
    """
    done: list[list[int]] = []
    waiting: dict[Any, list[int]] = {}
    filled: dict[Any, int] = {}
    for index, (nbytes, dtype) in enumerate(zip(sizes, dtypes, strict=True)):
        if 2 * nbytes >= limit_bytes:
            done.append([index])
        elif nbytes:
            if filled.get(dtype, 0) + nbytes > limit_bytes:
                done.append(waiting.pop(dtype))
                filled[dtype] = 0
            waiting.setdefault(dtype, []).append(index)
            filled[dtype] = filled.get(dtype, 0) + nbytes
    return done + list(waiting.values())


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
    kept: dict[Any, Array] = dataclasses.field(default_factory=dict, repr=False, compare=False)  # error_feedback.py

    @functools.cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets, in the order in which they are reduced; every non-empty tensor is in exactly one."""
        assigned = assign_buckets(
            [tensor.nbytes for tensor in self.tensors], [tensor.dtype for tensor in self.tensors], self.bucket_bytes
        )
        return tuple(
            Bucket(self.tensors[indices[0]].dtype, tuple(indices), sum(self.tensors[i].elements for i in indices))
            for indices in assigned
        )

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
            if arrays.is_inexact(tensor.dtype):
                found.setdefault(tensor.dtype, []).append(index)
        return found

    @functools.cached_property
    def starts(self) -> bytes:
        """The number of elements before each tensor, and of all of them, int64."""
        return np.cumsum([0, *(tensor.elements for tensor in self.tensors)], dtype=np.int64).tobytes()

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
    """Memory for one bucket at a time in each dtype; it grows to the largest bucket. C packs and unpacks it.

    allocate: returns an array of this many elements and this dtype.
    """

    def __init__(self, allocate: Callable[[int, np.dtype[Any]], Array]) -> None:
        self._allocate = allocate
        self._memory: dict[np.dtype[Any], Array] = {}

    def pack(self, tensors: Sequence[Array], largest: int) -> Array:
        """Copy contiguous tensors of one dtype behind each other. Returns a flat view, valid until the next pack.
        largest: the number of elements of the largest bucket of this dtype."""
        dtype = tensors[0].dtype
        if dtype not in self._memory or self._memory[dtype].size < largest:
            self._memory[dtype] = self._allocate(largest, dtype)
        memory = self._memory[dtype]
        native.pack([arrays.as_buffer(tensor) for tensor in tensors], arrays.as_buffer(memory))
        return memory[: sum(tensor.size for tensor in tensors)]

    def unpack(self, tensors: Sequence[Array]) -> None:
        memory = self._memory[tensors[0].dtype]
        native.unpack([arrays.as_buffer(tensor) for tensor in tensors], arrays.as_buffer(memory))
