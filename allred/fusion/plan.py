"""The bucket planner: which gradients are reduced together. A pure function of names, shapes and dtypes.

A bucket holds tensors of one dtype, in their order, up to `bucket_bytes`. A tensor of half that or more gets a bucket
of its own and is reduced where it lies: copying it into a fusion buffer would cost more than the call it saves.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from allred import arrays


class Tensor(NamedTuple):
    """What a plan has to know of a tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def elements(self) -> int:
        """Numbers in it; 1 for a 0-d tensor."""
        return arrays.size_of(self.shape)

    def __str__(self) -> str:
        return f"'{self.name}' {arrays.describe(self.shape, self.dtype)}"


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Tensors reduced together: their positions in the list that was planned, and their elements in all."""

    dtype: np.dtype[Any]
    indices: tuple[int, ...]
    count: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """All buckets, in the order in which they are reduced."""

    tensors: tuple[Tensor, ...]
    buckets: tuple[Bucket, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(bucket.count * bucket.dtype.itemsize for bucket in self.buckets)

    def largest(self, dtype: np.dtype[Any]) -> int:
        """Elements of the largest bucket of a dtype."""
        return max(bucket.count for bucket in self.buckets if bucket.dtype == dtype)

    @functools.cached_property
    def floats(self) -> dict[np.dtype[Any], list[int]]:
        """The positions of the tensors of each floating dtype."""
        found: dict[np.dtype[Any], list[int]] = {}
        for index, tensor in enumerate(self.tensors):
            if arrays.is_float(tensor.dtype):
                found.setdefault(tensor.dtype, []).append(index)
        return found

    @functools.cached_property
    def lines(self) -> tuple[str, ...]:
        """A line a tensor: ranks with equal lines, and equal bucket_bytes, have equal plans."""
        return tuple(map(str, self.tensors))


def plan(tensors: Sequence[Tensor], bucket_bytes: int) -> Plan:
    """The buckets for `tensors`; every non-empty tensor is in exactly one.

    >>> small, large = Tensor("b", (4,), np.dtype("f4")), Tensor("w", (1024,), np.dtype("f4"))
    >>> [bucket.indices for bucket in plan([small, large, small], bucket_bytes=4096).buckets]
    [(1,), (0, 2)]
    """
    done: list[Bucket] = []
    waiting: dict[np.dtype[Any], tuple[list[int], int]] = {}  # of each dtype the open bucket, and its elements

    def close(dtype: np.dtype[Any]) -> None:
        indices, count = waiting.pop(dtype)
        done.append(Bucket(dtype, tuple(indices), count))

    for index, tensor in enumerate(tensors):
        elements, dtype = tensor.elements, tensor.dtype
        if elements == 0:
            continue
        if 2 * elements * dtype.itemsize >= bucket_bytes:
            done.append(Bucket(dtype, (index,), elements))
            continue
        if dtype in waiting and (waiting[dtype][1] + elements) * dtype.itemsize > bucket_bytes:
            close(dtype)
        indices, count = waiting.get(dtype, ([], 0))
        indices.append(index)
        waiting[dtype] = indices, count + elements
    for dtype in list(waiting):
        close(dtype)
    return Plan(tuple(tensors), tuple(done))
