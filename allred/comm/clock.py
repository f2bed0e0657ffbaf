"""By how much the clocks of ranks differ, for the timeline.

The chief sends its clock to each rank that asks, a few times. A question went out at a and its answer c came at b, by
the clock of who asked: the chief's clock showed c at some time between a and b, so it is ahead by

    c - (a + b) / 2,  give or take (b - a) / 2

and the quickest answer says most. Where that is no more than the error, both may well be one clock, that of a machine.
"""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from allred.comm.backends.mpi import Request
from allred.comm.work import Steps

_QUESTIONS = 20  # to each rank, of which the first finds the way cold
_TAG = 2**14 + 1


def measure(comm: Any, ranks: Sequence[int]) -> Steps[tuple[int, int, int]]:
    """Of this rank against the first of `ranks`, of an mpi4py communicator: when, offset, error, in nanoseconds."""
    chief, *others = ranks
    word = np.zeros(1, np.int64)
    best = time.perf_counter_ns(), 0, 0 if comm.Get_rank() == chief else 2**62
    for other in others:
        if comm.Get_rank() not in (chief, other):
            continue
        for _ in range(_QUESTIONS):
            asked = time.perf_counter_ns()
            if comm.Get_rank() == chief:
                yield Request(comm.Irecv(word, other, _TAG), peers=True)
                word[0] = time.perf_counter_ns()
                yield Request(comm.Isend(word, other, _TAG))
            else:
                yield Request(comm.Isend(word, chief, _TAG))
                yield Request(comm.Irecv(word, chief, _TAG), peers=True)
                now = time.perf_counter_ns()
                error = (now - asked) // 2
                best = min(best, (now, int(word[0]) - (asked + error), error), key=lambda found: found[2])
    return best
