"""python -m allred top: the ranks of a running job, and which rank delays which; on the terminal or as a page."""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from typing import Any

from allred.command_line import Parser, fail, parse, program
from allred.errors import AllredError
from allred.monitor import web
from allred.monitor.state import State, follow, state
from allred.page import write_page
from allred.wording import count

MOST_DELAYS = 5
MOST_ROWS = 64  # of the table
_BAD = re.compile("stopped|was killed|failed|no answer|has died|ended with|in a system call")  # as in page.html
_SHARES = ("computing", "waiting", "communicating")
_COLUMNS = ("rank", "host", "step", "rounds", "steps/s", "examples/s", *_SHARES, "state")
_LINE = "in Python at "


def _parser(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog=program("top"),
        description="Shows a job that runs on this host: of each rank the global step, its speed, its share of waiting "
        "for other ranks, its state and source line; and which rank delays which. Works while ranks hang. On a job of "
        "several hosts, run it on the host of rank 0. Without a terminal it prints one table.",
    )
    parser.add_argument("job", nargs="?", default="", help="its name; not needed if one job runs")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="print one state as a line of JSON, and end")
    how.add_argument(
        "--html", metavar="FILE", help="write a page with the state, also of a job that has ended, and end"
    )
    how.add_argument(
        "--web", nargs="?", type=web.port, const=0, metavar="PORT",
        help="serve a page with the state on this host only, at a free port or at PORT",
    )  # fmt: skip
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Run the command. Return the exit code."""
    options = parse(_parser, arguments)
    if isinstance(options, int):
        return options
    try:
        if options.json:
            print(json.dumps(state(options.job)))
        elif options.html:
            write_page(options.html, state(options.job))
            print(f"{options.html}: one file, which can be copied and opened in a browser")
        elif options.web is not None:
            web.serve(options.job, options.web)
        else:
            return show(follow(options.job))
        return 0
    except AllredError as error:
        return fail(f"{program('top')}: {error}", 1)
    except KeyboardInterrupt:
        return 0


def show(states: Iterator[State]) -> int:
    """Show tables until the job ends; one table if the output is no terminal."""
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError:
        return fail(f"{program('top')} needs rich: pip install rich; or add --web, --html or --json", 1)
    console = Console(width=None if sys.stdout.isatty() else 160)
    if not console.is_terminal:
        now = next(states)
        console.print(table(now))
        _print_message(now, console)
        return 0
    with Live(console=console, screen=False, auto_refresh=False) as live:
        for now in states:
            live.update(table(now), refresh=True)
            if now["ended"]:
                break
    _print_message(now, console)
    console.print(f"job {now['job']} has ended")
    return 0


def _print_message(now: State, console: Any) -> None:
    """Print the last message of the job, if there is one: such as which rank failed."""
    for message in now["messages"][-1:]:
        console.print(message["text"], markup=False, highlight=False)


def table(now: State) -> Any:
    """Return a table of rich: one line for each rank. In a large job, MOST_ROWS lines: of the ranks with a problem, of
    those that delayed others longest, and of the first ones."""
    from rich.table import Table
    from rich.text import Text

    start = f", start {now['starts']}" if now["starts"] > 1 else ""
    state = f": {now['state']}" if now["state"] != "running" else ""
    title = Text(f"{now['job']} on {now['host']}: {now['size']} ranks, mode {now['mode']}{start}{state}")
    late = {rank: seconds for rank, _, seconds in now["late"]}
    first = sorted(now["ranks"], key=lambda rank: (not _BAD.match(rank["state"]), -late.get(rank["rank"], 0.0)))
    rows = sorted(first[:MOST_ROWS], key=lambda rank: int(rank["rank"]))
    rest = f"and {count(len(first) - len(rows), 'more rank')}; --web shows all" if len(first) > len(rows) else ""
    caption = "\n".join(filter(None, (rest, delays_text(now))))
    result = Table(title=title, title_justify="left", caption=caption, caption_justify="left", box=None)
    several = len({rank["host"] for rank in now["ranks"]}) > 1
    hidden = ["host"] * (not several) + ["rounds"] * (not any(rank["rounds"] for rank in now["ranks"]))
    shown = [name for name in _COLUMNS if name not in hidden]
    for name in shown:
        justify: Any = "left" if name in ("host", "state") else "right"
        result.add_column(name, justify=justify, no_wrap=name != "state")  # only the state is cut
    for rank in rows:
        cells = dict(zip(_COLUMNS, row(rank), strict=True))
        result.add_row(*(Text(cells[name], no_wrap=True, overflow="ellipsis") for name in shown))
    return result


def row(rank: State) -> list[str]:
    """Return the cells of a rank.

    >>> rank = {"rank": 1, "host": "a", "role": "", "state": "in Python at train.py:9 (step)", "step": 40, "steps": 40}
    >>> rank |= {"rounds": 5, "steps_per_s": 10.0, "examples_per_s": None}
    >>> rank |= {"computing": 0.25, "waiting": 0.75, "communicating": 0.0}
    >>> row(rank)
    ['1', 'a', '40', '5', '10.0', '', '25 %', '75 %', '0 %', 'train.py:9 (step)']
    """
    speeds = ["" if rank[key] is None else f"{rank[key]:.1f}" for key in ("steps_per_s", "examples_per_s")]
    shares = ["" if rank[key] is None else f"{100 * rank[key]:.0f} %" for key in _SHARES]
    step = f"{rank['step']:.0f}" if rank["steps"] else ""
    state = rank["state"].removeprefix(_LINE).removesuffix(" (<module>)").partition("; ")[0]
    return [
        str(rank["rank"]),
        rank["host"],
        step,
        f"{rank['rounds']:.0f}",
        *speeds,
        *shares,
        f"{rank['role']}: {state}" if rank["role"] else state,
    ]


def delays_text(now: State) -> str:
    """Return a line with the ranks that have delayed others longest.

    >>> delays_text({"late": [[0, 1, 0.5], [1, 2, 5.0]], "delays": [[0, 1, 2.0], [2, 1, 3.0], [1, 0, 0.5]]})
    'delays while monitored: rank 1 delayed 2 ranks, 2.5 s each; rank 0 delayed rank 1, 0.5 s'
    """
    waiting = {late: rank for rank, late, _ in now["delays"]}
    longest = sorted(now["late"], key=lambda delay: -delay[2])[:MOST_DELAYS]
    lines = [
        f"rank {late} delayed {count(ranks, 'rank')}, {seconds / ranks:.1f} s each"
        if ranks > 1 or late not in waiting
        else f"rank {late} delayed rank {waiting[late]}, {seconds:.1f} s"
        for late, ranks, seconds in longest
    ]
    return f"delays while monitored: {'; '.join(lines)}" if lines else ""
