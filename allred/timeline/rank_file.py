"""Reads the file that one rank has written (recorder.py), and converts its times to the chief's clock."""

import dataclasses
import os
import pathlib
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from allred.errors import InputError
from allred.timeline.marshalled import loads
from allred.timeline.recorder import CHUNK, MAGIC, ROW


class ClockAlignment:
    """Converts times of one rank's clock to the chief's clock, in nanoseconds.

    measured: (time on the rank's clock, offset of the chief's clock, error bound) of each measurement. One measurement
    gives a constant offset; two give linear drift, also before and after them. If all offsets are smaller than their
    errors, both ranks use the same clock: offset and drift are 0.

    >>> ClockAlignment([(0, 1000, 10), (100_000, 1200, 10)])(50_000)
    51100
    """

    def __init__(self, measured: Sequence[tuple[int, int, int]]) -> None:
        if all(abs(offset) <= error for _, offset, error in measured):
            measured = [(0, 0, 0)]
        self.max_error = max(error for *_, error in measured)
        (self._first, self._offset, _), (last, offset, _) = measured[0], measured[-1]
        self._drift, self._interval = offset - self._offset, max(last - self._first, 1)

    def __call__(self, when: int) -> int:
        return when + self._offset + (when - self._first) * self._drift // self._interval


class Span(NamedTuple):
    """A phase of a thread; row "" is the training thread. Times in nanoseconds."""

    row: str
    kind: str
    name: str
    start: int
    end: int
    nbytes: int


class OperationRecord(NamedTuple):
    """A completed operation of a communicator. number: position among the operations of these members. agreed: when all
    headers had arrived, or 0. blocking: a blocking call, so the caller waited from start to end."""

    members: str
    number: int
    kind: str
    name: str
    start: int
    agreed: int
    end: int
    nbytes: int
    blocking: bool


@dataclasses.dataclass
class RankTimeline:
    """The timeline of one rank; times in nanoseconds of the chief's clock.

    about: job, rank, size, name, host, pid, time (seconds since the epoch at start). error: bound of the clock error.
    spans: include blocking calls. left_out: describes the part of the file that could not be used; "" if none.
    """

    about: dict[str, Any]
    start: int
    end: int
    error: int
    spans: list[Span]
    operations: list[OperationRecord]
    left_out: str

    @property
    def number(self) -> int:
        return int(self.about["rank"])

    @property
    def name(self) -> str:
        return str(self.about["name"])


def read_timeline(path: str | os.PathLike[str]) -> RankTimeline:
    """Read one file. Raises InputError if it cannot be read, is not a timeline, or is empty.

    >>> read_timeline("timeline/rank-0.timeline").name   # doctest: +SKIP
    'rank 0'
    """
    try:
        data = pathlib.Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    if not data.startswith(MAGIC):
        raise InputError(f"{path} is not a timeline of this version of allred")
    chunks = list(_chunks(data))
    if not chunks:
        raise InputError(f"{path} is empty: its rank ended immediately, or the disk was full")
    at = len(MAGIC) + sum(CHUNK.size + len(chunk) for chunk in chunks)
    left_out = f"{path}: ignored the last {len(data) - at} bytes, which are incomplete" * (at < len(data))
    try:
        records = [record for chunk in chunks for record in _checked(loads(chunk))]
        if not left_out and not _of_kind(records, "end"):
            left_out = f"{path} has no end: its rank was killed or aborted, and its last records are missing"
        return _rank_timeline(records, left_out)
    except (ValueError, EOFError, TypeError, LookupError, struct.error) as error:
        raise InputError(f"{path} has invalid records: {type(error).__name__}: {error}") from error


def _chunks(data: bytes) -> Iterator[bytes]:
    """The complete chunks with a correct checksum, up to the first other one."""
    at = len(MAGIC)
    while at + CHUNK.size <= len(data):
        length, checksum = CHUNK.unpack_from(data, at)
        chunk = data[at + CHUNK.size : at + CHUNK.size + length]
        if not chunk or zlib.crc32(chunk) != checksum:
            return
        yield chunk
        at += CHUNK.size + length


