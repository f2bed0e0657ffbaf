"""Finds gradients that are not finite, and the ranks that have them.

If the ranks share memory, the reduction checks its results in the pass that writes them (csrc/operation.h). It does not
write a block that is not finite, so afterwards each rank finds its own numbers that caused this.

Otherwise each rank scans its gradients before the reduction. A sum of large finite numbers can overflow too. It is
scanned only if a rank has numbers so large that the sum over all ranks could reach infinity.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from allred import arrays, native, nest
from allred.arrays import Array
from allred.comm.ops import Compression
from allred.fusion import Plan
from allred.gpu.device_arrays import exceeds_on_gpu, is_device, to_host
from allred.modes.step_header import LARGE, NONFINITE
from allred.wording import named

# By dtype: bytes of an element; bits of infinity and of the mantissa as native.exceeds uses them.
_FORMATS = {
    "float16": (2, 0x7C00, 10),
    "bfloat16": (2, 0x7F80, 7),
    "float32": (4, 0x7F800000, 23),
    "float64": (8, 0x7FF00000, 20),  # the upper half
    "complex64": (4, 0x7F800000, 23),  # of a part
    "complex128": (8, 0x7FF00000, 20),
}
# The bits of the largest number of a dtype that is finite in the wire dtype.
_LARGEST = {
    ("float32", Compression.fp16): 0x477FE000,
    ("float64", Compression.fp16): 0x40EFFC00,
    ("float32", Compression.bf16): 0x7F7F0000,
    ("float64", Compression.bf16): 0x47EFE000,
    **{("float32", each): 0x7EFFFFFF for each in (Compression.int8, Compression.int4)},  # below 2**127
    **{("float64", each): 0x47DFFFFF for each in (Compression.int8, Compression.int4)},
}
_NAMED = 3  # tensors named in an error; the others are counted


@functools.cache
def _limits(dtype: np.dtype[Any], ranks: int, compression: Compression) -> tuple[int, int, int]:
    """Return (bytes of an element, largest magnitude whose sum over the ranks is surely finite, largest finite one)."""
    name = arrays.name_of(dtype)
    element_bytes, infinity, mantissa = _FORMATS[name]
    doublings = 1 + (ranks - 1).bit_length() if ranks > 1 else 0  # one more than needed: sums are rounded
    largest = _LARGEST.get((name, compression), infinity - 1)
    return element_bytes, largest - (doublings << mantissa), infinity - 1


def scan(
    plan: Plan, values: Sequence[Any], ranks: int, compression: Compression = Compression.none, plain: bool = False
) -> int:
    """Return NONFINITE, LARGE (step_header.py) or 0 for this rank's gradients, None among them allowed, for a sum over
    `ranks` ranks. plain: whether all values are contiguous arrays on the host."""
    flags = 0
    for dtype, indices in plan.floats.items():
        element_bytes, large, largest = _limits(dtype, ranks, compression)
        parts = list(values) if len(indices) == len(values) else [values[i] for i in indices]
        if not plain:
            there = [value for value in parts if is_device(value)]
            if there and exceeds_on_gpu(there, element_bytes, large):
                flags |= NONFINITE if exceeds_on_gpu(there, element_bytes, largest) else LARGE
            parts = [value for value in parts if value is not None and not is_device(value)]
            parts = [value if value.flags.forc else arrays.flat(value) for value in parts]
        if arrays.name_of(dtype) == "bfloat16":
            parts = [arrays.as_buffer(value) for value in parts]
        if native.exceeds(parts, element_bytes, large):
            flags |= NONFINITE if native.exceeds(parts, element_bytes, largest) else LARGE
    return flags


def nonfinite_scanner(plan: Plan) -> Callable[[list[Array]], bool]:
    """Return a function that takes the contiguous gradients of `plan` and returns whether any is not finite.

    Mode ps scans all gradients before it pushes the first: a server applies each part at once, so a scan of each part
    as it is sent would be too late for the parts before it.
    """

    def scanner(dtype: np.dtype[Any], indices: list[int]) -> Callable[[list[Array]], bool]:
        element_bytes, _, largest = _limits(dtype, 1, Compression.none)
        if len(indices) == len(plan.tensors):
            return lambda values: native.exceeds(values, element_bytes, largest)
        return lambda values: native.exceeds([values[i] for i in indices], element_bytes, largest)

    scanners = [scanner(dtype, indices) for dtype, indices in plan.floats.items()]
    return scanners[0] if len(scanners) == 1 else lambda values: any(scan(values) for scan in scanners)


def describe(plan: Plan, values: Sequence[Any]) -> dict[str, str]:
    """Return {name: description} of the gradients that are not finite."""
    found = {}
    for index in sorted(i for indices in plan.floats.values() for i in indices):
        value = to_host(values[index])
        if value is not None and not (finite := np.isfinite(value)).all():
            bad = np.argwhere(~finite)
            place = f" at {bad[0].tolist()}" if value.ndim else ""
            count = f"{len(bad)} of {value.size} elements, the first" if value.size > 1 else "it"
            number = value[tuple(bad[0])]
            text = number.item() if value.dtype.kind == "c" else float(number)  # bfloat16 has no item()
            found[plan.tensors[index].name] = f"{count} is {text}{place}"
    return found


def verdict(found: list[dict[str, str]], numbers: Sequence[int]) -> str:
    """Describe which gradients are not finite on which ranks; the same text on every rank. found: the result of
    `describe` of each rank. numbers: the numbers of these ranks."""
    names = list(dict.fromkeys(name for each in found for name in each))
    words = []
    for name in names[:_NAMED]:
        having = [index for index, each in enumerate(found) if name in each]
        ranks = [numbers[index] for index in having]
        words.append(f"{nest.quoted(name)} on {named('rank', ranks)} ({found[having[0]][name]})")
    more = f"; and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"gradients are not finite: {'; '.join(words)}{more}"


def overflow(plan: Plan, values: Sequence[Any], compression: Compression) -> str:
    """Describe a sum of finite gradients that is not finite; "" if all are. values: the reduced gradients."""
    if not scan(plan, values, ranks=1):
        return ""
    described = describe(plan, values)
    found = [index for index, tensor in enumerate(plan.tensors) if tensor.name in described]
    return overflow_of(plan, found[0], compression, f" and {len(found) - 1} more" if len(found) > 1 else "")


def overflow_of(plan: Plan, index: int, compression: Compression, more: str = "") -> str:
    """As `overflow`, for the sum of the gradient with this index."""
    name, _, dtype = plan.tensors[index]
    wire = (arrays.name_of(dtype), compression) in _LARGEST
    sent_as = f"{arrays.DTYPES[compression.value]}, the wire dtype"
    if compression.is_quantized:
        sent_as = f"{compression.name} between hosts, 2**127"
    limit = sent_as if wire else arrays.name_of(dtype)
    return (
        f"every rank's gradient is finite, but the sum over the ranks of {nest.quoted(name)}{more} is not: it exceeds "
        f"the largest number of {limit}; the gradients may be overwritten"
    )
