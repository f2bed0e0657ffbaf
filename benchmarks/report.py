"""Markdown from what `python -m allred bench --json` printed: `make bench` calls it.

    python benchmarks/report.py LINES.jsonl benchmarks/RESULTS.md

Every line says the command, the MPI and the settings it was measured under; lines that share these make one section.
"""

import datetime
import itertools
import json
import os
import pathlib
import platform
import re
import sys

INTRODUCTION = """\
# What `make bench` measured

{date}, {machine}.

Times are medians over samples; a sample is the mean of a batch of calls (of one call where it takes long), on the
slowest rank. allred and raw MPI, called through mpi4py, take turns of some milliseconds in the same processes, on the
same arrays, in place, blocking; results are verified before. algbw = bytes / p50, busbw = algbw * 2 (n - 1) / n,
GB = 10^9 bytes; "times faster" is MPI's p50 / allred's. `allred/bench/measure.py` has the details. Absolute times drift
on a shared machine; ratios less.

Of `ps` a sample is of any worker, algbw counts the bytes of the model once, and a step moves them twice, there and
back. The peer keeps gradients and parameters in flat arrays of its own; `allred/bench/peer.py` has its forms.
Staleness: updates between the parameters that a gradient was computed with and those that it was applied to.

"Concatenate + split" copies into a flat array that is allocated once, reduces it with one call, and copies back.
"Tuned" means that glibc keeps freed memory and uses huge pages, for allred and for MPI alike.
"""

_ROWS = 8

SHARED = ("command", "mpi", "backend", "mpi_settings", "glibc_tunables")


def machine() -> str:
    """CPU, cores, memory and kernel of this machine."""
    model = re.search(r"model name\s*: (.+)", pathlib.Path("/proc/cpuinfo").read_text())
    memory = re.search(r"MemTotal:\s*(\d+) kB", pathlib.Path("/proc/meminfo").read_text())
    return (
        f"{model[1].strip() if model else platform.machine()}, {os.cpu_count()} cores, "
        f"{int(memory[1]) / 2**20 if memory else 0:.0f} GiB, Linux {platform.release()}, "
        f"Python {platform.python_version()}"
    )


def size(nbytes: int) -> str:
    """65536 -> 64 KiB"""
    power = next((power for power in (3, 2, 1) if nbytes % 1024**power == 0), 0)
    return f"{nbytes // 1024**power} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def number(value: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if value >= 0.01 else f"{value:.4f}"


def section(lines: list[dict]) -> str:
    """One command's heading, setting and table."""
    first = lines[0]
    settings = [f"`{name}={value}`" for name, value in first["mpi_settings"].items()]
    settings += [f"`GLIBC_TUNABLES={first['glibc_tunables']}`"] * bool(first["glibc_tunables"])
    cores = first["binding"]
    cores = f"cores {cores[0]} for each rank" if len(set(cores)) == 1 else f"cores {', '.join(cores)}"
    ranks = f"{first['ranks']} ranks"
    if first["bench"] == "ps":
        ranks += f" ({first['servers']} to serve, {first['workers']} to work; {first['consistency']})"
    rows = [row(line) for line in lines]
    table = [list(rows[0]), ["---", *["---:"] * (len(rows[0]) - 1)], *(list(row.values()) for row in rows)]
    return "\n".join(
        [
            f"## {first['mpi']}{', tuned' * first['tuned']}: {first['bench']}",
            "",
            f"`{first['command']}`",
            "",
            f"allred {first['allred']}, backend {first['backend']}; {ranks}, {first['dtype']}, {first['op']}; "
            f"thread level {first['thread_level']}; {cores}; settings: {', '.join(settings) or 'none'}.",
            "",
            *(f"| {' | '.join(cells)} |" for cells in table),
        ]
    )


def row(line: dict) -> dict[str, str]:
    """One line's cells, by the heads of the columns."""
    cells = {"set": f"{line['set']}: {line['tensors']} tensors"} if "set" in line else {"size": size(line["bytes"])}
    cells |= {
        "allred p50, us": number(line["p50_us"]),
        "p99, us": number(line["p99_us"]),
        "algbw, GB/s": number(line["algbw_GBps"]),
    }
    if line["bench"] == "ps":
        cells |= {"updates/s": number(line["updates_per_s"]), "staleness": staleness(line["staleness"])}
    else:
        cells["busbw, GB/s"] = number(line["busbw_GBps"])
    if line["against"]:
        name = "raw MPI" if line["against"] == "mpi" else line["against"].replace("mpi", "raw MPI,")
        if "set" in line:
            cells["against"] = name
        cells["its p50, us" if "set" in line else f"{name} p50, us"] = number(line["against_p50_us"])
        cells["times faster"] = f"{line['speedup']:.2f}"
    return cells | {"samples": f"{line['samples']} of {line['calls_per_sample']}"}


def staleness(counts: dict[str, int]) -> str:
    """{"0": 90, "1": 9, "2": 1} -> 0: 90 %, 1: 9 %, 2: 1 %; the most frequent, where there are many"""
    total = sum(counts.values())
    most = sorted(sorted(counts, key=counts.__getitem__)[-_ROWS:], key=int)
    return ", ".join(f"{value}: {100 * counts[value] / total:.3g} %" for value in most)


def report(lines: list[dict]) -> str:
    """The whole page."""
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    groups = itertools.groupby(lines, key=lambda line: [line[name] for name in SHARED])
    sections = [section(list(group)) for _, group in groups]
    return "\n\n".join([INTRODUCTION.format(date=date, machine=machine()).rstrip(), *sections]) + "\n"


if __name__ == "__main__":
    source, target = sys.argv[1:]
    page = report([json.loads(line) for line in pathlib.Path(source).read_text().splitlines()])
    pathlib.Path(target).write_text(page)
    print(page, end="")