_TYPES = {
    "begin": (dict,), "clock": (int,) * 3, "span": (str, str, str, int, int, int), "call": (str, str, int),
    "operation": (str, str, str, int, int, int, int), "calls": (str, list, bytes), "end": (int,),
}  # fmt: skip
_MOST_RANKS, _LAST_TIME = 2**16, 2**35
ABOUT: dict[str, tuple[Any, int | None]] = {  # the types of the fields of the first record, and their limits
    "job": (str, None), "name": (str, None), "host": (str, None), "pid": (int, None), "start": (int, None),
    "rank": (int, _MOST_RANKS), "size": (int, _MOST_RANKS), "time": ((int, float), _LAST_TIME),
}  # fmt: skip


def _checked(records: Any) -> list[tuple[Any, ...]]:
    """Return the records of a chunk. Raises ValueError, TypeError or LookupError if no recorder writes them."""
    for kind, *fields in records:
        if type(kind) is not str or tuple(map(type, fields)) != _TYPES[kind]:
            raise ValueError("a record has other fields")
        if kind == "begin":
            about = fields[0]
            if not {"rank", "name", "start"} <= about.keys():
                raise ValueError("the first record has other fields")
            for key, value in about.items():
                expected, most = ABOUT.get(key, (object, None))
                if not isinstance(value, expected) or (most is not None and not 0 <= value <= most):
                    raise ValueError(f"the field {str(key)[:20]!r} of the first record has a wrong value")
        elif kind == "calls" and not all(type(name) is str for name in fields[1]):
            raise ValueError("a name is not text")
    return records  # type: ignore[no-any-return]


def _rank_timeline(records: list[tuple[Any, ...]], left_out: str) -> RankTimeline:
    about: dict[str, Any] = records[0][1]
    if records[0][0] != "begin":
        raise ValueError("the first record is missing")
    measured = [(when, offset, error) for _, when, offset, error in _of_kind(records, "clock")]
    clock = ClockAlignment(measured or [(0, 0, 0)])
    spans = [
        Span(row, kind, name, clock(start), clock(end), nbytes)
        for _, row, kind, name, start, end, nbytes in _of_kind(records, "span")
    ]
    operations = _operations(records, clock)
    spans += [Span("", each.kind, each.name, each.start, each.end, each.nbytes) for each in operations if each.blocking]
    spans.sort(key=lambda span: (span.row, span.start, -span.end))
    start = clock(about["start"])
    ends = [span.end for span in spans] + [each.end for each in operations]
    ends += [clock(when) for _, when in _of_kind(records, "end")]
    return RankTimeline(about, start, max(ends, default=start), clock.max_error, spans, operations, left_out)


def _operations(records: list[tuple[Any, ...]], clock: ClockAlignment) -> list[OperationRecord]:
    """All operations, numbered in the order of their starts."""
    found = [
        OperationRecord(members, 0, kind, name, clock(start), clock(agreed) if agreed else 0, clock(end), nbytes, False)
        for _, members, kind, name, start, agreed, end, nbytes in _of_kind(records, "operation")
    ]
    found += [_blocking_call(members, kind, clock(start)) for _, members, kind, start in _of_kind(records, "call")]
    for _, members, names, rows in _of_kind(records, "calls"):
        for start, end, nbytes, name, grouped in ROW.iter_unpack(rows):
            call = _blocking_call(members, "grouped_allreduce" if grouped else "allreduce", clock(start))
            found.append(call._replace(name=names[name], end=clock(end), nbytes=nbytes) if end else call)
    found.sort(key=lambda each: (each.members, each.start, each.end))
    return list(_numbered(found))


def _blocking_call(members: str, kind: str, start: int) -> OperationRecord:
    return OperationRecord(members, 0, kind, "", start, 0, 0, 0, True)


def _numbered(found: list[OperationRecord]) -> Iterator[OperationRecord]:
    """The completed operations. An operation that follows a call of its kind without an end was started by that call:
    both become one."""
    call, before = None, None
    for each in found:
        if not each.end:
            call = each
            continue
        if call is not None and (call.members, call.kind) == (each.members, each.kind):
            each = each._replace(start=call.start, blocking=True)
        number = before.number + 1 if before is not None and before.members == each.members else 0
        call, before = None, each._replace(number=number)
        yield before


def _of_kind(records: list[tuple[Any, ...]], kind: str) -> list[tuple[Any, ...]]:
    return [record for record in records if record[0] == kind]
