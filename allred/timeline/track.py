"""The operations of one communicator, as they are noted.

One that is started (comm/work.py) is noted from there until it is complete. If a call that blocks has started it, the
beginning of that call is noted before, and file.py finds that they are one. A blocking allreduce on the fast
path in C (csrc/segment_fast.c) starts nothing in Python: C records it, and `gather` fetches the records.
"""

import time
from collections.abc import Callable

from allred.timeline.recorder import Recorder


class Operation:
    """One that is under way."""

    __slots__ = ("agreed", "end", "nbytes", "start", "title")

    def __init__(self, title: str) -> None:
        self.title, self.start, self.agreed, self.end, self.nbytes = title, time.perf_counter_ns(), 0, 0, 0

    def agree(self) -> None:
        """All ranks' headers are there."""
        self.agreed = time.perf_counter_ns()


class Track:
    """Of one communicator. members: which ranks they are, in words that are the same on these."""

    def __init__(self, recorder: Recorder, members: str) -> None:
        self._recorder, self._add, self._members = recorder, recorder.add, members

    def call(self, kind: str) -> None:
        """A blocking call begins: the operation of this kind that is started next is its own."""
        self._add(("call", self._members, kind, time.perf_counter_ns()))

    def end(self, operation: Operation) -> None:
        """It is complete."""
        kind, _, name = operation.title.partition(" '")
        start, agreed, nbytes = operation.start, operation.agreed, operation.nbytes
        operation.end = time.perf_counter_ns()
        self._add(("operation", self._members, kind, name[:-1], start, agreed, operation.end, nbytes))

    def waited(self, operation: Operation, start_s: float) -> None:
        """The caller has waited for one, from a time.perf_counter() on until it was complete, or in vain until now."""
        end = operation.end or time.perf_counter_ns()
        self._add(("span", "", "wait", operation.title, int(start_s * 1e9), end, 0))

    def gather(self, noted: Callable[[], tuple[list[str], bytes]]) -> None:
        """From now on fetch what C has noted, names and rows, each time before the file is written."""

        def fetch() -> None:
            names, rows = noted()
            if rows:
                self._add(("calls", self._members, names, rows))

        self._recorder.sources.append(fetch)
