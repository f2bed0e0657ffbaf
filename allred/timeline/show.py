"""`python -m allred timeline show FILE`: a timeline as a page (allred.page), with lanes of ranks and the longest waits.

The page receives the trace of `merge` as a smaller document; times are in microseconds since the first start of a rank:

    kind        "timeline"
    title, summary
                texts of `merge`; "" if unknown
    size        the number of ranks
    kinds, names
                texts, to which spans refer by index
    rows        rank, label; kind: program, waits or operations; spans: [start, duration, kind, name, bytes] by start.
                Spans of a row nest. A span of a row "waits" has the rank that it waits for instead of bytes
    delays      [rank, late rank, seconds]
    waits       [rank, late rank, start, duration], the longest first
    left_out    the number of spans that the page leaves out, the shortest
"""

import heapq
import json
from pathlib import Path
from typing import Any

from allred.errors import InputError

MOST_SPANS = 200_000
MOST_WAITS = 50
_PROGRAM, _WAITS, _OPERATIONS = "program", "waits", "operations"

Trace = dict[str, Any]


def read_trace(path: Path) -> Trace:
    """Read a trace that `merge` has written. Raises InputError."""
    try:
        trace: Trace = json.loads(path.read_text("utf-8"), parse_constant=_refuse)
        page_document(trace)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        expected = "the directory that ALLRED_TIMELINE named, or the file that `timeline merge` writes"
        raise InputError(f"{path} is no timeline of this version of allred; expected {expected}") from None
    return trace


def _refuse(constant: str) -> None:
    raise ValueError(f"a time is {constant}")


def page_document(trace: Trace) -> dict[str, Any]:
    """Return the document of the page. Raises ValueError, TypeError or LookupError if it is no trace of `merge`."""
    texts: dict[str, dict[str, int]] = {"kinds": {}, "names": {}}
    labels: dict[int, str] = {}
    rows: dict[tuple[int, int], dict[str, Any]] = {}
    tracks: dict[tuple[int, str], list[Any]] = {}  # of started operations: start, end, name, bytes

    def index(what: str, text: str) -> int:
        return texts[what].setdefault(text, len(texts[what]))

    for event in trace["traceEvents"]:
        rank, phase = event["pid"], event["ph"]
        if phase == "M" and event["name"] == "process_name":
            labels[rank] = event["args"]["name"]
        elif phase == "M" and event["name"] == "thread_name":
            rows[rank, event["tid"]] = _row(rank, event["args"]["name"])
        elif phase == "X":
            kind, arguments = event["cat"], event.get("args", {})
            row = rows.setdefault((rank, event["tid"]), _row(rank, "program"))
            if "late" in arguments:
                row["kind"] = _WAITS
            name = event["name"].removeprefix(kind).strip()
            numbers = [index("kinds", kind), index("names", name), arguments.get("late", arguments.get("bytes", 0))]
            row["spans"].append([round(event["ts"], 1), round(event["dur"], 1), *numbers])
        elif phase in "be":
            empty = [event["ts"], event["ts"], event["name"], event["args"]["bytes"]]
            tracks.setdefault((rank, event["id"]), empty)[1] = event["ts"]
    if not labels:
        raise ValueError("no rank")
    for (rank, _), (start, end, name, nbytes) in sorted(tracks.items(), key=lambda track: (track[0][0], track[1][0])):
        tid, span = 1000, [round(start, 1), round(end - start, 1), index("kinds", "operation"), index("names", name)]
        while (row := rows.setdefault((rank, tid), _row(rank, "operations"))) and _end(row) > start:
            tid += 1
        row["spans"].append([*span, nbytes])
    return _finish(trace, texts, labels, [rows[key] for key in sorted(rows)])


def _row(rank: int, label: str) -> dict[str, Any]:
    return {"rank": rank, "label": label, "kind": _OPERATIONS if label == "operations" else _PROGRAM, "spans": []}


def _end(row: dict[str, Any]) -> float:
    return float(row["spans"][-1][0] + row["spans"][-1][1]) if row["spans"] else float("-inf")


def _finish(
    trace: Trace, texts: dict[str, dict[str, int]], labels: dict[int, str], rows: list[dict[str, Any]]
) -> dict[str, Any]:
    waits = [
        [row["rank"], late, start, duration]
        for row in rows
        if row["kind"] == _WAITS
        for start, duration, _, _, late in row["spans"]
    ]
    delays: dict[tuple[int, int], float] = {}
    for rank, late, _, duration in waits:
        delays[rank, late] = delays.get((rank, late), 0.0) + duration / 1e6
    spans = [(span[1], place, number) for place, row in enumerate(rows) for number, span in enumerate(row["spans"])]
    longest = {each[1:] for each in heapq.nlargest(MOST_SPANS, spans)}
    for place, row in enumerate(rows):
        kept = [span for number, span in enumerate(row["spans"]) if (place, number) in longest]
        row["spans"] = sorted(kept, key=lambda span: (span[0], -span[1]))
    return {
        "kind": "timeline", **{key: str(trace.get("otherData", {}).get(key, "")) for key in ("title", "summary")},
        "size": max(labels) + 1, "labels": {str(rank): label for rank, label in sorted(labels.items())},
        "kinds": [*texts["kinds"]], "names": [*texts["names"]], "rows": [row for row in rows if row["spans"]],
        "delays": [[*pair, seconds] for pair, seconds in sorted(delays.items())],
        "waits": sorted(waits, key=lambda wait: -wait[3])[:MOST_WAITS],
        "left_out": len(spans) - sum(len(row["spans"]) for row in rows),
    }  # fmt: skip
