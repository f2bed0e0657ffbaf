"""What a rank has written (recorder.py), read again: by the chief's clock, as far as it is whole."""

import dataclasses
import marshal
import os
import pathlib
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from allred.errors import InputError
from allred.timeline.clock import Clock
from allred.timeline.recorder import CHUNK, MAGIC, ROW


class Span(NamedTuple):
    """Of a row of a rank; "" is what the training thread did. Times are nanoseconds."""

    row: str
    kind: str
    name: str
    start: int
    end: int
    nbytes: int


class Operation(NamedTuple):
    """Of the communicator of some ranks, the number-th one of it. blocking: the caller was in it all the time."""

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
class Rank:
    """What one rank has done. about: job, rank, size, name, host, time (of the day, at its start), pid. start, end: of
    what was noted. error: how far its clock may be wrong. spans: calls that blocked are among them. left_out: what of
    the file was no good, in words."""

    about: dict[str, Any]
    start: int
    end: int
    error: int
    spans: list[Span]
    operations: list[Operation]
    left_out: str

    @property
    def number(self) -> int:
        """Among all ranks of the job."""
        return int(self.about["rank"])

    @property
    def name(self) -> str:
        """How messages call it."""
        return str(self.about["name"])


def read(path: str | os.PathLike[str]) -> Rank:
    """One file. Raises InputError if it cannot be read, is none of a timeline, or has nothing in it."""
    try:
        data = pathlib.Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    if not data.startswith(MAGIC):
        raise InputError(f"{path} is no file of a timeline, or of another version of allred")
    chunks = list(_chunks(data))
    if not chunks:
        raise InputError(f"{path} is empty: its rank ended at once, or its disk was full")
    at = len(MAGIC) + sum(CHUNK.size + len(chunk) for chunk in chunks)
    left_out = f"the last {len(data) - at} bytes of {path} are left out: they are incomplete" * (at < len(data))
    try:
        records = [record for chunk in chunks for record in marshal.loads(chunk)]
        if not left_out and not _of(records, "end"):
            left_out = f"{path} just ends: its rank was killed or aborted, and what it did last is missing"
        return _rank(records, left_out)
    except (ValueError, EOFError, TypeError, LookupError) as error:
        raise InputError(f"{path} holds what no rank has written: {type(error).__name__}: {error}") from error


def _chunks(data: bytes) -> Iterator[bytes]:
    """Those that are whole."""
    at = len(MAGIC)
    while at + CHUNK.size <= len(data):
        length, checksum = CHUNK.unpack_from(data, at)
        chunk = data[at + CHUNK.size : at + CHUNK.size + length]
        if not chunk or zlib.crc32(chunk) != checksum:
            return
        yield chunk
        at += CHUNK.size + length


def _rank(records: list[tuple[Any, ...]], left_out: str) -> Rank:
    about: dict[str, Any] = records[0][1]
    clock = Clock([(when, offset, error) for what, when, offset, error in _of(records, "clock")] or [(0, 0, 0)])
    spans = [
        Span(row, kind, name, clock(start), clock(end), nbytes)
        for _, row, kind, name, start, end, nbytes in _of(records, "span")
    ]
    operations = _operations(records, clock)
    spans += [Span("", each.kind, each.name, each.start, each.end, each.nbytes) for each in operations if each.blocking]
    spans.sort(key=lambda span: (span.row, span.start, -span.end))
    start = clock(about["start"])
    ends = [span.end for span in spans] + [each.end for each in operations]
    ends += [clock(when) for _, when in _of(records, "end")]
    return Rank(about, start, max(ends, default=start), clock.error, spans, operations, left_out)


def _operations(records: list[tuple[Any, ...]], clock: Clock) -> list[Operation]:
    """Numbered in the order in which they were started."""
    found = [
        Operation(members, 0, kind, name, clock(start), clock(agreed) if agreed else 0, clock(end), nbytes, False)
        for _, members, kind, name, start, agreed, end, nbytes in _of(records, "operation")
    ]
    found += [_call(members, kind, clock(start)) for _, members, kind, start in _of(records, "call")]
    for _, members, names, rows in _of(records, "calls"):
        for start, end, nbytes, name, grouped in ROW.iter_unpack(rows):
            call = _call(members, "grouped_allreduce" if grouped else "allreduce", clock(start))
            found.append(call._replace(name=names[name], end=clock(end), nbytes=nbytes) if end else call)
    found.sort(key=lambda each: (each.members, each.start, each.end))
    return list(_numbered(found))


def _call(members: str, kind: str, start: int) -> Operation:
    """One that blocks, of which more may be known."""
    return Operation(members, 0, kind, "", start, 0, 0, 0, True)


def _numbered(found: list[Operation]) -> Iterator[Operation]:
    """Those that ended. The one behind a call without an end is what that has started, if it is of the same kind."""
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


def _of(records: list[tuple[Any, ...]], what: str) -> list[tuple[Any, ...]]:
    return [record for record in records if record[0] == what]
