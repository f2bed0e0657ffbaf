"""Records the timeline of this process, its spans and the operations of its communicators, and writes it to a file.

A record is a tuple of strings and integers; times are nanoseconds of this process's clock, time.perf_counter_ns().

    begin      about: a dict, see rank_file.RankTimeline
    clock      time, offset of the chief's clock, error bound
    span       row, kind, name, start, end, bytes: a phase of a thread; the spans of a row nest
    operation  members, kind, name, start, agreed, end, bytes: of a communicator, from its start until it was complete;
               agreed: when all headers had arrived, or 0 if unknown
    call       members, kind, start: a blocking call; it starts the next operation of this kind
    calls      members, names, rows: blocking allreduces that C has recorded (ROW); some rows are starts like `call`
    end        time

Recording appends to a list. A thread writes the list ten times per second as a chunk: length, CRC-32, marshalled
records. A rank that is killed loses only its last records, and a file system that stalls does not stall training.
"""

import contextlib
import marshal
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from allred import log
from allred.runtime import process_end

MAGIC = b"allred timeline 1\n"
CHUNK = struct.Struct("<II")  # length, CRC-32
ROW = struct.Struct("<qqqII")  # start; end, or 0 if an operation continues it; bytes; index into names; grouped
_MARSHAL_VERSION = 4  # readable by every Python since 3.4
_WRITE_S = 0.1
_LAST_WRITE_S = 2.0  # limit at the end of the program, if the file system stalls

Record = tuple[Any, ...]


class Recorder:
    """Recorder of this process; creates or truncates the file `path`. Raises OSError."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        self._records: list[Record] = []
        self.sources: list[Callable[[], None]] = []  # called before each write: add records that were kept elsewhere
        self.add: Callable[[Record], None] = self._records.append
        self._process = os.getpid()
        self._failed = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._write_until_closed, name="allred-timeline", daemon=True)

    def begin(self, about: dict[str, Any]) -> None:
        self.add(("begin", about))
        self._write(MAGIC)
        self._write_records()
        self._thread.start()
        process_end.register(self.close)

    def close(self) -> None:
        """Write the remaining records and stop. Does nothing in a forked child."""
        if os.getpid() != self._process:
            return
        process_end.unregister(self.close)
        self.add(("end", time.perf_counter_ns()))
        self._closing.set()
        self._thread.join(_LAST_WRITE_S)

    def give_up(self) -> None:
        """Delete the file. Only before `begin`."""
        os.close(self._file)
        os.unlink(self._path)

    def _write_until_closed(self) -> None:
        while not self._closing.wait(_WRITE_S):
            self._write_records()
        self._write_records()
        os.close(self._file)

    def _write_records(self) -> None:
        for source in self.sources:
            source()
        count = len(self._records)  # other threads may append meanwhile
        records = self._records[:count]
        del self._records[:count]
        if records and not self._failed:
            data = marshal.dumps(records, _MARSHAL_VERSION)
            self._write(CHUNK.pack(len(data), zlib.crc32(data)) + data)

    def _write(self, data: bytes) -> None:
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            self._failed = True
            log.rank_warning(
                f"cannot write {self._path}: {error.strerror}; the timeline of this rank ends here, the program "
                "continues"
            )


current: Recorder | None = None


def install(recorder: Recorder | None) -> None:
    """Set the recorder that `span` uses; None: no timeline. Closes the previous one."""
    global current
    if current is not None and current is not recorder:
        current.close()
    current = recorder


class _TimedSpan:
    __slots__ = ("_add", "_kind", "_name", "_nbytes", "_row", "_start")

    def __init__(self, add: Callable[[Record], None], row: str, kind: str, name: str, nbytes: int) -> None:
        self._add, self._row, self._kind, self._name, self._nbytes = add, row, kind, str(name), nbytes

    def __enter__(self) -> None:
        self._start = time.perf_counter_ns()

    def __exit__(self, *_: object) -> None:
        self._add(("span", self._row, self._kind, self._name, self._start, time.perf_counter_ns(), self._nbytes))


NO_SPAN = contextlib.nullcontext()


def span(kind: str, name: str = "", nbytes: int = 0, row: str = "") -> AbstractContextManager[None]:
    """A context manager that records a span, if there is a timeline. row: "" is the training thread.

    >>> with span("apply", "layer 1", nbytes=4096):
    ...     pass
    """
    return NO_SPAN if current is None else _TimedSpan(current.add, row, kind, name, nbytes)


class Operation:
    """Times of an operation in progress."""

    __slots__ = ("agreed", "end", "nbytes", "start", "title")

    def __init__(self, title: str) -> None:
        self.title, self.start, self.agreed, self.end, self.nbytes = title, time.perf_counter_ns(), 0, 0, 0

    def agree(self) -> None:
        self.agreed = time.perf_counter_ns()


class Track:
    """Records the operations of one communicator. members: its ranks as text, the same on all of them.

    A started operation (comm/work.py) is recorded from its start until it is complete. If a blocking call starts it,
    the start of the call is recorded before, and rank_file.py joins the two. A blocking allreduce on the fast path in C
    (csrc/python/segment_allreduce.c) starts nothing in Python: C records it, and `gather` fetches these records.
    """

    def __init__(self, recorder: Recorder, members: str) -> None:
        self._recorder, self._add, self._members = recorder, recorder.add, members

    def call(self, kind: str) -> None:
        """A blocking call begins; it starts the next operation of this kind."""
        self._add(("call", self._members, kind, time.perf_counter_ns()))

    def end(self, operation: Operation) -> None:
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
