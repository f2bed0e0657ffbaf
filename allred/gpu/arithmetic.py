"""numpy's arithmetic on arrays of any kind: numpy's, and on a GPU cupy's, torch's and others'.

What is computed on a GPU is computed by cupy on the stream of the array's framework, so in its order, and in memory of
that stream. The host waits for nothing but for the numbers that it is given.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from allred import arrays
from allred.gpu.halves import narrow, widen
from allred.gpu.values import adopt, following, is_device, on_stream


def compute(
    function: Any, *operands: Any, wide: np.dtype[Any], dtype: np.dtype[Any] | None = None, out: Any = None
) -> Any:
    """What one of numpy's functions makes of arrays of one place, and numbers.

    It computes in the dtype `wide`. The result, `out` or a new array of the kind of the first operand that is one, is
    rounded once, to the dtype of `out`, or to `dtype`, or not at all.
    """
    first = next(filter(is_device, operands), None)
    if first is None:
        made = np.asarray(function(*operands, out=out, dtype=wide, casting="same_kind"))
        return made if dtype is None else made.astype(dtype, copy=False)
    like = adopt(first)
    with on_stream(like):
        given = [_readable(operand) if is_device(operand) else operand for operand in operands]
        if out is None:
            return like.kind(_rounded(function(*given, dtype=wide), dtype or wide), dtype or wide)
        target = adopt(out)
        if target.dtype == wide:
            function(*given, out=target.array, dtype=wide)
        else:
            target.array[...] = _rounded(function(*given, dtype=wide), target.dtype)
        return out


def _readable(value: Any) -> Any:
    found = adopt(value)
    return widen(found.array, "bfloat16") if arrays.name_of(found.dtype) == "bfloat16" else found.array


def _rounded(made: Any, dtype: np.dtype[Any]) -> Any:
    """As cupy's arrays hold it."""
    return narrow(np, made, "bfloat16") if arrays.name_of(dtype) == "bfloat16" else made.astype(dtype, copy=False)


def squares(parts: Sequence[tuple[Any, int, int]]) -> float:
    """The sum of squares of floats, in float64, where those of float32 never overflow; without a copy of the whole.

    parts: arrays, and which elements of theirs, from one to before another, in C order.
    """
    here = [arrays.flat(value)[low:high] for value, low, high in parts if not is_device(value)]
    total = float(sum(np.einsum("i,i->", flat, flat, dtype=np.float64) for flat in here))
    there = [part for part in parts if is_device(part[0])]
    return total + squares_on_gpu(there) if there else total


def squares_on_gpu(parts: Sequence[tuple[Any, int, int]]) -> float:
    """The same of arrays on the GPU; the host waits for it."""
    found, launches = following([value for value, *_ in parts])
    flats: dict[str, list[Any]] = {}
    for one, (_, low, high) in zip(found, parts, strict=True):
        flats.setdefault(arrays.name_of(one.dtype), []).append(one.flat()[low:high])
    return float(sum(launches.squares(some, name) for name, some in flats.items()))


def exceeds_on_gpu(values: Sequence[Any], element_bytes: int, limit: int) -> bool:
    """Whether some element's magnitude is beyond the limit, as native.exceeds has it; the host waits for the answer."""
    found, launches = following(values)
    return bool(launches.exceeds([one.flat() for one in found], element_bytes, limit).get()[0])
