"""The trace in Chrome's trace event format, for Perfetto and chrome://tracing: one process per rank with a row per
thread, a row "waits for", and one track per started operation."""

from collections.abc import Iterator, Sequence
from typing import Any

from allred.timeline.rank_file import RankTimeline, Span

_WAITED_FOR = "waits for"


def events(ranks: Sequence[RankTimeline], waits: dict[int, list[Span]]) -> Iterator[dict[str, Any]]:
    """All events; times are microseconds since the earliest start of a rank."""
    zero = min(rank.start for rank in ranks)
    names = {rank.number: rank.name for rank in ranks}
    for rank in ranks:
        pid = rank.number
        yield _meta(pid, 0, "process_name", name=f"{rank.name} ({rank.about['host']})")
        yield _meta(pid, 0, "process_sort_index", sort_index=pid)
        rows = ["", *sorted({span.row for span in rank.spans} - {""})]
        for number, row in enumerate(rows):
            yield _meta(pid, number, "thread_name", name=row or "program")
        for span in rank.spans:
            yield _span(pid, rows.index(span.row), span, f"{span.kind} {span.name}".rstrip(), zero)
        if waits.get(pid):
            yield _meta(pid, len(rows), "thread_name", name=_WAITED_FOR)
        for span in waits.get(pid, ()):
            yield _span(pid, len(rows), span, names.get(int(span.name), span.name), zero)
        for number, each in enumerate(each for each in rank.operations if not each.blocking):
            title = f"{each.kind} {each.name}".rstrip()
            same = {"pid": pid, "tid": 0, "cat": "operation", "id": f"{pid}.{number}"}
            arguments = {"bytes": each.nbytes, "number": each.number, "members": each.members}
            times = [("b", title, each.start), ("e", title, each.end)]
            if each.agreed:
                times[1:1] = [("b", "negotiate", each.start), ("e", "negotiate", each.agreed)]
            for phase, name, when in times:
                yield {"ph": phase, "name": name, "ts": (when - zero) / 1e3, **same, "args": arguments}


def _span(pid: int, tid: int, span: Span, name: str, zero: int) -> dict[str, Any]:
    start, duration = (span.start - zero) / 1e3, (span.end - span.start) / 1e3
    found = {"ph": "X", "pid": pid, "tid": tid, "cat": span.kind, "name": name, "ts": start, "dur": duration}
    return {**found, "args": {"bytes": span.nbytes}} if span.nbytes else found


def _meta(pid: int, tid: int, what: str, **arguments: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": arguments}
