"""`python -m allred timeline merge DIR`: writes one trace of all ranks and prints a summary.

Needs no MPI. Exit code 0; 2: DIR has no timeline, or the trace cannot be written.
"""

import json
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from allred.command_line import Parser
from allred.errors import InputError
from allred.timeline import tables
from allred.timeline.rank_file import RankTimeline, Span, read_timeline
from allred.wording import count

_WAITED_FOR = "waits for"


def main(arguments: list[str]) -> int:
    what = "Evaluates timelines that ALLRED_TIMELINE=DIR has recorded."
    parser = Parser(prog="python -m allred timeline", description=what)
    commands = parser.add_subparsers(dest="what", required=True, metavar="merge")
    text = "write a trace of all ranks, DIR/trace.json, for ui.perfetto.dev or chrome://tracing; print a summary"
    merge = commands.add_parser("merge", help=text, description=text)
    merge.add_argument("directory", metavar="DIR", help="the value of ALLRED_TIMELINE")
    merge.add_argument("--output", metavar="FILE", help="path of the trace; default DIR/trace.json")
    options = parser.parse_args(arguments)
    directory = pathlib.Path(options.directory)
    try:
        _merge(directory, pathlib.Path(options.output or directory / "trace.json"))
    except InputError as error:
        print(f"python -m allred timeline: {error}", file=sys.stderr)
        return 2
    return 0


def _merge(directory: pathlib.Path, output: pathlib.Path) -> None:
    ranks, notes = _newest(directory)
    matched = tables.match(ranks)
    waits = tables.waits(matched, ranks)
    document = {"traceEvents": list(trace_events(ranks, waits)), "displayTimeUnit": "ms"}
    try:
        output.write_text(json.dumps(document), "utf-8")
    except OSError as error:
        raise InputError(f"cannot write {output}: {error.strerror}; choose another path with --output FILE") from error
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(ranks[0].about["time"]))
    spans = sum(len(rank.spans) + len(rank.operations) for rank in ranks)
    clock_error = max(rank.error for rank in ranks)
    clocks = f"clocks aligned within {clock_error / 1e3:.0f} us" if clock_error else "one clock"
    print(f"{output}: a job of {when}; {_count(ranks)}, {spans} spans; {clocks}")
    for line in (*notes, *(rank.left_out for rank in ranks if rank.left_out)):
        print(line)
    print(f"\n{tables.text(ranks, matched, waits)}")


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
