"""`python -m allred timeline`: `merge` writes one trace of all ranks and prints a summary; `show` writes a page.

It matches the operations of all ranks: when each rank arrived, and which rank it waited for. Needs no MPI. Exit code 0;
2: there is no timeline, or the file cannot be written.
"""

import bisect
import dataclasses
import json
import pathlib
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from allred.command_line import Parser, program
from allred.errors import InputError
from allred.page import write_page
from allred.timeline.rank_file import ABOUT, RankTimeline, Span, read_timeline
from allred.timeline.show import page_document, read_trace
from allred.wording import count

_WAITED_FOR = "waits for"
_JOIN = "join"  # the operation of a rank that has joined


def main(arguments: list[str]) -> int:
    what = "Evaluates timelines that ALLRED_TIMELINE=DIR has recorded."
    parser = Parser(prog=program("timeline"), description=what)
    commands = parser.add_subparsers(dest="what", required=True, metavar="merge|show")
    text = "write a trace of all ranks, DIR/trace.json, for ui.perfetto.dev; print a summary"
    merge = commands.add_parser("merge", help=text, description=text)
    merge.add_argument("directory", metavar="DIR", help="the value of ALLRED_TIMELINE")
    merge.add_argument("--output", metavar="FILE", help="path of the trace; default DIR/trace.json")
    text = "write a page with the timeline, DIR/timeline.html, for any browser: one file, which loads nothing"
    page = commands.add_parser("show", help=text, description=text)
    page.add_argument("file", metavar="FILE", help="the value of ALLRED_TIMELINE, or a trace of merge")
    page.add_argument("-o", "--output", metavar="PAGE", help="path of the page; default timeline.html beside the files")
    options = parser.parse_args(arguments)
    try:
        if options.what == "show":
            _show(pathlib.Path(options.file), options.output)
        else:
            directory = pathlib.Path(options.directory)
            _merge(directory, pathlib.Path(options.output or directory / "trace.json"))
    except InputError as error:
        print(f"{program('timeline')}: {error}", file=sys.stderr)
        return 2
    return 0


def _merge(directory: pathlib.Path, output: pathlib.Path) -> None:
    trace = _trace(directory)
    try:
        output.write_text(json.dumps(trace), "utf-8")
    except OSError as error:
        raise InputError(f"cannot write {output}: {error.strerror}; choose another path with --output FILE") from error
    print(f"{output}: {trace['otherData']['title']}")
    for part in filter(None, (trace["otherData"]["notes"], f"\n{trace['otherData']['summary']}")):
        print(part)


def _show(path: pathlib.Path, output: str | None) -> None:
    is_directory = path.is_dir()
    trace = _trace(path) if is_directory else read_trace(path)
    page = output or str((path if is_directory else path.parent) / "timeline.html")
    write_page(page, page_document(trace))
    if notes := trace.get("otherData", {}).get("notes"):
        print(notes, file=sys.stderr)
    print(f"{page}: {trace.get('otherData', {}).get('title') or 'a timeline'}; open it in a browser")


def _trace(directory: pathlib.Path) -> dict[str, Any]:
    """The trace of the newest job in `directory`. otherData: title, notes on its files, and summary, as text."""
    ranks, notes = _newest(directory)
    matched = match(ranks)
    waiting = waits(matched, ranks)
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(ranks[0].about["time"]))
    spans = sum(len(rank.spans) + len(rank.operations) for rank in ranks)
    clock_error = max(rank.error for rank in ranks)
    clocks = f"clocks aligned within {clock_error / 1e3:.0f} us" if clock_error else "one clock"
    texts = {
        "title": f"a job of {when}; {_count(ranks)}, {spans} spans; {clocks}",
        "notes": "\n".join((*notes, *(rank.left_out for rank in ranks if rank.left_out))),
        "summary": summary(ranks, matched, waiting),
    }
    return {"traceEvents": list(trace_events(ranks, waiting)), "displayTimeUnit": "ms", "otherData": texts}


def _count(ranks: Sequence[RankTimeline]) -> str:
    size = ranks[0].about["size"]
    present = {rank.number for rank in ranks}
    missing = [str(number) for number in range(size) if number not in present]
    return count(size, "rank") + f" (no file of {', '.join(missing)})" * bool(missing)


