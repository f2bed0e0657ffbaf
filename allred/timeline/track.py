"""Records the operations of one communicator.

A started operation (comm/work.py) is recorded from its start until it is complete. If a blocking call starts it, the
start of the call is recorded before, and rank_file.py joins the two. A blocking allreduce on the fast path in C
(csrc/segment_fast.c) starts nothing in Python: C records it, and `gather` fetches these records.
"""

import time
from collections.abc import Callable

from allred.timeline.recorder import Recorder


class Operation:
    """Times of an operation in progress."""

    __slots__ = ("agreed", "end", "nbytes", "start", "title")

    def __init__(self, title: str) -> None:
        self.title, self.start, self.agreed, self.end, self.nbytes = title, time.perf_counter_ns(), 0, 0, 0

    def agree(self) -> None:
        """The headers of all ranks have arrived."""
        self.agreed = time.perf_counter_ns()


class Track:
    """Records the operations of one communicator. members: its ranks as text, the same on all of them."""

    def __init__(self, recorder: Recorder, members: str) -> None:
        self._recorder, self._add, self._members = recorder, recorder.add, members

    def call(self, kind: str) -> None:
        """A blocking call begins; it starts the next operation of this kind."""
        self._add(("call", self._members, kind, time.perf_counter_ns()))

    def end(self, operation: Operation) -> None:
        """Record a complete operation."""
        kind, _, name = operation.title.partition(" '")
        start, agreed, nbytes = operation.start, operation.agreed, operation.nbytes
        operation.end = time.perf_counter_ns()
        self._add(("operation", self._members, kind, name[:-1], start, agreed, operation.end, nbytes))

    def waited(self, operation: Operation, start_s: float) -> None:
        """Record a wait from `start_s` (time.perf_counter()) until the operation was complete, or until now."""
        end = operation.end or time.perf_counter_ns()
        self._add(("span", "", "wait", operation.title, int(start_s * 1e9), end, 0))

    def gather(self, noted: Callable[[], tuple[list[str], bytes]]) -> None:
        """Call `noted` before each write of the file; it returns names and rows of the records in C."""

        def fetch() -> None:
            names, rows = noted()
            if rows:
                self._add(("calls", self._members, names, rows))

        self._recorder.sources.append(fetch)
