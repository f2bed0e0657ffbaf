"""The program of test_elastic.py with a loop of its own, which calls allred.recover(). RECOVER_PROGRAM: JSON with
`directory`, where each process writes result-PID; `kill`: the rank of the first world that dies, and in which step;
`size`: the number of ranks at the end, for which it trains longer.
"""

import json
import os
import signal

import numpy as np

import allred

STEPS, ROWS, BATCH = 40, 64, 8


def batch_of(step):
    return np.random.default_rng(step).integers(0, ROWS, BATCH)


def serial(steps):
    targets, w = np.random.default_rng(7).standard_normal((ROWS, 3)), np.zeros(3)
    for step in range(steps):
        w -= 0.1 * (w - targets[batch_of(step)].mean(axis=0))
    return w


def main():
    allred.init(banner=False)
    targets, w = np.random.default_rng(7).standard_normal((ROWS, 3)), np.full(3, float(allred.rank()))
    opt = allred.distributed(allred.optim.SGD(lr=0.1))
    opt.broadcast(w)
    given = json.loads(os.environ["RECOVER_PROGRAM"])
    recovered, (rank, last) = 0, given["kill"]
    while opt.global_step < STEPS or allred.size() != given["size"]:
        rows = np.array_split(batch_of(opt.global_step), allred.size())[allred.rank()]
        if (allred.rank(), opt.global_step, allred.world.current().generation) == (rank, last, 1):
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            opt.step(w, w - targets[rows].mean(axis=0), samples=len(rows))
            assert allred.allreduce(1.0, op=allred.Sum) == allred.size()
        except allred.RanksChanged:
            allred.recover()
            recovered += 1
    result = {
        "rank": allred.rank(),
        "size": allred.size(),
        "recovered": recovered,
        "steps": opt.global_step,
        "w": w.tolist(),
    }
    with open(f"{given['directory']}/result-{os.getpid()}", "w") as file:
        json.dump(result, file)


if __name__ == "__main__":
    main()