def _newest(directory: pathlib.Path) -> tuple[list[RankTimeline], list[str]]:
    """The timelines of the newest job in `directory`, by rank; and notes on files that were ignored."""
    notes: list[str] = []
    paths: dict[tuple[str, int], pathlib.Path] = {}
    found = []
    for path in sorted(directory.glob("rank-*.timeline")):
        try:
            rank = read_timeline(path)
            if missing := ABOUT.keys() - rank.about.keys():
                raise InputError(f"{path} has invalid records: its first one lacks {', '.join(sorted(missing))}")
        except InputError as error:
            notes.append(f"ignored: {error}")
            continue
        first = paths.setdefault((rank.about["job"], rank.number), path)
        if first is path:
            found.append(rank)
        else:
            notes.append(f"ignored: {path} has the same rank and job as {first}")
    if not found:
        none = f"{directory} has no files rank-*.timeline; expected the directory that ALLRED_TIMELINE named"
        raise InputError(notes[0] if notes else none)
    job = max(found, key=lambda rank: rank.about["time"]).about["job"]
    if older := sorted(rank.number for rank in found if rank.about["job"] != job):
        notes.append(f"ignored: files of an earlier job, ranks {', '.join(map(str, older))}")
    return sorted((rank for rank in found if rank.about["job"] == job), key=lambda rank: rank.number), notes


def trace_events(ranks: Sequence[RankTimeline], waits: dict[int, list[Span]]) -> Iterator[dict[str, Any]]:
    """The trace in Chrome's trace event format: one process per rank with a row per thread, a row "waits for", and one
    track per started operation. Times are microseconds since the earliest start of a rank."""
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
            event = _span(pid, len(rows), span, names.get(int(span.name), span.name), zero)
            yield {**event, "args": {"late": int(span.name)}}
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


# The operations of all ranks.


@dataclasses.dataclass(frozen=True)
class Collective:
    """An operation that all its members have completed. arrivals: start time in ns, by rank."""

    kind: str
    name: str
    arrivals: dict[int, int]

    @property
    def last(self) -> int:
        return max(self.arrivals, key=lambda rank: self.arrivals[rank])

    @property
    def lateness(self) -> int:
        *_, before, last = sorted(self.arrivals.values())
        return last - before


def match(ranks: Sequence[RankTimeline]) -> list[Collective]:
    """Collectives of at least two ranks, in order of completion; operations match by members, number and kind."""
    found = []
    for members in sorted({each.members for rank in ranks for each in rank.operations}):
        by_number = {
            rank.number: {each.number: each for each in mine}
            for rank in ranks
            if (mine := [each for each in rank.operations if each.members == members])
        }
        for number in sorted(set.intersection(*(set(each) for each in by_number.values()))):
            matching = {rank: each[number] for rank, each in by_number.items() if each[number].kind != _JOIN}
            if len({each.kind for each in matching.values()}) > 1:
                break  # from here on the ranks made different calls
            if len(matching) > 1:
                first = next(iter(matching.values()))
                found.append(Collective(first.kind, first.name, {rank: each.start for rank, each in matching.items()}))
    return sorted(found, key=lambda each: max(each.arrivals.values()))


def waits(collectives: Sequence[Collective], ranks: Sequence[RankTimeline]) -> dict[int, list[Span]]:
    """Spans in which a rank only waited, by rank; the name of a span is the number of the rank that it waited for. A
    rank waits from its own arrival to the last arrival, as long as it is in Work.wait or in a blocking call."""
    found: dict[int, list[Span]] = defaultdict(list)
    for rank in ranks:
        blocked = _blocked(rank)
        ends = [end for _, end in blocked]
        free = 0  # end of the last span: overlapping waits are counted once
        for each in collectives:
            if rank.number not in each.arrivals or each.last == rank.number:
                continue
            begin, until = max(each.arrivals[rank.number], free), each.arrivals[each.last]
            at = bisect.bisect_right(ends, begin)
            while at < len(blocked) and blocked[at][0] < until:
                start, end = max(blocked[at][0], begin), min(blocked[at][1], until)
                if start < end:
                    found[rank.number].append(Span("", "wait", str(each.last), start, end, 0))
                    free = end
                at += 1
    return found


def _blocked(rank: RankTimeline) -> list[tuple[int, int]]:
    """The outermost intervals in which the rank was in waits and blocking calls, in order."""
    calls = [(each.start, each.end) for each in rank.operations if each.blocking]
    mine = sorted([*calls, *((span.start, span.end) for span in rank.spans if span.kind == "wait" and not span.row)])
    outer: list[tuple[int, int]] = []
    for start, end in mine:
        if not outer or start >= outer[-1][1]:
            outer.append((start, end))
    return outer


KINDS = ("negotiate", "pack", "allreduce", "unpack", "apply", "wait", "push", "pull", "push+pull")
_OTHER, _OUTSIDE = "rest of step", "outside"
_COLUMNS = (*KINDS, "other", _OTHER, _OUTSIDE)
_COUNTED_AS = {"grouped_allreduce": "allreduce", "step": _OTHER}
_MAX_MATRIX_RANKS = 8  # more ranks: a list of the longest waits
_LONGEST_WAITS = 10


def summary(ranks: Sequence[RankTimeline], collectives: Sequence[Collective], waits: dict[int, list[Span]]) -> str:
    names = {rank.number: rank.name for rank in ranks}
    parts = [_time_table(ranks, waits)]
    if collectives:
        waited = {rank: _by_rank(spans) for rank, spans in waits.items()}
        parts += [
            _arrival_table(names, collectives, waited),
            _wait_table(names, waited),
            _slowest_rank(names, collectives, waited),
        ]
    return "\n\n".join(part for part in parts if part)


