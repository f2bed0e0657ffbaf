"""The dtypes and operators that NCCL gets, so that results are those of the other backends (ops.py).

Pure functions of arrays; `xp` is cupy, or numpy in tests. Arrays of bfloat16 are uint16 here.

    bool                            as uint8: Min and Product are its minimum, Max its maximum
    int16                           as int32; truncation makes it wrap around
    floats, Min and Max             as integers of the same order, NaN the extreme: NCCL ignores NaN
    16-bit floats, other ops        each rank sums a part in float32 and rounds it once (`halves`)
    everything else                 unchanged
"""

import dataclasses
import functools
from typing import Any

import numpy as np

from allred.comm.ops import ReduceOp
from allred.gpu.arithmetic import HALF_DTYPES, half_to_float32, round_to_half

Device = Any  # a cupy array
_WIDE = {"bool": "uint8", "int16": "int32"}
_KEYS = {"float16": "int32", "bfloat16": "int32", "float32": "int32", "float64": "int64"}
_FLOATS = {"int32": "float32", "int64": "float64"}
TYPES = {  # NCCL's names of dtypes, as in cupy
    "uint8": "NCCL_UINT8",
    "int8": "NCCL_INT8",
    "int32": "NCCL_INT32",
    "int64": "NCCL_INT64",
    "float16": "NCCL_FLOAT16",
    "float32": "NCCL_FLOAT32",
    "float64": "NCCL_FLOAT64",
}


@dataclasses.dataclass(frozen=True)
class NcclDtype:
    """What NCCL reduces. name: the dtype; keyed: floats as ordered integers."""

    name: str
    op: ReduceOp
    keyed: bool = False


@functools.cache
def travel(name: str, op: ReduceOp) -> NcclDtype:
    """Return the conversion for an allreduce of dtype `name`, unless `halves` applies.

    >>> travel("int16", ReduceOp.SUM).name, travel("bool", ReduceOp.PRODUCT).op, travel("float32", ReduceOp.MAX).name
    ('int32', allred.Min, 'int32')
    """
    if name == "bool":
        return NcclDtype("uint8", ReduceOp.MAX if op is ReduceOp.MAX else ReduceOp.MIN)
    if name in _KEYS and op in (ReduceOp.MIN, ReduceOp.MAX):
        return NcclDtype(_KEYS[name], op, keyed=True)
    return NcclDtype(_WIDE.get(name, name), ReduceOp.SUM if op is ReduceOp.AVERAGE else op)


def halves(name: str, op: ReduceOp, wire: str) -> str:
    """Return the 16-bit dtype in which each rank receives a part to sum; "" if NCCL sums."""
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        return ""
    return wire or (name if name in HALF_DTYPES else "")


def encode(xp: Any, flat: Device, name: str, how: NcclDtype) -> Device:
    """Return the array that NCCL reduces: `flat` itself if no conversion is necessary."""
    if how.keyed:
        return _keys(xp, half_to_float32(flat, name) if name in HALF_DTYPES else flat, how)
    if name == "bool":
        return flat.view(np.uint8)
    return flat if how.name == name else flat.astype(how.name)


def decode(xp: Any, moved: Device, flat: Device, name: str, how: NcclDtype) -> None:
    """Convert the result of NCCL back into `flat`."""
    if how.keyed:
        value = _unkeyed(xp, moved, how)
        flat[...] = round_to_half(xp, value, name) if name in HALF_DTYPES else value
    elif moved is not flat and name != "bool":
        flat[...] = moved.astype(name)


def _keys(xp: Any, value: Device, how: NcclDtype) -> Device:
    """Map floats to integers of the same order: the bits of negative numbers are inverted, except the sign."""
    bits, limits = value.view(how.name), np.iinfo(how.name)
    keys = xp.where(bits < 0, bits ^ limits.max, bits)
    outermost = limits.max if how.op is ReduceOp.MAX else limits.min
    return xp.where(xp.isnan(value), xp.asarray(outermost, how.name), keys)


def _unkeyed(xp: Any, keys: Device, how: NcclDtype) -> Device:
    """Map integers back to floats. The extreme integers are the bits of a NaN."""
    limits = np.iinfo(how.name)
    return xp.where(keys < 0, keys ^ limits.max, keys).view(_FLOATS[how.name])


def combine(xp: Any, rows: Device, name: str, op: ReduceOp) -> Device:
    """Reduce 16-bit rows, one per rank, in float32; divide an average; round once."""
    wide = half_to_float32(rows.reshape(-1), name).reshape(rows.shape)
    total = wide.prod(axis=0) if op is ReduceOp.PRODUCT else wide.sum(axis=0)
    return round_to_half(xp, total / np.float32(len(rows)) if op is ReduceOp.AVERAGE else total, name)
