"""The drift window: each step hashes 1024 elements of the parameters, the next step the following 1024, and the ranks
compare the hash in the header of the step. drift.py compares all parameters, which takes longer, so only some steps do
it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from allred import arrays, native
from allred.arrays import Array
from allred.comm.header import hash_text, mix
from allred.fusion import Plan
from allred.gpu.device_arrays import is_device

_ELEMENTS = 1024
_MISSING_BITS = 2**16 - 1  # low bits: a hash of the indices of the gradients that this rank lacks


def window_hash(step: int, plan: Plan, leaves: list[Any], values: Sequence[Any], plain: bool) -> int:
    """Return the hash of the window of a step, below 2**64; 0 if some of its parameters are on a GPU.

    leaves, values: the parameters and their gradients. A parameter without a gradient on this rank is left out: it may
    differ between ranks. plain: whether all gradients are present.
    """
    if plain and (found := native.hash_window(leaves, plan.starts, step)) is not None:
        return found
    starts = np.frombuffer(plan.starts, np.int64)
    parts, missing, left = [], [], _ELEMENTS
    at = _start(step, starts)
    first = int(np.searchsorted(starts, at, "right")) - 1
    start = at - starts[first]
    for index in range(first, len(leaves)):
        taken = min(left, int(starts[index + 1] - starts[index] - start))
        if taken > 0 and values[index] is None:
            missing.append(index)
        elif taken > 0:
            if is_device(leaves[index]):
                return 0
            parts.append(arrays.as_bytes(np.asarray(leaves[index]).flat[start : start + taken]))
        left, start = left - max(taken, 0), 0
        if left == 0:
            break
    total = 0
    for found in native.hashes(parts):
        total = mix(total, found)
    return total & ~_MISSING_BITS | (hash_text(str(missing)) & _MISSING_BITS if missing else 0)


def _start(step: int, starts: Array) -> int:
    return step % max(1, -(-int(starts[-1]) // _ELEMENTS)) * _ELEMENTS


def describe_window(step: int, plan: Plan) -> str:
    """Name the parameters of the window of a step."""
    starts = np.frombuffer(plan.starts, np.int64)
    start = _start(step, starts)
    stop = min(start + _ELEMENTS, int(starts[-1]))
    first, last = (int(np.searchsorted(starts, at, "right")) - 1 for at in (start, stop - 1))
    names = [tensor.name for tensor in plan.tensors[first : last + 1] if tensor.elements]
    more = f" or one of {len(names) - 1} more" if len(names) > 1 else ""
    return f"parameter '{names[0]}'{more}"


def windows_differ(hashes: Sequence[int]) -> bool:
    """Return whether ranks that lack the same gradients have different hashes. hashes: by rank."""
    if len(set(hashes)) == 1:
        return False
    known = {found for found in hashes if found}
    return len({found & _MISSING_BITS for found in known}) < len(known)
