"""Gradients that are bit for bit the same on all ranks before they are averaged.

If the memory they lie in was averaged just before, they are averaged twice: an error, at the first step. Otherwise the
ranks most likely train on the same batch: a warning, once it has been so at three checks in a row.
"""

import weakref
from collections.abc import Sequence
from typing import Any

from allred import native
from allred.cluster import report
from allred.comm.header import mix
from allred.errors import InputError
from allred.gpu.device_arrays import leading_bytes

BITS = 32  # of what `Repeated.show` gives
_LOOKED_AT_BYTES = 2**16  # of each gradient
_IN_A_ROW = 3

_averaged: list[
    tuple[weakref.ref[Any], weakref.ref[Any]]
] = []  # who averaged last in this process, and one array of it


class Repeated:
    """Compares what ranks bring, at some steps, and remembers what came out."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._in_a_row = 0

    def show(self, values: Sequence[Any]) -> int:
        """What the ranks compare: 31 bits of a hash, 0 if all is zero, and whether someone else just averaged this."""
        heads = [leading_bytes(value, _LOOKED_AT_BYTES) for value in values if value is not None]
        if not any(start.any() for start in heads):
            return 0
        total = 0
        for hashed in native.hashes(heads):
            total = mix(total, hashed)
        return total >> 33 << 1 | self._averaged_by_another(values)

    def _averaged_by_another(self, values: Sequence[Any]) -> bool:
        here = [value for value in values if value is not None]  # as is an array that is gone
        return any(who() is not self and any(value is array() for value in here) for who, array in _averaged)

    def compare(self, shown: list[int]) -> None:
        """Every rank's `show` is known. Raises InputError for gradients that are averaged twice."""
        same = len(shown) > 1 and len(set(shown)) == 1 and shown[0] > 1
        if same and shown[0] & 1:
            raise InputError(
                f"{self._title}: these gradients are the mean over all ranks already, and would be averaged twice; use "
                "@allred.distributed.gradients on the function or wrap the optimizer, not both, and wrap it once"
            )
        self._in_a_row = self._in_a_row + 1 if same else 0
        if self._in_a_row == _IN_A_ROW:
            report.say(
                f"{self._title}: all ranks bring the same gradients, bit for bit, at {_IN_A_ROW} checks in a row. It "
                "looks as if all train on the same batches: deal them out with allred.data.batches, or by "
                "allred.rank() (or the gradients have been averaged before; once is enough)"
            )

    def remember(self, values: Sequence[Any]) -> None:
        """These are averaged now."""
        array = next((value for value in values if value is not None), None)
        _averaged[:] = [] if array is None else [(weakref.ref(self), weakref.ref(array))]
