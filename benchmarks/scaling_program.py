"""The program that benchmarks/scaling.py runs on every rank: seconds of an allreduce of each size, in rounds in which
the sizes alternate. The chief prints one line of JSON.

    scaling_program.py SECONDS BYTES...
"""

import json
import os
import sys
import time

import numpy as np

import allred

WARM_UP = 2  # rounds, in which TCP learns the link
MIN_ROUNDS, MAX_ROUNDS = 5, 200


def call(array):
    """Return when this rank starts and ends an allreduce. All ranks have one clock."""
    allred.barrier()
    start = time.monotonic()
    allred.allreduce_(array, allred.Max)
    return start, time.monotonic()


allred.init(banner=False)
os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))  # other jobs may use the machine
limit_s, sizes = float(sys.argv[1]), [*map(int, sys.argv[2:])]
arrays = {nbytes: np.ones(nbytes // 4, np.float32) for nbytes in sizes}
times, begin = [], time.monotonic()
for number in range(WARM_UP + MAX_ROUNDS):
    row = [call(array) for array in arrays.values()]
    times += [row] * (number >= WARM_UP)
    is_over = np.array([number >= WARM_UP + MIN_ROUNDS and time.monotonic() - begin > limit_s], np.int32)
    if allred.broadcast(is_over)[0]:
        break
everyone = np.array(allred.allgather_object(times))  # ranks, rounds, sizes, (start, end)
took_s = everyone[..., 1].max(axis=0) - everyone[..., 0].max(axis=0)
if allred.is_chief():
    print(json.dumps(dict(zip(sizes, np.percentile(took_s, [10, 50, 90], axis=0).T.tolist(), strict=True))))
