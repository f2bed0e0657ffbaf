"""`MovingWindow`: a hash of some parameters, of others in each step, which the ranks compare in the header of the step.

A comparison of all parameters (drift.py) reads them all, so it is made in some steps only. Between these steps a
window of 1024 elements moves over the parameters: a difference is found within (number of elements) / 1024 steps. The
hash takes less than a microsecond, and the ranks exchange the header anyway.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from allred import arrays, native
from allred.comm.header import hash_text, mix
from allred.fusion import Plan
from allred.gpu.device_arrays import is_device

_ELEMENTS = 1024
_PATTERN = 2**16 - 1  # the bits of a result that depend on which gradients this rank lacks, a hash of them


class MovingWindow:
    """The window over the parameters of one optimizer."""

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._starts = np.zeros(1, np.int64)  # by parameter: the number of elements before it
        self._starts_as_bytes = b""

    def hash(self, step: int, plan: Plan, leaves: list[Any], values: Sequence[Any], plain: bool) -> int:
        """Return the hash of the window of a step, below 2**64; 0 if some of its parameters are on a GPU.

        leaves, values: the parameters and their gradients. A parameter without a gradient on this rank is left out: it
        may differ between ranks. plain: whether all gradients are present.
        """
        if plan is not self._plan:
            self._plan = plan
            self._starts = np.cumsum([0, *(tensor.elements for tensor in plan.tensors)])
            self._starts_as_bytes = self._starts.tobytes()
        if plain and (found := native.hash_window(leaves, self._starts_as_bytes, step)) is not None:
            return found
        return self._hash(step, leaves, values)

    def _hash(self, step: int, leaves: list[Any], values: Sequence[Any]) -> int:
        """As `native.hash_window`, for parameters of any layout, some of them without a gradient."""
        parts, missing, left = [], [], _ELEMENTS
        at = step % max(1, -(-int(self._starts[-1]) // _ELEMENTS)) * _ELEMENTS
        first = int(np.searchsorted(self._starts, at, "right")) - 1
        start = at - self._starts[first]
        for index in range(first, len(leaves)):
            taken = min(left, int(self._starts[index + 1] - self._starts[index] - start))
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
        return total & ~_PATTERN | (hash_text(str(missing)) & _PATTERN if missing else 0)


def differ(hashes: Sequence[int]) -> bool:
    """Return whether two ranks that lack the same gradients have different parameters in their windows. hashes: of all
    ranks."""
    if len(set(hashes)) == 1:
        return False
    known = {found for found in hashes if found}
    return len({found & _PATTERN for found in known}) < len(known)
