"""Writes Markdown from the output of `python benchmarks/bench.py --json`. Called by `make bench`.

    python benchmarks/report.py LINES.jsonl benchmarks/RESULTS.md

Lines with the same command, MPI, backend and settings form one section.
"""

import datetime
import itertools
import json
import os
import pathlib
import platform
import re
import sys

from allred.bench.output import size_name

INTRODUCTION = """\
# Results of `make bench`

{date}, {machine}.

Times are medians (p50) of samples. A sample is the mean of a batch of calls, or one long call, on the slowest rank.
allred and raw MPI (mpi4py) run interleaved in the same processes, on the same arrays, in place, blocking; results are
verified before and after. algbw = bytes / p50, busbw = algbw * 2 (n - 1) / n, GB = 10^9 bytes; "speedup" is MPI's p50 /
allred's. `allred/bench/measure.py` has the details. On a shared machine absolute times vary more than ratios.

`ps`: a sample is that of any worker. algbw counts the bytes of the model once; a step moves them twice, to the server
and back. The raw MPI baseline keeps gradients and parameters in flat arrays; `benchmarks/ps_raw_mpi.py` describes its
variants. Staleness: updates between the parameters that a gradient was computed with and those that it was applied to.

Arena on: arrays in memory that the ranks share, reduced in place (`ALLRED_ARENA`). Arena off: arrays of numpy, and
ranks without arenas. `step` is `opt.step` with SGD; "no check" is the same with `nonfinite="ignore"`.

"Concatenate + split" copies into a flat array that is allocated once, reduces it with one call, and copies back.
"Tuned": glibc keeps freed memory and uses huge pages, both for allred and for MPI.
"""

_STALENESS_COUNTS = 8  # shown at most

SECTION_KEYS = ("command", "mpi", "backend", "mpi_settings", "glibc_tunables")


def machine() -> str:
    """CPU, cores, memory and kernel of this machine."""
    model = re.search(r"model name\s*: (.+)", pathlib.Path("/proc/cpuinfo").read_text())
    memory = re.search(r"MemTotal:\s*(\d+) kB", pathlib.Path("/proc/meminfo").read_text())
    return (
        f"{model[1].strip() if model else platform.machine()}, {os.cpu_count()} cores, "
        f"{int(memory[1]) / 2**20 if memory else 0:.0f} GiB, Linux {platform.release()}, "
        f"Python {platform.python_version()}"
    )


def number(value: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if value >= 0.01 else f"{value:.4f}"


def section(lines: list[dict]) -> str:
    """Heading, conditions and table of one command."""
    first = lines[0]
    settings = [f"`{name}={value}`" for name, value in first["mpi_settings"].items()]
    settings += [f"`GLIBC_TUNABLES={first['glibc_tunables']}`"] * bool(first["glibc_tunables"])
    cores = first["binding"]
    cores = f"cores {cores[0]} on each rank" if len(set(cores)) == 1 else f"cores {', '.join(cores)}"
    ranks = f"{first['ranks']} ranks"
    if first["bench"] == "ps":
        ranks += f" (servers {first['servers']}, workers {first['workers']}, {first['consistency']})"
    backend = f"{first['backend']}, arena {first['arena']}" if "arena" in first else first["backend"]
    rows = [row(line) for line in lines]
    table = [list(rows[0]), ["---", *["---:"] * (len(rows[0]) - 1)], *(list(row.values()) for row in rows)]
    return "\n".join(
        [
            f"## {first['mpi']}{', tuned' * first['tuned']}: {first['bench']}",
            "",
            f"`{first['command']}`",
            "",
            f"allred {first['allred']}, backend {backend}; {ranks}, {first['dtype']}, {first['op']}; "
            f"thread level {first['thread_level']}; {cores}; settings: {', '.join(settings) or 'none'}.",
            "",
            *(f"| {' | '.join(cells)} |" for cells in table),
        ]
    )


def row(line: dict) -> dict[str, str]:
    """The cells of one line, by column header."""
    cells = (
        {"set": f"{line['set']}: {line['tensors']} tensors"} if "set" in line else {"size": size_name(line["bytes"])}
    )
    cells |= {
        "allred p50, us": number(line["p50_us"]),
        "p99, us": number(line["p99_us"]),
        "algbw, GB/s": number(line["algbw_GBps"]),
    }
    if line["bench"] == "ps":
        cells |= {"updates/s": number(line["updates_per_s"]), "staleness": staleness(line["staleness"])}
    elif "busbw_GBps" in line:
        cells["busbw, GB/s"] = number(line["busbw_GBps"])
    if line["against"]:
        name = "raw MPI" if line["against"] == "mpi" else line["against"].replace("mpi", "raw MPI,")
        several = "set" in line or "arena" in line  # baselines
        if several:
            cells["baseline"] = name
        cells["baseline p50, us" if several else f"{name} p50, us"] = number(line["against_p50_us"])
        cells["speedup"] = f"{line['speedup']:.2f}"
    return cells | {"samples": f"{line['samples']} of {line['calls_per_sample']}"}


def staleness(counts: dict[str, int]) -> str:
    """Shares of the most frequent values: {"0": 90, "1": 9, "2": 1} -> 0: 90 %, 1: 9 %, 2: 1 %"""
    total = sum(counts.values())
    most = sorted(sorted(counts, key=counts.__getitem__)[-_STALENESS_COUNTS:], key=int)
    return ", ".join(f"{value}: {100 * counts[value] / total:.3g} %" for value in most)


def report(lines: list[dict]) -> str:
    """The Markdown page."""
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    groups = itertools.groupby(lines, key=lambda line: [line[name] for name in SECTION_KEYS])
    sections = [section(list(group)) for _, group in groups]
    return "\n\n".join([INTRODUCTION.format(date=date, machine=machine()).rstrip(), *sections]) + "\n"


if __name__ == "__main__":
    source, target = sys.argv[1:]
    page = report([json.loads(line) for line in pathlib.Path(source).read_text().splitlines()])
    pathlib.Path(target).write_text(page)
    print(page, end="")
