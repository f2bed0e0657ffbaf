"""numpy's arithmetic on host and device arrays, and conversion of 16-bit floats on the device.

cupy computes on the stream of the array's framework, so in order with the framework's own work. The host waits only for
results that are Python numbers. Device arrays hold bfloat16, which older cupy lacks, as uint16.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from allred import arrays
from allred.gpu.device_arrays import adopt, is_device, on_stream, with_kernels

HALF_DTYPES = ("float16", "bfloat16")


def storage_dtype(name: str) -> np.dtype[Any]:
    """Dtype of device arrays for elements of the dtype `name`: uint16 for bfloat16, else the dtype itself."""
    return np.dtype(np.uint16 if name == "bfloat16" else name)


def half_to_float32(bits: Any, name: str) -> Any:
    """Convert 16-bit floats of the dtype `name` to float32. bits: numpy or cupy array, bfloat16 as uint16."""
    if name == "float16":
        return bits.astype(np.float32)
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def round_to_half(xp: Any, value: Any, name: str) -> Any:
    """Round float32 or float64 to 16-bit floats of the dtype `name`, ties to even; bfloat16 as uint16.

    xp: cupy, or numpy, whose functions accept cupy arrays too.
    """
    if name == "float16":
        return value.astype(np.float32).astype(np.float16)
    bits = value.astype(np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet_nan = (bits >> np.uint32(16)) | np.uint32(0x40)
    return xp.where(xp.isnan(value), quiet_nan, rounded).astype(np.uint16)


def compute(
    function: Any, *operands: Any, wide: np.dtype[Any], dtype: np.dtype[Any] | None = None, out: Any = None
) -> Any:
    """Apply a numpy ufunc to numbers and to arrays that are all on the host or all on one GPU.

    wide: dtype of the computation. The result is `out`, or a new array of the same framework as the first array. It is
    rounded once: to the dtype of `out`, or to `dtype` if given.
    """
    first = next(filter(is_device, operands), None)
    if first is None:
        made = np.asarray(function(*operands, out=out, dtype=wide, casting="same_kind"))
        return made if dtype is None else made.astype(dtype, copy=False)
    like = adopt(first)
    with on_stream(like):
        given = [_computable(operand) if is_device(operand) else operand for operand in operands]
        if out is None:
            return like.convert(_rounded(function(*given, dtype=wide), dtype or wide), dtype or wide)
        target = adopt(out)
        if target.dtype == wide:
            function(*given, out=target.array, dtype=wide)
        else:
            target.array[...] = _rounded(function(*given, dtype=wide), target.dtype)
        return out


def _computable(value: Any) -> Any:
    found = adopt(value)
    return half_to_float32(found.array, "bfloat16") if arrays.name_of(found.dtype) == "bfloat16" else found.array


def _rounded(made: Any, dtype: np.dtype[Any]) -> Any:
    if arrays.name_of(dtype) == "bfloat16":
        return round_to_half(np, made, "bfloat16")
    return made.astype(dtype, copy=False)


def squares(parts: Sequence[tuple[Any, int, int]]) -> float:
    """Sum of squares of floats in float64, where squares of float32 never overflow; without a copy of a whole array.

    parts: (array, start, stop): elements start to stop - 1 of the array in C order.
    """
    here = [arrays.flat(value)[low:high] for value, low, high in parts if not is_device(value)]
    total = float(sum(np.einsum("i,i->", flat, flat, dtype=np.float64) for flat in here))
    there = [part for part in parts if is_device(part[0])]
    return total + squares_on_gpu(there) if there else total


def squares_on_gpu(parts: Sequence[tuple[Any, int, int]]) -> float:
    """`squares` of device arrays. The host waits for the result."""
    found, kernels = with_kernels([value for value, *_ in parts])
    flats: dict[str, list[Any]] = {}
    for one, (_, low, high) in zip(found, parts, strict=True):
        flats.setdefault(arrays.name_of(one.dtype), []).append(one.flat()[low:high])
    return float(sum(kernels.squares(some, name) for name, some in flats.items()))


def exceeds_on_gpu(values: Sequence[Any], element_bytes: int, limit: int) -> bool:
    """Whether the magnitude of any element exceeds the limit, as in native.exceeds. The host waits for the result."""
    found, kernels = with_kernels(values)
    return bool(kernels.exceeds([one.flat() for one in found], element_bytes, limit).get()[0])
