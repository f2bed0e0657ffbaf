"""The operations of one communicator, as they are noted.

Two ways lead into an operation. One that is started (comm/work.py) is noted from there until it is complete. A blocking
allreduce may take a short way in C that starts nothing in Python, so such calls are noted from outside, by `around`; if
one goes the long way all the same, the operation that it starts is noted too, and file.py finds that it is the same.
Where there is no timeline, nothing is wrapped.
"""

import operator
import time
from collections.abc import Callable
from typing import Any

from allred.compression import Compression
from allred.timeline.recorder import Recorder

_nbytes = operator.attrgetter("nbytes")


class Operation:
    """One that is under way."""

    __slots__ = ("agreed", "nbytes", "start", "title")

    def __init__(self, title: str) -> None:
        self.title, self.start, self.agreed, self.nbytes = title, time.perf_counter_ns(), 0, 0

    def agree(self) -> None:
        """All ranks' headers are there."""
        self.agreed = time.perf_counter_ns()


class Track:
    """Of one communicator. members: which ranks they are, in words that are the same on these."""

    def __init__(self, recorder: Recorder, members: str) -> None:
        self._add, self._members = recorder.add, members

    def end(self, operation: Operation) -> None:
        """It is complete."""
        kind, _, name = operation.title.partition(" '")
        start, agreed, nbytes = operation.start, operation.agreed, operation.nbytes
        self._add(("operation", self._members, kind, name[:-1], start, agreed, time.perf_counter_ns(), nbytes))

    def waited(self, title: str, start_s: float, end_s: float) -> None:
        """The caller has waited for an operation, so long by time.perf_counter()."""
        self._add(("span", "", "wait", title, int(start_s * 1e9), int(end_s * 1e9), 0))

    def around(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A blocking collective, `function(value, in_place, op, name, compression)`, with its calls noted. Between two
        allreduces of a MiB all of it comes from memory, so it does as little as can be."""
        add, now, what = self._add, time.perf_counter_ns, (self._members, kind)

        def noted(value: Any, in_place: bool, op: Any, name: str, compression: Any = Compression.none) -> Any:
            start = now()
            try:
                return function(value, in_place, op, name, compression)
            finally:
                end = now()
                try:
                    add((what, name, start, end, value.nbytes))
                except AttributeError:
                    add((what, name, start, end, _bytes_of(value)))

        return noted


def _bytes_of(values: Any) -> int:
    """Of a list of arrays; 0 for what is none."""
    try:
        return sum(map(_nbytes, values))
    except (AttributeError, TypeError):
        return 0
