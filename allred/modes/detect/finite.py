"""Gradients that are not finite: seen on the rank that has them, before the sum makes them everyone's.

Looking at the sum instead would cost the same pass over memory, and could tell neither the rank nor leave the gradients
as they were. What it would see and the parts do not show, a sum of large numbers that overflows, is looked for only
where a rank has numbers that large: magnitudes of which so many as there are ranks could reach infinity.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from allred import arrays, native
from allred.arrays import Array
from allred.comm.header import rank_list
from allred.compression import Compression
from allred.fusion.plan import Plan
from allred.gpu.arithmetic import exceeds_on_gpu
from allred.gpu.device_arrays import is_device, to_host

# A rank's flags.
NONFINITE = 1
LARGE = 2  # finite, but the sum may not be

POLICIES = ("raise", "skip", "ignore")

# Of each dtype: the bytes of an element, and, as native.exceeds has it, infinity and the bits of the mantissa.
_FORMATS = {
    "float16": (2, 0x7C00, 10),
    "bfloat16": (2, 0x7F80, 7),
    "float32": (4, 0x7F800000, 23),
    "float64": (8, 0x7FF00000, 20),  # its upper half
}
# The largest number that travels finite as another type, in the bits of its own dtype.
_LARGEST = {
    ("float32", Compression.fp16): 0x477FE000,
    ("float64", Compression.fp16): 0x40EFFC00,
    ("float32", Compression.bf16): 0x7F7F0000,
    ("float64", Compression.bf16): 0x47EFE000,
}
_NAMED = 3  # tensors in an error; the rest are counted


@functools.cache
def _limits(dtype: np.dtype[Any], ranks: int, compression: Compression) -> tuple[int, int, int]:
    """Bytes of an element; the largest magnitude whose sum over the ranks is finite for sure; the largest finite."""
    name = arrays.name_of(dtype)
    element_bytes, infinity, mantissa = _FORMATS[name]
    doublings = 1 + (ranks - 1).bit_length() if ranks > 1 else 0  # one more than it takes: sums are rounded
    largest = _LARGEST.get((name, compression), infinity - 1)
    return element_bytes, largest - (doublings << mantissa), infinity - 1


def scan(plan: Plan, values: Sequence[Any], ranks: int, compression: Compression = Compression.none) -> int:
    """The flags of this rank's gradients, which are to travel so and be summed over so many ranks."""
    flags = 0
    for dtype, indices in plan.floats.items():
        element_bytes, large, largest = _limits(dtype, ranks, compression)
        there = [value for i in indices if is_device(value := values[i])]
        if there and exceeds_on_gpu(there, element_bytes, large):
            flags |= NONFINITE if exceeds_on_gpu(there, element_bytes, largest) else LARGE
        parts = _readable(values, [i for i in indices if not is_device(values[i])] if there else indices)
        if native.exceeds(parts, element_bytes, large):
            flags |= NONFINITE if native.exceeds(parts, element_bytes, largest) else LARGE
    return flags


def looks(plan: Plan) -> Callable[[list[Array]], bool]:
    """What says whether contiguous gradients of such a plan, all of them there, are not all finite.

    Mode ps takes this pass over memory before it pushes anything. To look at each cell on its way up would take a sixth
    off a step with 100 MB, but a server would have applied the cells before: of gradients that explode, huge ones.
    """

    def of(dtype: np.dtype[Any], indices: list[int]) -> Callable[[list[Array]], bool]:
        element_bytes, _, largest = _limits(dtype, 1, Compression.none)
        if len(indices) == len(plan.tensors):
            return lambda values: native.exceeds(values, element_bytes, largest)
        return lambda values: native.exceeds([values[i] for i in indices], element_bytes, largest)

    each = [of(dtype, indices) for dtype, indices in plan.floats.items()]
    return each[0] if len(each) == 1 else lambda values: any(look(values) for look in each)


def _readable(values: Sequence[Any], indices: list[int]) -> list[Array]:
    """Those values that are there, of one dtype, as memory in one piece."""
    present = [value for i in indices if (value := values[i]) is not None]
    if present and arrays.name_of(present[0].dtype) == "bfloat16":
        present = [arrays.as_buffer(value) for value in present]
    return [value if value.flags.forc else arrays.flat(value) for value in present]


def describe(plan: Plan, values: Sequence[Any]) -> dict[str, str]:
    """Name of each gradient that is not finite, and how it is not."""
    found = {}
    for index in sorted(i for indices in plan.floats.values() for i in indices):
        value = to_host(values[index])
        if value is not None and not (finite := np.isfinite(value)).all():
            bad = np.argwhere(~finite)
            place = f" at {bad[0].tolist()}" if value.ndim else ""
            count = f"{len(bad)} of {value.size} elements, the first" if value.size > 1 else "it"
            found[plan.tensors[index].name] = f"{count} is {float(value[tuple(bad[0])])}{place}"
    return found


def verdict(found: list[dict[str, str]], numbers: Sequence[int]) -> str:
    """What is not finite on which ranks, in words, from each rank's `describe`; the same on every rank.

    numbers: of the ranks."""
    names = list(dict.fromkeys(name for each in found for name in each))
    words = []
    for name in names[:_NAMED]:
        having = [index for index, each in enumerate(found) if name in each]
        ranks = [numbers[index] for index in having]
        words.append(f"'{name}' on {rank_list(ranks)} ({found[having[0]][name]})")
    more = f"; and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"gradients are not finite: {'; '.join(words)}{more}"


def overflow(plan: Plan, values: Sequence[Any], compression: Compression) -> str:
    """What became infinite in the sum of finite gradients, in words; "" if nothing did. All ranks have these values."""
    if not scan(plan, values, ranks=1):
        return ""
    names = list(describe(plan, values))
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    dtype = next(tensor.dtype for tensor in plan.tensors if tensor.name == names[0])
    wire = (arrays.name_of(dtype), compression) in _LARGEST
    holds = f"{arrays.DTYPES[compression.value]}, as which it travels," if wire else arrays.name_of(dtype)
    return (
        f"every rank's gradient is finite, but the sum over the ranks of '{names[0]}'{more} is not, it is more than "
        f"{holds} can hold; the gradients have been overwritten"
    )
