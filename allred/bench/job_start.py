"""`bench start`: the time of complete jobs, against programs of mpi4py with one barrier.

It runs mpirun itself, with three programs in turn: mpi4py, mpi4py with numpy, and allred. Rank 0 measures the parts of
allred's program. The rest of the job's time is mpirun, the start of the interpreter, and the exit.
"""

import argparse
import json
import os
import statistics
from typing import Any

from allred import testing
from allred.bench.output import ResultWriter, rounded
from allred.cluster import launcher
from allred.errors import ConfigError
from allred.wording import count

_BASELINES = {
    "mpi4py": "from mpi4py import MPI; MPI.COMM_WORLD.Barrier()",
    "mpi4py and numpy": "import numpy; from mpi4py import MPI; MPI.COMM_WORLD.Barrier()",
}

_PROGRAM = """
import json, time
times = []
def measured(part, call):
    wall, cpu = time.perf_counter(), time.process_time()
    result = call()
    times.append((part, time.perf_counter() - wall, time.process_time() - cpu))
    return result

def step():
    params = [np.zeros(64, np.float32)]
    allred.distributed(allred.optim.SGD(lr=0.1)).step(params, [np.ones(64, np.float32)])

np = measured("import numpy", lambda: __import__("numpy"))
allred = measured("import allred", lambda: __import__("allred"))
measured("init", lambda: allred.init(banner=False))
measured("first step", step)
if allred.rank() == 0:
    print(json.dumps(times))
"""


def run(options: argparse.Namespace, command: str) -> None:
    """Measure and print. Raises ConfigError under mpirun, or if a job fails."""
    if launcher.name(os.environ):
        raise ConfigError("bench start runs mpirun itself: call it without mpirun")
    ours: list[float] = []
    others: dict[str, list[float]] = {name: [] for name in _BASELINES}
    parts: dict[str, list[tuple[float, float]]] = {}
    for _ in range(options.runs):
        for name, code in _BASELINES.items():
            others[name].append(_job(options.ranks, code).seconds)
        result = _job(options.ranks, _PROGRAM)
        ours.append(result.seconds)
        for part, wall, cpu in json.loads(result.out.splitlines()[-1]):
            parts.setdefault(part, []).append((wall, cpu))
    records = [
        {"part": part, "wall_ms": _ms(wall for wall, _ in found), "cpu_ms": _ms(cpu for _, cpu in found)}
        for part, found in parts.items()
    ]
    job_records = [
        {
            "part": "job",
            "wall_ms": _ms(ours),
            "against": name,
            "against_wall_ms": _ms(theirs),
            "ratio": rounded(statistics.median(a / b for a, b in zip(ours, theirs, strict=True))),
        }
        for name, theirs in others.items()
    ]
    writer = ResultWriter(options.json, enabled=True)
    writer.text(f"start of {count(options.ranks, 'rank')}, medians of {count(options.runs, 'job')}; {command}")
    for record in [*records, *job_records]:
        text = f"  {record['part']:16}{record['wall_ms']:>8} ms wall"
        if "against" in record:
            text += f"; {record['against']} {record['against_wall_ms']} ms, ratio {record['ratio']}"
        else:
            text += f" {record['cpu_ms']:>8} ms CPU"
        writer.result({"bench": "start", "ranks": options.ranks, "runs": options.runs, **record}, text)


def _job(ranks: int, code: str) -> testing.Result:
    try:
        result = testing.mpirun(ranks, "-c", code)
    except FileNotFoundError as error:  # there is no mpirun
        raise ConfigError(str(error)) from None
    if result.code:
        raise ConfigError(f"mpirun -np {ranks} failed: {result.text}")
    return result


def _ms(seconds: Any) -> float:
    return rounded(1000 * statistics.median(seconds))
