"""What a rank notes of itself while a timeline is wanted, and the file that it goes to.

A record is a tuple of words and numbers; times are nanoseconds of this process's clock, time.perf_counter_ns().

    begin      about: a dict; see file.Rank
    clock      when, offset, error: the chief's clock shows so much more than this one, give or take
    span       row, kind, name, start, end, bytes: what a thread did; those of a row nest
    operation  members, kind, name, start, agreed, end, bytes: of a communicator, from when it was started until it was
               complete; agreed: when all headers were there, 0 if that is not known
    call       members, kind, start: one that blocks; the next operation of this kind is its own
    calls      members, names, rows: blocking allreduces, and some of `call`'s sort, as C has noted them (ROW)
    end        when

To note one is to append to a list. A thread writes what has come, ten times a second, as a chunk: length and CRC-32,
then marshal's bytes. So a rank that is killed loses what came last, and a file system that stalls does not stall the
training.
"""

import atexit
import marshal
import os
import struct
import threading
import time
import types
import zlib
from collections.abc import Callable
from typing import Any

from allred.cluster import report

MAGIC = b"allred timeline 1\n"
CHUNK = struct.Struct("<II")  # length, CRC-32
ROW = struct.Struct("<qqqII")  # start, end or 0 if it went on as an operation, bytes, which of the names, if of a group
_MARSHAL_VERSION = 4  # which every Python since 3.4 can read
_WRITE_S = 0.1
_LAST_WRITE_S = 2.0  # at the end of the program, for a file system that stalls

Record = tuple[Any, ...]


class Recorder:
    """Of this process, into the file `path`, which is made anew. Raises OSError if that cannot be."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        self._records: list[Record] = []
        self.sources: list[Callable[[], None]] = []  # which add what is noted elsewhere, when asked
        self.add: Callable[[Record], None] = self._records.append
        self._process = os.getpid()
        self._failed = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._go_on, name="allred-timeline", daemon=True)

    def begin(self, about: dict[str, Any]) -> None:
        """From now on write."""
        self.add(("begin", about))
        self._write(MAGIC)
        self._write_records()
        self._thread.start()
        atexit.register(self.close)

    def close(self) -> None:
        """Write what is left, and no more. In a fork of the process nothing happens."""
        if os.getpid() != self._process:
            return
        atexit.unregister(self.close)
        self.add(("end", time.perf_counter_ns()))
        self._over.set()
        self._thread.join(_LAST_WRITE_S)

    def give_up(self) -> None:
        """Before `begin`: there will be no timeline."""
        os.close(self._file)
        os.unlink(self._path)

    def _go_on(self) -> None:
        while not self._over.wait(_WRITE_S):
            self._write_records()
        self._write_records()
        os.close(self._file)

    def _write_records(self) -> None:
        for source in self.sources:
            source()
        count = len(self._records)  # others may come meanwhile
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
            report.say_here(
                f"{self._path} cannot be written any more: {error.strerror}; the program goes on, the timeline of this "
                "rank ends here"
            )


current: Recorder | None = None


def install(recorder: Recorder | None) -> None:
    """Make it the one that spans are noted in; None: there is none any more."""
    global current
    if current is not None and current is not recorder:
        current.close()
    current = recorder


class _Span:
    __slots__ = ("_add", "_kind", "_name", "_nbytes", "_row", "_start")

    def __init__(self, add: Callable[[Record], None], row: str, kind: str, name: str, nbytes: int) -> None:
        self._add, self._row, self._kind, self._name, self._nbytes = add, row, kind, str(name), nbytes

    def __enter__(self) -> None:
        self._start = time.perf_counter_ns()

    def __exit__(self, *_: object) -> None:
        self._add(("span", self._row, self._kind, self._name, self._start, time.perf_counter_ns(), self._nbytes))


class _Nothing:
    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        pass


_NOTHING = _Nothing()


def span(kind: str, name: str = "", nbytes: int = 0, row: str = "") -> _Span | _Nothing:
    """A context manager: what is done inside is a span, if there is a timeline. row: "" is the thread that trains."""
    return _NOTHING if current is None else _Span(current.add, row, kind, name, nbytes)
