"""The operations of one communicator, as they are noted: numbered in the order in which they were started, which is the
same on all ranks, so that the numbers say which of them belong together.

Two ways lead into an operation. One that is started (comm/work.py) is noted from there until it is complete. A
blocking allreduce may take a short way in C that starts nothing in Python: `around` notes such calls from outside, and
if they go the long way all the same, it is one operation. Where there is no timeline, nothing is wrapped.
"""

import operator
import time
from collections.abc import Callable
from typing import Any

from numpy import ndarray

from allred.compression import Compression
from allred.timeline.recorder import Recorder

_nbytes = operator.attrgetter("nbytes")


class Operation:
    """One that is under way; `inside` a call that notes it itself, or not."""

    __slots__ = ("agreed", "inside", "nbytes", "number", "start", "title")

    def __init__(self, title: str, number: int, inside: bool) -> None:
        self.title, self.number, self.inside = title, number, inside
        self.start, self.agreed, self.nbytes = time.perf_counter_ns(), 0, 0

    def agree(self) -> None:
        """All ranks' headers are there."""
        self.agreed = time.perf_counter_ns()


_NONE = Operation("", -1, inside=True)


class Track:
    """Of one communicator. members: which ranks they are, in words that are the same on these."""

    def __init__(self, recorder: Recorder, members: str) -> None:
        self._add, self._members = recorder.add, members
        self._number = 0  # of the operation that comes next
        self._inner: Operation | None = None  # of a call that is noted from outside; _NONE if it has started none yet

    def begin(self, title: str) -> Operation:
        """An operation is started."""
        if self._inner is not None:
            self._inner = Operation(title, self._number - 1, inside=True)
            return self._inner
        self._number += 1
        return Operation(title, self._number - 1, inside=False)

    def end(self, operation: Operation) -> None:
        """It is complete."""
        if not operation.inside:
            kind, _, name = operation.title.partition(" ")
            number, start, agreed, nbytes = operation.number, operation.start, operation.agreed, operation.nbytes
            end = time.perf_counter_ns()
            self._add(("operation", self._members, number, kind, name[1:-1], start, agreed, end, nbytes))

    def waited(self, title: str, start_s: float, end_s: float) -> None:
        """The caller has waited for an operation, so long by time.perf_counter()."""
        self._add(("span", "", "wait", title, int(start_s * 1e9), int(end_s * 1e9), 0))

    def around(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A blocking collective, `function(value, in_place, op, name, compression)`, with its calls noted."""
        add, members, now = self._add, self._members, time.perf_counter_ns

        def noted(value: Any, in_place: bool, op: Any, name: str, compression: Any = Compression.none) -> Any:
            number = self._number
            self._number = number + 1
            self._inner = _NONE
            start = now()
            try:
                result = function(value, in_place, op, name, compression)
                end, agreed = now(), self._inner.agreed
            finally:
                self._inner = None
            nbytes = value.nbytes if type(value) is ndarray else _bytes_of(value)
            plain = name if type(name) is str else str(name)
            add(("call", members, number, kind, plain, start, agreed, end, nbytes))
            return result

        return noted


def _bytes_of(value: Any) -> int:
    """Of an array, or of a list of them; 0 for what is none."""
    try:
        return sum(map(_nbytes, value)) if isinstance(value, (list, tuple)) else int(value.nbytes)
    except AttributeError:
        return 0
