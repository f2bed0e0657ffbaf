"""`python -m allred timeline merge DIR`: one trace of all ranks, and a summary.

Needs no MPI. Exit code 0; 2: DIR has no timeline, or the trace cannot be written.
"""

import argparse
import json
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

from allred.errors import InputError
from allred.timeline import collectives, summary, trace
from allred.timeline.file import Rank, read


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; --help lists what there is\n")


def main(arguments: list[str]) -> int:
    """Do what the arguments ask for; the exit code."""
    parser = _Parser(prog="python -m allred timeline", description="What every rank did when (ALLRED_TIMELINE=DIR).")
    words = "one trace of all ranks, DIR/trace.json, for https://ui.perfetto.dev or chrome://tracing; and a summary"
    merge = parser.add_subparsers(dest="what", required=True, metavar="merge").add_parser(
        "merge", help=words, description=words
    )
    merge.add_argument("directory", metavar="DIR", help="what ALLRED_TIMELINE was")
    merge.add_argument("--output", metavar="FILE", help="where to write the trace")
    options = parser.parse_args(arguments)
    directory = pathlib.Path(options.directory)
    try:
        _merge(directory, pathlib.Path(options.output or directory / "trace.json"))
    except InputError as error:
        print(f"python -m allred timeline: {error}", file=sys.stderr)
        return 2
    return 0


def _merge(directory: pathlib.Path, output: pathlib.Path) -> None:
    ranks, odd = _newest(directory)
    matched = collectives.match(ranks)
    waits = collectives.waits(matched, ranks)
    found = {"traceEvents": list(trace.events(ranks, waits)), "displayTimeUnit": "ms"}
    try:
        output.write_text(json.dumps(found), "utf-8")
    except OSError as error:
        raise InputError(f"{output} cannot be written: {error.strerror}; --output FILE puts it elsewhere") from error
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(ranks[0].about["time"]))
    noted, apart = sum(len(rank.spans) + len(rank.operations) for rank in ranks), max(rank.error for rank in ranks)
    clocks = f"clocks aligned within {apart / 1e3:.0f} us" if apart else "one clock"
    print(f"{output}: a job of {when}; {_count(ranks)}, {noted} spans; {clocks}")
    for line in (*odd, *(rank.left_out for rank in ranks if rank.left_out)):
        print(line)
    print(f"\n{summary.text(ranks, matched, waits)}")


def _count(ranks: Sequence[Rank]) -> str:
    size = ranks[0].about["size"]
    here = {rank.number for rank in ranks}
    missing = [str(number) for number in range(size) if number not in here]
    return f"{size} rank{'s' * (size != 1)}" + f" (nothing of {', '.join(missing)})" * bool(missing)


def _newest(directory: pathlib.Path) -> tuple[list[Rank], list[str]]:
    """The ranks of the newest job in it, in order; and what is odd about its files, in words."""
    odd: list[str] = []
    paths: dict[tuple[str, int], pathlib.Path] = {}
    found = []
    for path in sorted(directory.glob("rank-*.timeline")):
        try:
            rank = read(path)
        except InputError as error:
            odd.append(f"left out: {error}")
            continue
        first = paths.setdefault((rank.about["job"], rank.number), path)
        if first is path:
            found.append(rank)
        else:
            odd.append(f"left out: {path} is of the same rank and job as {first}")
    if not found:
        raise InputError(odd[0] if odd else f"{directory} has no files rank-*.timeline; give what ALLRED_TIMELINE was")
    job = max(found, key=lambda rank: rank.about["time"]).about["job"]
    if older := sorted(rank.number for rank in found if rank.about["job"] != job):
        odd.append(f"left out: files of an earlier job, of ranks {', '.join(map(str, older))}")
    return sorted((rank for rank in found if rank.about["job"] == job), key=lambda rank: rank.number), odd
