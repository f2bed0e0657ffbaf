"""What an operation on device arrays is made of: its arrays, its header, a group's buckets, what moves them."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

from allred import arrays
from allred.arrays import Array
from allred.comm.header import Call
from allred.comm.ops import ReduceOp
from allred.comm.work import Steps
from allred.errors import InputError
from allred.gpu.device import Lane
from allred.gpu.values import Adopted, adopt, is_device

_ON_GPU = 128  # in the header's hash, beside the dtype's code


class Transport(Protocol):
    """What moves flat device arrays, once the ranks agree. Nothing of it is in force while it waits for the host."""

    name: str

    def ready(self) -> Steps[None]: ...
    def close(self, well: bool) -> None: ...
    def allreduce(self, lane: Lane, flat: Any, name: str, op: ReduceOp, wire: str) -> Steps[None]: ...
    def broadcast(self, lane: Lane, data: Any, root: int) -> Steps[None]: ...
    def allgather(self, lane: Lane, send: Any, recv: Any, counts: list[int]) -> Steps[None]: ...
    def alltoall(self, lane: Lane, send: Any, recv: Any, counts: Array) -> Steps[None]: ...
    def reducescatter(
        self, lane: Lane, flat: Any, out: Any, name: str, counts: list[int], op: ReduceOp
    ) -> Steps[None]: ...


def adopted(value: Any, index: int) -> Adopted:
    """An array on this rank's GPU, which has this index."""
    if not is_device(value):
        kind = f"{type(value).__module__}.{type(value).__name__}"
        raise InputError(f"a group of arrays has some on the GPU and some on the host ({kind}); reduce them apart")
    found = adopt(value)
    if (there := found.array.data.device_id) != index:
        raise InputError(
            f"the array is on GPU {there}, and this rank's, as allred.init() has bound it, is GPU {index} (as CUDA "
            "counts what this process sees); make it there, or move it"
        )
    return found


def refused(error: Exception) -> Steps[Any]:
    """Arguments that cannot be used, as an operation: the other ranks hear of it."""
    yield from ()
    raise error


def check_writable(given: list[Adopted]) -> None:
    if not all(one.writable for one in given):
        raise InputError("the array is read-only, or of a framework whose arrays are; use the form without underscore")
    some = [one.array for one in given if one.array.size]
    whole = [array for array in some if array.flags.c_contiguous]
    if len({array.data.ptr for array in some}) < len(some) or (
        len(whole) > 1 and arrays.cross([array.data.ptr for array in whole], [array.nbytes for array in whole])
    ):
        raise InputError("the same memory is in the group twice, and would be reduced twice")


def on_gpu(call: Call) -> Call:
    """The call as one on device arrays: a rank with a host array does not agree."""
    marked = None if call.arrays is None else tuple((code | _ON_GPU, shape) for code, shape in call.arrays)
    return dataclasses.replace(call, title=f"{call.title} on the GPU", arrays=marked)


def buckets(sizes: Sequence[int], dtypes: Sequence[Any], limit_bytes: int) -> list[list[int]]:
    """Which tensors travel together, by position: those of a dtype, in order, up to so many bytes; empty ones nowhere.

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
