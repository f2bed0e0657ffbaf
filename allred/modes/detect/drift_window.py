"""The drift window: each step hashes 1024 elements of the parameters, the next step the following 1024, and the ranks
compare the hash in the header of the step. drift.py compares all parameters, which takes longer, so only some steps do
it. In mode ps the window is hashed after a pull and again in the next step, which finds changes that the program makes
and the next pull would overwrite.
"""

import weakref
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


class ParameterChanges:
    """The hashes of one optimizer in mode ps. A program may give several sets of arrays, such as one of each thread.
    The hash of each set is known by the set's first array. A set that is new is compared with the last pull."""

    def __init__(self) -> None:
        self._last: tuple[int, int] | None = None  # step and hash
        self._of_set: dict[int, tuple[weakref.ref[Any], tuple[int, int]]] = {}  # by id of the first array

    def record(self, step: int, plan: Plan, leaves: list[Any]) -> None:
        """Hash the parameters after a pull. step: a number that increases, which selects the elements."""
        self._last = step, window_hash(step, plan, leaves, leaves, True)
        key, known = id(leaves[0]), self._of_set
        first = weakref.ref(leaves[0], lambda _: known.pop(key, None)) if key not in known else known[key][0]
        known[key] = first, self._last

    def find(self, plan: Plan, leaves: list[Any]) -> str:
        """Return a description of the parameters that have changed since the last pull; "" if none is known to have."""
        known = self._of_set.get(id(leaves[0]))
        pulled = self._last if known is None else known[1]
        if pulled is None or window_hash(pulled[0], plan, leaves, leaves, True) == pulled[1]:
            return ""
        return describe_window(pulled[0], plan)


def remedy(optimizer: str) -> str:
    """Return the second part of the error text for such a change."""
    return (
        "In mode ps the servers own the parameters, and the next pull would overwrite the change. To keep it, change "
        f"the parameter on worker 0 and call {optimizer}.broadcast() on all workers, or change it in the step() method "
        f"of the optimizer's class, which the servers run, or use mode sync. To discard it, call {optimizer}.pull()"
    )
