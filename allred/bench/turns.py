"""How the steps of several workers are timed, and those of one worker against other ways.

As in measure.py the ways take turns, each opened by an untimed call, in samples of a batch of calls; but workers meet
only at the beginning of a turn and not before each sample, so that each goes at its own pace and gradients are as stale
as they are in training. p50 and p99 are over the samples of all workers. All make the same number of steps, since a
policy may let none go on alone. steps_per_s: the steps of all workers in all turns, by the time that the slowest of
each turn took for it.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from allred.bench.measure import MIN_ROUNDS, Call, Samples, plan

Around = Callable[[str, int], AbstractContextManager[None]]


@dataclasses.dataclass(frozen=True)
class Turns:
    """What was measured of one way; steps: calls of one worker, the untimed ones included."""

    samples: Samples
    steps_per_s: float
    steps: int


def measure(ways: Mapping[str, Call], comm: Any, seconds: float, around: Around) -> dict[str, Turns]:
    """Time all ways for about `seconds`. Collective over the workers' mpi4py communicator `comm`.

    around: what to be inside of for some calls of a way; it is told its name and how many they are.
    """
    begin = time.perf_counter()
    calls = dict.fromkeys(ways, 0)

    def turn(name: str, batch: int, samples: int) -> tuple[list[float], float]:
        calls[name] += 1 + batch * samples
        with around(name, 1 + batch * samples):
            return _turn(ways[name], batch, samples, comm)

    batch, samples = plan([_call_s(functools.partial(turn, name, samples=1)) for name in ways])
    times: dict[str, list[float]] = {name: [] for name in ways}
    elapsed = dict.fromkeys(ways, 0.0)
    rounds, last = 0, False
    while not last:
        for name in ways:
            each, longest = turn(name, batch, samples)
            times[name] += each
            elapsed[name] += longest
        rounds += 1
        last = comm.bcast(rounds >= MIN_ROUNDS and time.perf_counter() - begin > seconds)
    return {
        name: Turns(Samples(np.array(times[name]), batch), batch * len(times[name]) / elapsed[name], calls[name])
        for name in ways
    }


def _turn(call: Call, batch: int, samples: int, comm: Any) -> tuple[list[float], float]:
    """Seconds a call, of each sample of all workers; and of the whole turn, where it took longest."""
    call()
    comm.Barrier()
    ends = [time.perf_counter()]
    for _ in range(samples):
        for _ in range(batch):
            call()
        ends.append(time.perf_counter())
    everyone = comm.allgather((np.diff(ends) / batch, ends[-1] - ends[0]))
    return [float(s) for each, _ in everyone for s in each], max(seconds for _, seconds in everyone)


def _call_s(turn: Callable[[int], tuple[list[float], float]]) -> float:
    """Roughly what a call takes, once it is warm; the same number on every worker."""
    turn(1)
    batch = 1
    while True:
        times, _ = turn(batch)
        if max(times) * batch > 1e-3:
            return max(times)
        batch *= 4