def shares(rank: RankTimeline) -> dict[str, int]:
    """Nanoseconds of a rank by kind of span, nested spans not counted twice. A wait inside another span than a step
    counts as that span. "outside" is the time without a span."""
    found: dict[str, int] = defaultdict(int)
    inside: list[tuple[int, str]] = []  # end and kind of the open spans
    row, covered, until = "", 0, rank.start
    for span in rank.spans:
        if span.row != row:
            row, inside = span.row, []
        while inside and inside[-1][0] <= span.start:
            inside.pop()
        kind = _COUNTED_AS.get(span.kind, span.kind if span.kind in KINDS else "other")
        if kind == "wait" and inside and inside[-1][1] != _OTHER:
            kind = inside[-1][1]
        if inside:
            found[inside[-1][1]] -= span.end - span.start
        found[kind] += span.end - span.start
        inside.append((span.end, kind))
    for start, end in sorted((span.start, span.end) for span in rank.spans):
        covered += max(end - max(start, until), 0)
        until = max(until, end)
    found[_OUTSIDE] = rank.end - rank.start - covered
    return dict(found)


def _time_table(ranks: Sequence[RankTimeline], waits: dict[int, list[Span]]) -> str:
    every = {rank.number: shares(rank) for rank in ranks}
    columns = [column for column in _COLUMNS if any(each.get(column) for each in every.values())]
    rows = [["", "recorded", *columns, "waits for others"]]
    for rank in ranks:
        whole = max(rank.end - rank.start, 1)
        waited = sum(span.end - span.start for span in waits.get(rank.number, ()))
        parts = [*(every[rank.number].get(column, 0) for column in columns), waited]
        rows.append([rank.name, f"{whole / 1e9:.2f} s", *(f"{100 * part / whole:.1f} %" for part in parts)])
    return f"where the time went\n{_table(rows)}"


def _arrival_table(names: dict[int, str], collectives: Sequence[Collective], waited: dict[int, dict[int, int]]) -> str:
    rows = [["", "before the last one", "last", "by", "others waited for it"]]
    for rank, name in names.items():
        mine = [each for each in collectives if rank in each.arrivals]
        last = [each for each in mine if each.last == rank]
        if mine:
            ahead = statistics.median(each.arrivals[each.last] - each.arrivals[rank] for each in mine)
            by = _ms(statistics.median(each.lateness for each in last)) if last else "-"
            rows.append([name, _ms(ahead), f"{len(last)} of {len(mine)}", by, _s(_waited_for(rank, waited))])
    return f"arrival at collectives (medians)\n{_table(rows)}"


def _wait_table(names: dict[int, str], waited: dict[int, dict[int, int]]) -> str:
    if len(names) <= _MAX_MATRIX_RANKS:
        involved = [rank for rank in names if rank in waited or any(rank in each for each in waited.values())]
        rows = [["", *(names[rank] for rank in involved)]]
        for rank in involved:
            times = ["-" if rank == other else _s(waited.get(rank, {}).get(other, 0)) for other in involved]
            rows.append([names[rank], *times])
        return f"who (row) waited for whom (column)\n{_table(rows)}" if involved else ""
    pairs = sorted(((time, rank, other) for rank, each in waited.items() for other, time in each.items()), reverse=True)
    lines = (f"{names[rank]} waited {_s(time)} for {names[other]}" for time, rank, other in pairs[:_LONGEST_WAITS])
    return "\n".join(lines)


def _slowest_rank(names: dict[int, str], collectives: Sequence[Collective], waited: dict[int, dict[int, int]]) -> str:
    rank = max(names, key=lambda rank: _waited_for(rank, waited))
    late = [each.lateness for each in collectives if each.last == rank]
    mine = sum(rank in each.arrivals for each in collectives)
    if not late:
        return ""
    return (
        f"{names[rank]} was waited for longest: {_s(_waited_for(rank, waited))} in all; it arrived last at {len(late)} "
        f"of {mine} collectives, by {_ms(statistics.median(late))} (median)"
    )


def _by_rank(spans: Sequence[Span]) -> dict[int, int]:
    found: dict[int, int] = defaultdict(int)
    for span in spans:
        found[int(span.name)] += span.end - span.start
    return found


def _waited_for(rank: int, waited: dict[int, dict[int, int]]) -> int:
    return sum(each.get(rank, 0) for each in waited.values())


def _ms(ns: float) -> str:
    return f"{ns / 1e6:.3f} ms"


def _s(ns: float) -> str:
    return f"{ns / 1e9:.2f} s"


def _table(rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    first, *others = widths
    lines = ([row[0].ljust(first), *map(str.rjust, row[1:], others)] for row in rows)
    return "\n".join("  ".join(cells).rstrip() for cells in lines)
