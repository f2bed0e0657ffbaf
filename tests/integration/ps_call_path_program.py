"""The files that a push and pull of mode ps visits: `mpirun -np 2 python ps_call_path_program.py`. Each rank exits with
an error if they are more than they may be, and prints their paths."""

import itertools
import sys
from pathlib import Path

import numpy as np

import allred
import allred.ps.context

sys.path.insert(0, str(Path(__file__).parents[1]))
from call_path import files_of, path_of

MOST = {"worker": 11, "server": 8}
REPEATS = 30  # if a rank waits for another for a millisecond, the path is longer


def check(role, paths):
    shortest = min(paths, key=len)
    files = files_of(shortest)
    assert 0 < len(files) <= MOST[role], "\n".join([f"{role}: {len(files)} files, {sorted(files)}", *shortest])
    print(f"{role}: {len(files)} files")


def steps_of(calls):
    """Divide the calls of a server at the beginning of each step."""
    starts = [index for index, call in enumerate(calls) if call.endswith(": StepHandler.step")]
    return [calls[start:stop] for start, stop in itertools.pairwise(starts)]


def serve():
    try:
        allred.distributed(allred.optim.SGD(0.01))
    except SystemExit:
        return


allred.init(mode="ps", banner=False)
if allred.ps.context.serves():
    check("server", steps_of(path_of(serve))[-REPEATS:])
else:
    params, grads = [np.zeros(64, np.float32)], [np.ones(64, np.float32)]
    opt = allred.distributed(allred.optim.SGD(0.01))
    opt.broadcast(params)
    for _ in range(10):
        opt.step(params, grads)
    check("worker", [path_of(lambda: opt.step(params, grads)) for _ in range(REPEATS)])
