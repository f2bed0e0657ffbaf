"""python -m allred top: the ranks of a running job, and which rank delays which."""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

from allred.command_line import Parser, fail, parse
from allred.errors import AllredError
from allred.monitor import Connection, Snapshot, open_job

INTERVAL_S = 1.0
MOST_DELAYS = 5


def _parser(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="python -m allred top",
        description="Shows a job that runs on this host: of each rank the global step, its speed, its share of waiting "
        "for other ranks, its state and source line; and which rank delays which. Works while ranks hang. On a job of "
        "several hosts, run it on the host of rank 0. Without a terminal it prints one table.",
    )
    parser.add_argument("job", nargs="?", default="", help="its name; not needed if one job runs")
    parser.add_argument("--json", action="store_true", help="print one snapshot as a line of JSON, and end")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Run the command. Return the exit code."""
    options = parse(_parser, arguments)
    if isinstance(options, int):
        return options
    try:
        job = open_job(options.job)
        if options.json:
            print(json.dumps(job.snapshot()))
            return 0
        return show(job)
    except AllredError as error:
        return fail(f"python -m allred top: {error}", 1)
    except KeyboardInterrupt:
        return 0


def show(job: Connection) -> int:
    """Show tables until the job ends; one table if the output is no terminal."""
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError:
        return fail("python -m allred top needs rich: pip install rich; or add --json", 1)
    console = Console(width=None if sys.stdout.isatty() else 160)
    tables = _tables(job)
    if not console.is_terminal:
        console.print(next(tables))
        return 0
    with Live(console=console, screen=False, auto_refresh=False) as live:
        try:
            for table in tables:
                live.update(table, refresh=True)
        except AllredError as error:
            console.print(str(error))
    return 0


def _tables(job: Connection) -> Iterator[Any]:
    before = job.snapshot()
    while True:
        time.sleep(INTERVAL_S)
        now = job.snapshot()
        yield table(before, now)
        before = now


def table(before: Snapshot, now: Snapshot) -> Any:
    """Return a table of rich: the ranks in two snapshots of a job."""
    from rich.table import Table
    from rich.text import Text

    start = f", start {now['starts']}" if now["starts"] > 1 else ""
    title = f"{now['job']} on {now['host']}: {now['size']} ranks, mode {now['mode']}{start}"
    result = Table(title=title, title_justify="left", caption=delays_text(now), caption_justify="left", box=None)
    for name, justify in (("rank", "right"), ("host", "left"), ("step", "right"), ("steps/s", "right"),
                          ("examples/s", "right"), ("waiting", "right"), ("state", "left")):  # fmt: skip
        result.add_column(name, justify=justify, no_wrap=name != "state")  # type: ignore[arg-type]
    earlier = {rank["rank"]: rank for rank in before["ranks"]}
    for rank in now["ranks"]:
        result.add_row(*map(Text, row(earlier.get(rank["rank"], rank), rank, now["time"] - before["time"])))
    return result


def row(before: dict[str, Any], now: dict[str, Any], seconds: float) -> list[str]:
    """Return the cells of a rank in two snapshots that are `seconds` apart.

    >>> rank = {"rank": 1, "host": "a", "role": "", "state": "in Python at train.py:9 (step)", "step": 40, "steps": 40}
    >>> rank |= {"examples": 0, "seconds": 4.0, "waiting_s": 1.0}
    >>> row({**rank, "steps": 30, "seconds": 3.0, "waiting_s": 0.5}, rank, seconds=1.0)
    ['1', 'a', '40', '10.0', '', '50 %', 'in Python at train.py:9 (step)']
    """
    made = {key: now[key] - before[key] for key in ("steps", "examples", "seconds", "waiting_s")}
    speeds = [f"{made[key] / seconds:.1f}" if now[key] and seconds else "" for key in ("steps", "examples")]
    waiting = f"{100 * made['waiting_s'] / made['seconds']:.0f} %" if made["seconds"] else ""
    step = f"{now['step']:.0f}" if now["steps"] else ""
    state = now["state"] if not now["role"] else f"{now['role']}: {now['state']}"
    return [str(now["rank"]), now["host"], step, *speeds, waiting, state]


def delays_text(now: Snapshot) -> str:
    """Return a line with the longest delays."""
    longest = sorted(now["delays"], key=lambda delay: -delay[2])[:MOST_DELAYS]
    if not longest:
        return ""
    return "delays while monitored: " + ", ".join(
        f"rank {late} delayed rank {rank} for {seconds:.1f} s" for rank, late, seconds in longest
    )
