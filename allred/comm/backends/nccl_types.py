"""As what device arrays travel through NCCL, so that results are those of the other backends (ops.py says what these
are). Pure functions of arrays; `xp` is cupy, or numpy where they are tested. bfloat16 is uint16 here, by its name.

    bool                            as uint8: Min and Product are its minimum, Max its maximum
    int16                           as int32; what is cut off is how it wraps around
    floats, Min and Max             as integers of the same order, NaN the outermost: NCCL's own drop a NaN
    16-bit floats, other ops        as they are: each rank adds up a part in float32 and rounds it once (`halves`)
    everything else                 as it is
"""

import dataclasses
import functools
from typing import Any

import numpy as np

from allred.comm.ops import ReduceOp
from allred.gpu.halves import HALVES, narrow, widen

Device = Any  # a cupy array
_WIDE = {"bool": "uint8", "int16": "int32"}
_KEYS = {"float16": "int32", "bfloat16": "int32", "float32": "int32", "float64": "int64"}
_FLOATS = {"int32": "float32", "int64": "float64"}
TYPES = {  # that NCCL has, as cupy calls them
    "uint8": "NCCL_UINT8",
    "int8": "NCCL_INT8",
    "int32": "NCCL_INT32",
    "int64": "NCCL_INT64",
    "float16": "NCCL_FLOAT16",
    "float32": "NCCL_FLOAT32",
    "float64": "NCCL_FLOAT64",
}


@dataclasses.dataclass(frozen=True)
class Travel:
    """`name`: of the dtype that NCCL reduces, and how. `keyed`: floats as ordered integers."""

    name: str
    op: ReduceOp
    keyed: bool = False


@functools.cache
def travel(name: str, op: ReduceOp) -> Travel:
    """For an allreduce of this dtype, other than those of `halves`.

    >>> travel("int16", ReduceOp.SUM).name, travel("bool", ReduceOp.PRODUCT).op, travel("float32", ReduceOp.MAX).name
    ('int32', allred.Min, 'int32')
    """
    if name == "bool":
        return Travel("uint8", ReduceOp.MAX if op is ReduceOp.MAX else ReduceOp.MIN)
    if name in _KEYS and op in (ReduceOp.MIN, ReduceOp.MAX):
        return Travel(_KEYS[name], op, keyed=True)
    return Travel(_WIDE.get(name, name), ReduceOp.SUM if op is ReduceOp.AVERAGE else op)


def halves(name: str, op: ReduceOp, wire: str) -> str:
    """The 16-bit type in which floats go to one rank each part, to be added up there; "" where they do not."""
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        return ""
    return wire or (name if name in HALVES else "")


def encode(xp: Any, flat: Device, name: str, how: Travel) -> Device:
    """What travels: `flat` itself where nothing has to be changed."""
    if how.keyed:
        return _keys(xp, widen(flat, name) if name in HALVES else flat, how)
    if name == "bool":
        return flat.view(np.uint8)
    return flat if how.name == name else flat.astype(how.name)


def decode(xp: Any, moved: Device, flat: Device, name: str, how: Travel) -> None:
    """Put what came back where it belongs."""
    if how.keyed:
        value = _unkeyed(xp, moved, how)
        flat[...] = narrow(xp, value, name) if name in HALVES else value
    elif moved is not flat and name != "bool":
        flat[...] = moved.astype(name)


def _keys(xp: Any, value: Device, how: Travel) -> Device:
    """Integers in the order of floats: those of negative numbers run backwards, so their magnitude is turned around."""
    bits, limits = value.view(how.name), np.iinfo(how.name)
    keys = xp.where(bits < 0, bits ^ limits.max, bits)
    outermost = limits.max if how.op is ReduceOp.MAX else limits.min
    return xp.where(xp.isnan(value), xp.asarray(outermost, how.name), keys)


def _unkeyed(xp: Any, keys: Device, how: Travel) -> Device:
    """The floats again. The outermost integers are no number's, and their bits those of a NaN."""
    limits = np.iinfo(how.name)
    return xp.where(keys < 0, keys ^ limits.max, keys).view(_FLOATS[how.name])


def combine(xp: Any, rows: Device, name: str, op: ReduceOp) -> Device:
    """The reduction of 16-bit rows, a rank's each, in float32, rounded once; an average is divided before that."""
    wide = widen(rows.reshape(-1), name).reshape(rows.shape)
    total = wide.prod(axis=0) if op is ReduceOp.PRODUCT else wide.sum(axis=0)
    return narrow(xp, total / np.float32(len(rows)) if op is ReduceOp.AVERAGE else total, name)
