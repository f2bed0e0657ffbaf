"""The files that a push and pull of mode ps visits on a worker, and the steps that the server serves in Python:
`mpirun -np 2 python ps_call_path_program.py`. A rank exits with an error if they are more than they may be."""

import sys
from pathlib import Path

import numpy as np

import allred
import allred.ps.context

sys.path.insert(0, str(Path(__file__).parents[1]))
from call_path import files_of, path_of

MOST_FILES = 11  # of a steady step of the worker
FIRST, REPEATS = 10, 200  # steps of the worker. If a rank waits for another for a millisecond, the path is longer
LEAST_STEPS = 20  # that the server serves in C; in Python the first ones, and those whose gradient arrives late


def serve():
    try:
        allred.distributed(allred.optim.SGD(0.01))
    except SystemExit:
        return


allred.init(mode="ps", banner=False)
if allred.ps.context.serves():
    steps = sum(call.endswith(": StepHandler.step") for call in path_of(serve))
    assert steps <= FIRST + REPEATS - LEAST_STEPS, f"the server has served {steps} steps in Python"
    print(f"server: {steps} steps")
else:
    params, grads = [np.zeros(64, np.float32)], [np.ones(64, np.float32)]
    opt = allred.distributed(allred.optim.SGD(0.01))
    opt.broadcast(params)
    for _ in range(FIRST):
        opt.step(params, grads)
    shortest = min([path_of(lambda: opt.step(params, grads)) for _ in range(REPEATS)], key=len)
    files = files_of(shortest)
    assert len(files) <= MOST_FILES, "\n".join([f"{len(files)} files, {sorted(files)}", *shortest])
    print(f"worker: {len(files)} files")
