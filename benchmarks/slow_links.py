"""Compression and mode local on slow links: speed, and loss after equal samples and equal time. Tables of
docs/slow-links.md and docs/slow-links.png. It needs root and torch, and takes 20 minutes.

    python benchmarks/slow_links.py            measures, writes benchmarks/slow_links.json, then tables and picture
    python benchmarks/slow_links.py --write    tables and picture from the file; takes pip install matplotlib

Each host is a network namespace with one rank, and each link is shaped in both directions. A loss after equal time
comes from two measurements: the losses of 4 ranks after each number of steps, and the seconds of a step of the same
way at the rate of the link, with parameters of the same size and 50 ms of computation, which is slept.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import numpy as np

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests/integration"))
from harness import mpirun  # noqa: E402
from hosts import hosts  # noqa: E402

PROGRAM, RESULTS = ROOT / "benchmarks/slow_links_program.py", ROOT / "benchmarks/slow_links.json"
PAGE, PICTURE = ROOT / "docs/slow-links.md", ROOT / "docs/slow-links.png"
RATES = ["50mbit", "200mbit", "1gbit"]
NAMES = {"50mbit": "50 Mbit/s", "200mbit": "200 Mbit/s", "1gbit": "1 Gbit/s"}
TEXT_MIB, FLOOR_MIB = 4.87, 3.15  # of the parameters of the text model; 3.3 MB
SEEDS = [1, 2, 3]  # of the digits
DRAWN = ["sync", "int8", "int4", "PowerSGD rank 4", "local, every 32", "streaming, every 32"]


def shape(here, rate):
    for number, name in enumerate(here.names):
        for namespace, device in ((name, "eth0"), (here.hub, f"p{number}")):
            words = f"qdisc replace dev {device} root tbf rate {rate} burst 256kb latency 50ms"
            subprocess.run(["tc", "-n", namespace, *words.split()], check=True)


def settings(mode):
    return {"ALLRED_MODE": mode, "ALLRED_TRANSPORT": "tcp", "OMP_NUM_THREADS": "1", "ALLRED_TIMEOUT_S": "300"}


def result(found):
    if found.code:
        raise SystemExit(found.text)
    return json.loads(found.out.splitlines()[-1])


def measure():
    found = {"speed": {}, "steps": {}, "floor": {}, "curves": {"digits": [], "text": []}}
    with tempfile.TemporaryDirectory() as directory, hosts(4, pathlib.Path(directory)) as here:
        for rate in RATES:
            shape(here, rate)
            for layout in ([1, 1, 0, 0], [1, 1, 1, 1]):
                key = f"{sum(layout)}x1, {rate}"
                found["speed"][key] = result(
                    here.run("mpich", layout, PROGRAM, "speed", timeout_s=300, env=settings("sync"))
                )
                print(key, found["speed"][key], flush=True)
            found["steps"][rate] = {}
            for mode in ("sync", "local"):
                run = here.run("mpich", [1] * 4, PROGRAM, "steps", str(TEXT_MIB), timeout_s=500, env=settings(mode))
                found["steps"][rate] |= result(run)
            print(rate, found["steps"][rate], flush=True)
        shape(here, "50mbit")
        for mode in ("sync", "local"):
            layout = [1, 1, 0, 0]
            run = here.run("mpich", layout, PROGRAM, "steps", str(FLOOR_MIB), timeout_s=500, env=settings(mode))
            found["floor"] |= result(run)
    for task, seeds in (("digits", SEEDS), ("text", SEEDS[:1])):
        for seed in seeds:
            curves = {}
            for mode in ("sync", "local"):
                env = settings(mode) | {"ALLRED_PRETEND_NODES": "1,1,1,1"}
                curves |= result(mpirun(4, PROGRAM, "train", task, str(seed), env=env, timeout_s=900))
            found["curves"][task].append(curves)
            print(task, seed, {name: curve[-1] for name, curve in curves.items()}, flush=True)
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


def loss_at(curves, name, steps):
    """Return the mean loss over the seeds after so many steps, between evaluations on a line."""
    return float(np.mean([np.interp(steps, *zip(*each[name], strict=True)) for each in curves]))


def table(titles, rows):
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines) + "\n"


def budget_s(found, rate, steps):
    """Return the time in which the fastest way makes all steps."""
    return steps * min(found["steps"][rate].values())


def speed_table(found):
    rows = []
    for case, times in found["speed"].items():
        base, (layout, rate) = times["float32"], case.split(", ")
        for name, (seconds, cpu, sent) in times.items():
            if name != "float32":
                cells = [f"{base[0] / seconds:.1f}", f"{cpu / base[1]:.2f}", f"{sent / base[2]:.3f}"]
                rows.append([layout, NAMES[rate], name, *cells])
    return table(["hosts", "link", "encoding", "speed", "CPU", "bytes"], rows)


def loss_table(found):
    curves, steps = found["curves"], max(step for step, _ in found["curves"]["text"][0]["sync"])
    rows = []
    for name in curves["text"][0]:
        cells = [name, f"{loss_at(curves['digits'], name, steps):.3f}", f"{loss_at(curves['text'], name, steps):.3f}"]
        for rate in RATES:
            step_s = found["steps"][rate][name]
            made = min(steps, budget_s(found, rate, steps) / step_s)
            cells += [f"{1000 * step_s:.0f}", f"{loss_at(curves['text'], name, made):.3f}"]
        rows.append(cells)
    titles = [f"{NAMES[rate]}: {what}" for rate in RATES for what in ("ms a step", "loss after equal time")]
    return table(["", "digits", "text: loss after equal samples", *titles], rows)


def floor_table(found):
    base, rows = found["floor"]["sync"], []
    for name in ("sync", "int8", "int4", "local, every 8", "local, every 32", "streaming, every 32"):
        seconds = found["floor"][name]
        rows.append([name, f"{1000 * seconds:.0f}", f"{base / seconds:.1f}"])
    return table(["2 hosts, 50 Mbit/s, 3.3 MB", "ms a step", "steps/s, sync = 1"], rows)


def write():
    found, page = json.loads(RESULTS.read_text()), PAGE.read_text()
    for name, text in (("speed", speed_table(found)), ("loss", loss_table(found)), ("steps", floor_table(found))):
        begin, end = f"<!-- {name}: benchmarks/slow_links.py -->\n", f"<!-- end of {name} -->"
        before, rest = page.split(begin)
        page = f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}"
    PAGE.write_text(page)
    draw(found)


def draw(found):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(RATES), figsize=(12, 3.6), sharey=True)
    for axis, rate in zip(axes, RATES, strict=True):
        for name in DRAWN:
            curve = found["curves"]["text"][0][name]
            axis.plot([step * found["steps"][rate][name] for step, _ in curve], [loss for _, loss in curve], label=name)
        axis.set(title=NAMES[rate], xlabel="seconds", xlim=(0, 1.5 * budget_s(found, rate, curve[-1][0])))
    axes[0].set(ylabel="loss of the text model", ylim=(1.8, 4.0))
    axes[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=110, metadata={"Software": None})


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="only write tables and picture from the file")
    if not parser.parse_args().write:
        if os.geteuid():
            raise SystemExit("benchmarks/slow_links.py makes network namespaces: run it as root")
        measure()
    write()


if __name__ == "__main__":
    main()
