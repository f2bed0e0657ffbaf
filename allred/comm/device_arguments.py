"""Checks the arrays of an operation on a GPU, and plans how a group of them is packed into buckets."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from allred import arrays
from allred.comm.header import OpDescriptor
from allred.comm.work import Steps
from allred.errors import InputError
from allred.gpu.device_arrays import Adopted, adopt, is_device

_ON_GPU = 128  # added to the code of the dtype in the hash of the header


def adopted(value: Any, index: int) -> Adopted:
    """Return `value` as an array on this rank's GPU, whose index is `index`. Raises InputError if it is elsewhere."""
    if not is_device(value):
        kind = f"{type(value).__module__}.{type(value).__name__}"
        raise InputError(f"the group has arrays on the GPU and on the host ({kind}); reduce them in two calls")
    found = adopt(value)
    if (there := found.array.data.device_id) != index:
        raise InputError(
            f"the array is on GPU {there}, but allred.init() has bound this rank to GPU {index} (numbers "
            "of the GPUs that this process sees); create the array there, or move it"
        )
    return found


def refused(error: Exception) -> Steps[Any]:
    """Raise `error` as the first step of an operation, so that the other ranks receive it in the header."""
    yield from ()
    raise error


def check_writable(given: list[Adopted]) -> None:
    """Raise InputError if an array cannot be reduced in place: it is read-only, or shares memory with another."""
    if not all(one.writable for one in given):
        raise InputError(
            "the array is read-only (all arrays of some frameworks are); use the form without the underscore"
        )
    some = [one.array for one in given if one.array.size]
    whole = [array for array in some if array.flags.c_contiguous]
    if len({array.data.ptr for array in some}) < len(some) or (
        len(whole) > 1 and arrays.ranges_overlap([array.data.ptr for array in whole], [array.nbytes for array in whole])
    ):
        raise InputError("the same memory is in the group twice, and would be reduced twice")


def on_gpu(descriptor: OpDescriptor) -> OpDescriptor:
    """Mark the operation as one on device arrays: the header of a rank with a host array differs."""
    marked = None
    if descriptor.arrays is not None:
        marked = tuple((code | _ON_GPU, shape) for code, shape in descriptor.arrays)
    return dataclasses.replace(descriptor, title=f"{descriptor.title} on the GPU", arrays=marked)


def buckets(sizes: Sequence[int], dtypes: Sequence[Any], limit_bytes: int) -> list[list[int]]:
    """Pack tensors into buckets of one dtype and at most `limit_bytes`: lists of positions; empty tensors are left out.

    >>> buckets([4, 8, 0, 100, 4], ["f", "d", "f", "f", "f"], limit_bytes=16)
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
