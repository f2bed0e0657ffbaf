"""Loss against time and against updates in every mode, with three workers of which one is slow: docs/modes.png.

    python benchmarks/modes.py              trains in all modes, writes benchmarks/modes.json, draws docs/modes.png
    python benchmarks/modes.py --draw       only draws; drawing takes pip install matplotlib
    python benchmarks/modes.py --moving     prints how fast the modes are if every worker is slow now and then instead

All modes train the same model on the digits, from the same start, for the same time. A gradient takes a worker
GRADIENT_S, and the last worker three times as long (with --moving: every worker, each third time on average). What
computing leaves of that time is slept, since otherwise three workers would wait for each other on fewer cores. The
learning rate is LR for each gradient in an update, so a sample moves the parameters equally far in every mode. The
chief keeps its parameters every SNAPSHOT_S; their loss on the whole training set is computed when the time is up.
"""

import argparse
import datetime
import json
import os
import pathlib
import sys
import time

import numpy as np

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))
RESULTS, PICTURE = ROOT / "benchmarks/modes.json", ROOT / "docs/modes.png"
WORKERS, BATCH, LR, SECONDS, SNAPSHOT_S = 3, 32, 0.04, 12.0, 0.1
GRADIENT_S, SLOWER = 0.01, 3

# What is drawn: name, settings, gradients in an update.
MODES = [
    ("sync allreduce", {"mode": "sync"}, WORKERS),
    ("ps sync", {"mode": "ps", "consistency": "sync"}, WORKERS),
    ("ps sync, 1 backup worker", {"mode": "ps", "consistency": "sync", "replicas_to_aggregate": 2}, 2),
    ("ps bounded, staleness 0", {"mode": "ps", "consistency": "bounded", "staleness": 0}, 1),
    ("ps bounded, staleness 4", {"mode": "ps", "consistency": "bounded", "staleness": 4}, 1),
    ("ps async", {"mode": "ps", "consistency": "async"}, 1),
]


def train(in_update: int, moving: bool) -> None:
    """On every rank, under mpirun: train until the time is up; the chief prints a line of JSON."""
    import digits_sync as digits
    from sklearn.datasets import load_digits

    import allred

    allred.init()
    data = load_digits()
    x, y = (data.data / 16).astype(np.float32), data.target
    rows = np.random.default_rng(0).permutation(len(x))[:1437]
    x, y = x[rows], y[rows]
    rng, params = np.random.default_rng((1, allred.rank())), digits.new_parameters()
    opt = allred.distributed(allred.optim.SGD(lr=LR * in_update))
    opt.broadcast(params)
    with_servers = allred.world_size() > allred.size()
    last = allred.rank() == allred.size() - 1
    fewest = SECONDS / GRADIENT_S / SLOWER  # all ranks have to make the same number of allreduces
    start, steps = time.perf_counter(), 0
    seconds, updates, snapshots = [0.0], [0], [_copy(params)]
    while time.perf_counter() < start + SECONDS if with_servers else steps < fewest:
        began = time.perf_counter()
        rows = rng.integers(0, len(x), BATCH)
        _, grads = digits.loss_and_grads(params, x[rows], y[rows])
        slow = rng.random() < 1 / 3 if moving else last
        time.sleep(max(0.0, began + GRADIENT_S * (SLOWER if slow else 1) - time.perf_counter()))
        opt.step(params, grads)
        steps += 1
        now = time.perf_counter() - start
        if allred.rank() == 0 and seconds[-1] + SNAPSHOT_S < now <= SECONDS:
            seconds.append(now)
            updates.append(opt.statistics().updates if with_servers else steps)
            snapshots.append(_copy(params))
    if allred.rank() == 0:
        loss = [float(digits.loss_and_grads(p, x, y)[0]) for p in snapshots]
        record = {"seconds": [round(s, 3) for s in seconds], "updates": updates, "loss": [round(v, 4) for v in loss]}
        if with_servers:
            found = opt.statistics()
            record["staleness"] = {str(late): count for late, count in sorted(found.staleness.items())}
            record["dropped"] = {str(worker): count for worker, count in sorted(found.dropped.items())}
        print(json.dumps(record), flush=True)


def _copy(params: dict) -> dict:
    return {name: value.copy() for name, value in params.items()}


def measure(moving: bool) -> dict:
    """All modes, one after the other."""
    from report import machine

    from allred import testing

    found = {
        "date": datetime.date.today().isoformat(), "machine": machine(), "cores": os.cpu_count(), "workers": WORKERS,
        "gradient_s": GRADIENT_S, "slower": SLOWER, "batch": BATCH, "lr_for_a_gradient": LR,
        "modes": {},
    }  # fmt: skip
    for name, settings, in_update in MODES:
        env = {f"ALLRED_{key.upper()}": str(value) for key, value in settings.items()} | {"ALLRED_BANNER": "0"}
        ranks = WORKERS + (settings["mode"] == "ps")
        options = ["--train", in_update, *["--moving"] * moving]
        result = testing.mpirun(ranks, __file__, *options, env=env, timeout_s=SECONDS + 60)
        if result.code != 0:
            sys.exit(f"{name}: {result.text}")
        found["modes"][name] = record = {"gradients_in_update": in_update, **json.loads(result.out.splitlines()[-1])}
        print(f"{name:26} {record['updates'][-1] / record['seconds'][-1]:6.1f} updates/s, loss {record['loss'][-1]}")
    return found


def draw(found: dict) -> None:
    """Two panels with one scale of losses."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.4), sharey=True, layout="constrained")
    for number, (name, record) in enumerate(found["modes"].items()):
        style = {"color": f"C{number}", "linestyle": ("-", "--", "-", "-", "--", ":")[number], "linewidth": 1.6}
        gradients = record["gradients_in_update"]
        label = f"{name}: {gradients} gradient{'s' * (gradients > 1)} an update"
        axes[0].plot(record["seconds"], record["loss"], **style)
        axes[1].plot(record["updates"], record["loss"], label=label, **style)
    axes[0].set(xlabel="seconds", ylabel="loss on the training set", yscale="log")
    axes[1].set(xlabel="updates of the parameters")
    axes[1].legend(fontsize=8)
    for axis in axes:
        axis.grid(alpha=0.3, which="both")
        axis.set_xlim(left=0)
    milliseconds = 1000 * found["gradient_s"]
    figure.suptitle(
        f"digits, {found['workers']} workers: a gradient of {found['batch']} samples takes {milliseconds:g} ms, "
        f"on one worker {found['slower'] * milliseconds:g} ms",
        fontsize=10,
    )
    figure.savefig(PICTURE, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draw", action="store_true", help="only draw what benchmarks/modes.json has")
    parser.add_argument("--moving", action="store_true", help="every worker is slow now and then; writes nothing")
    parser.add_argument("--train", type=int, metavar="GRADIENTS", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        train(arguments.train, arguments.moving)
        return
    if arguments.moving:
        measure(moving=True)
        return
    if not arguments.draw:
        RESULTS.write_text(json.dumps(measure(moving=False)) + "\n")
    draw(json.loads(RESULTS.read_text()))


if __name__ == "__main__":
    main()
