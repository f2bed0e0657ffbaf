"""`NotInPlace`: why gradients of a step were not reduced in place, for `opt.summary()`.

Only steps 1, 2, 4, 8, ... are examined, so that the others take no time for it.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from allred import arena, arrays
from allred.comm.communicator import Communicator
from allred.comm.ops import Compression, narrows
from allred.wording import count

_IN_ARENA = ""  # the reason of a gradient that lies in the arena of this rank


class NotInPlace:
    """Number and bytes of the gradients that were not reduced in place, by reason, in the last examined step."""

    def __init__(self, compression: Compression) -> None:
        self._compression = compression
        self._step = 0
        self._found: dict[str, tuple[int, int]] = {}
        self._outside: list[tuple[int, int]] = []  # Backend.outside before the step
        self._in_place_bytes = 0  # of the communicator, before the step

    def begin(self, communicator: Communicator) -> None:
        """Call before the gradients of an examined step are reduced."""
        self._outside = communicator.backend.outside
        self._in_place_bytes = communicator.in_place_bytes

    def end(self, step: int, gradients: Iterable[Any], communicator: Communicator) -> None:
        """Call after the gradients of an examined step were reduced."""
        self._step, self._found = step, {}
        if arena.refusal():
            return
        for gradient in gradients:
            if nbytes := getattr(gradient, "nbytes", 0):  # not None, a number, or empty
                self._add(_reason(gradient, self._compression), 1, nbytes)
        tensors, nbytes = self._found.pop(_IN_ARENA, (0, 0))
        for rank, (now, before) in enumerate(zip(communicator.backend.outside, self._outside, strict=False)):
            if now[0] > before[0]:
                number, size = now[0] - before[0], now[1] - before[1]
                tensors, nbytes = tensors - number, nbytes - size
                self._add(f"not in the arena of rank {communicator.ranks[rank]}", number, size)
        if tensors > 0 and communicator.in_place_bytes == self._in_place_bytes:
            self._add("copied into buckets, because ranks had different numbers of samples", tensors, nbytes)

    def _add(self, reason: str, tensors: int, nbytes: int) -> None:
        before = self._found.get(reason, (0, 0))
        self._found[reason] = before[0] + tensors, before[1] + nbytes

    def text(self) -> str:
        """Return a line for each reason, each after a line break; "" if there is none."""
        if reason := arena.refusal():
            return f"\nnot in place: {reason}"
        return "".join(
            f"\nnot in place, step {self._step}: {count(tensors, 'tensor')}, {arrays.amount(nbytes)}: {reason}"
            for reason, (tensors, nbytes) in sorted(self._found.items(), key=lambda item: -item[1][1])
        )


def _reason(gradient: Any, compression: Compression) -> str:
    if not isinstance(gradient, np.ndarray):
        return "not a numpy array"
    if narrows(gradient.dtype, compression.value):
        return f"sent as {compression.name}"
    if gradient.nbytes < arena.MIN_BYTES:
        return f"smaller than {arena.MIN_BYTES} bytes"
    if not gradient.flags.c_contiguous:
        return "not C-contiguous"
    if not gradient.flags.writeable:
        return "read-only, so a copy was reduced"
    return arena.why_outside(gradient) or _IN_ARENA
