"""The cost model of `python -m allred model` against measurements: the table of docs/scaling.md. It needs root and gcc,
and takes 15 minutes.

    python benchmarks/scaling.py            measures, writes benchmarks/scaling.json, then the table
    python benchmarks/scaling.py --write    the table from the file
    python benchmarks/scaling.py --layouts 2x1,4x2 --rates 100 --latencies 5000    prints some rows; writes nothing

Each host is a network namespace. Their links have a rate and a latency (link_emulator.c); MPI and the watchers use
others. Ranks and emulator run with real-time priority, because the machine is used by others; the times are medians.

overhead_s is measured for each layout, because all hosts share the cores of this machine: by allreduces of 4 B on links
of 10 Gbit/s and 1 ms, in which ranks sleep while they wait; the shorter of two
medians. The other constants are those of the links, or defaults.
"""

import argparse
import contextlib
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests/integration"))
from hosts import hosts  # noqa: E402

from allred.bench.output import size_name  # noqa: E402
from allred.cost_model import costs  # noqa: E402

PROGRAM, RESULTS = ROOT / "benchmarks/scaling_program.py", ROOT / "benchmarks/scaling.json"
PAGE = ROOT / "docs/scaling.md"
LAYOUTS = [(2, 1), (3, 1), (4, 1), (6, 1), (8, 1), (4, 2)]  # hosts, ranks of each
RATES, LATENCIES = [50, 100, 250], [500, 2000, 10_000]  # Mbit/s, us
SIZES = [4, 2**14, 2**16, 2**18, 2**20, 2**22]
PACKET_BYTES, SECONDS, GOAL = 9000, 3, 0.15
EMPTY = 10_000, 1000  # the link for overhead_s
BEGIN, END = "<!-- measured: benchmarks/scaling.py -->\n", "<!-- end of measured -->"


@contextlib.contextmanager
def links(here, emulator, rate, latency):
    """Links of Mbit/s and us between the hosts, with TCP's usual congestion control."""
    words = [emulator, str(rate * 10**6), str(latency), *here.names]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        for number, name in enumerate(here.names, start=1):
            for command in (
                f"addr add 10.98.0.{number}/24 dev slow",
                f"link set slow mtu {PACKET_BYTES} txqueuelen 10000 up",
                "route change 10.98.0.0/24 dev slow congctl cubic",
            ):
                subprocess.run(["ip", "-n", name, *command.split()], check=True)
            setting = "net.ipv4.tcp_slow_start_after_idle=0"  # sizes alternate, so connections are idle between calls
            subprocess.run(["ip", "netns", "exec", name, "sysctl", "-qw", setting], check=True)
        yield
        process.stdin.close()


def measure_links(here, emulator, layout, rate, latency, sizes):
    """Return {bytes: (10th percentile, median, 90th percentile)} in seconds."""
    count, ranks = layout
    env = {"ALLRED_TRANSPORT": "tcp", "ALLRED_NETWORK": "slow", "OMP_NUM_THREADS": "1", "ALLRED_TIMEOUT_S": "100"}
    with links(here, emulator, rate, latency):
        result = here.run("mpich", [ranks] * count, PROGRAM, SECONDS, *sizes, timeout_s=120, env=env)
    if result.code:
        raise SystemExit(result.text)
    return {int(nbytes): times for nbytes, times in json.loads(result.out.splitlines()[-1]).items()}


def measure(layouts, rates, latencies):
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        emulator = f"{directory}/link_emulator"
        source = str(ROOT / "benchmarks/link_emulator.c")
        subprocess.run(["gcc", "-O2", "-Wall", "-Wextra", "-o", emulator, source], check=True)
        for layout in layouts:
            with hosts(layout[0], pathlib.Path(directory)) as here:
                empty = min(measure_links(here, emulator, layout, *EMPTY, [4])[4][1] for _ in range(2))
                messages = costs.header_messages(layout[0])
                overhead_s = (empty - costs.Machine.python_s - 1e-6 * EMPTY[1] * len(messages)) / sum(messages)
                for rate in rates:
                    for latency in latencies:
                        times = measure_links(here, emulator, layout, rate, latency, SIZES)
                        row = {"layout": layout, "rate": rate, "latency": latency, "overhead_s": overhead_s}
                        rows.append({**row, "times": times})
                        print(*names(rows[-1]), *cells(rows[-1]), sep="  ", flush=True)
    return rows


def modelled(row):
    """Return {bytes: seconds} of the model, for the algorithm that allred uses."""
    machine = costs.Machine(
        row["latency"] * 1e-6, row["rate"] * 1e6 / 8, overhead_s=row["overhead_s"], packet_bytes=PACKET_BYTES
    )
    found = {}
    for nbytes in map(int, row["times"]):
        cost = costs.ALGORITHMS[costs.algorithm_used(*row["layout"], nbytes)]
        found[nbytes] = cost(*row["layout"], nbytes, machine).total_s
    return found


def cells(row):
    """Yield the measured and the modelled milliseconds of each size; a star for a difference of more than the goal."""
    for (_, median_s, _), model_s in zip(row["times"].values(), modelled(row).values(), strict=True):
        mark = " *" * (abs(median_s / model_s - 1) > GOAL)
        yield f"{number(1e3 * median_s)} / {number(1e3 * model_s)}{mark}"


def number(value):
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def names(row):
    hosts, ranks = row["layout"]
    return [f"{hosts}x{ranks}", f"{row['rate']} Mbit/s", f"{row['latency'] / 1000:g} ms"]


def table(rows):
    titles = ["hosts x ranks", "link", "latency", "message"]
    titles += [size_name(nbytes) for nbytes in SIZES]
    lines = [titles, ["---"] * len(titles)]
    lines += [[*names(row), f"{1e6 * row['overhead_s']:.0f} us", *cells(row)] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def summary(rows):
    """Return how many of the times are within the goal, and the range of the ratios."""
    ratios = [
        median_s / model_s
        for row in rows
        for (_, median_s, _), model_s in zip(row["times"].values(), modelled(row).values(), strict=True)
    ]
    within = sum(abs(ratio - 1) <= GOAL for ratio in ratios)
    return (
        f"{within} of {len(ratios)} times are within {GOAL:.0%} of the model; measured / model is {min(ratios):.2f} to "
        f"{max(ratios):.2f}, the median {statistics.median(ratios):.2f}."
    )


def write(rows):
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{summary(rows)}\n\n{table(rows)}\n{END}{rest.split(END)[1]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="only write the table from the file")
    parser.add_argument("--layouts", type=lambda text: [tuple(map(int, each.split("x"))) for each in text.split(",")])
    for name in ("--rates", "--latencies"):
        parser.add_argument(name, type=lambda text: [*map(int, text.split(","))])
    options = parser.parse_args()
    if options.write:
        return write(json.loads(RESULTS.read_text()))
    rows = measure(options.layouts or LAYOUTS, options.rates or RATES, options.latencies or LATENCIES)
    print(table(rows), summary(rows), sep="\n")
    if not (options.layouts or options.rates or options.latencies):
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
        write(rows)


if __name__ == "__main__":
    main()
