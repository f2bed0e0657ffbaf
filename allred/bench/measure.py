"""Interleaved timing of several calls, so that two implementations can be compared on a noisy machine.

A sample is the mean time of a batch of calls. A batch lasts about 200 us; a long call is a batch of its own. Every
round gives each call a turn of a few milliseconds: one untimed warm-up call, then the same number of samples for each
call. Rounds repeat until the time is used up. p50 and p99 are percentiles over all samples; speedup is the ratio of the
two p50. There are two ways to time a turn:

`interleave`        collectives: an untimed barrier before each sample; a sample is the time of the slowest rank
`interleave_steps`  workers of parameter servers: a barrier at the start of a turn only, so that workers drift apart as
                    in training; samples of all workers count; all workers make the same number of steps, because some
                    consistency modes do not let one worker continue alone

    algbw = bytes / p50          busbw = algbw * 2 (n - 1) / n        (nccl-tests' definitions; GB = 10**9 bytes)
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import NDArray

Call = Callable[[], object]
TurnContext = Callable[[str, int], AbstractContextManager[None]]

BATCH_S = 200e-6
MAX_BATCH = 1000  # calls
TURN_S = 20e-3
MAX_TURN = 100  # samples
MIN_ROUNDS = 5
_WARM_S = 1e-3  # a batch of this length is long enough to estimate the time of a call


def no_synchronize() -> None:
    """Do nothing: a blocking call on host arrays is complete when it returns."""


@dataclasses.dataclass(frozen=True)
class CallTimes:
    """Times of one call: `seconds` float64 (samples,), each the mean of `batch` calls."""

    seconds: NDArray[np.float64]
    batch: int

    def us(self, percent: float) -> float:
        return float(np.percentile(self.seconds, percent)) * 1e6


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """Times of one kind of training step. steps: calls of one worker, warm-up included. steps_per_s: timed steps of all
    workers, divided by the sum over turns of the slowest worker's time."""

    times: CallTimes
    steps_per_s: float
    steps: int


def algbw(nbytes: int, us: float) -> float:
    """Algorithm bandwidth in GB/s, from bytes and microseconds.

    >>> algbw(64_000_000, us=8000)
    8.0
    """
    return nbytes / us / 1e3


def busbw(algbw_gbps: float, size: int) -> float:
    """Bus bandwidth in GB/s of an allreduce: the load of each link of a ring of `size` ranks.

    >>> busbw(8.0, size=2), busbw(8.0, size=4)
    (8.0, 12.0)
    """
    return algbw_gbps * 2 * (size - 1) / size


def plan(call_s: list[float]) -> tuple[int, int]:
    """Calls per sample and samples per turn, the same for all calls. call_s: estimated time of each call.

    >>> plan([1e-6, 2e-6]), plan([80e-3, 20e-3])
    ((200, 50), (1, 2))
    """
    batch = min(max(round(BATCH_S / min(call_s)), 1), MAX_BATCH)
    return batch, min(max(round(TURN_S / (batch * max(call_s))), 2), MAX_TURN)


def interleave(
    calls: Mapping[str, Call], comm: Any, seconds: float, synchronize: Call = no_synchronize
) -> dict[str, CallTimes]:
    """Time all calls for about `seconds`. Collective over the mpi4py communicator `comm`.

    synchronize: waits for work that a call leaves running (on a GPU); called before each sample and as its end.

    >>> found = interleave({"a": f, "b": g}, MPI.COMM_WORLD, seconds=3)   # doctest: +SKIP
    >>> found["b"].us(50) / found["a"].us(50)                             # doctest: +SKIP
    """
    begin = time.perf_counter()

    def estimate(call: Call) -> float:
        call()
        return _estimate_call_s(lambda batch: float(slowest([sample(call, batch, comm, synchronize)], comm)[0]))

    batch, samples = plan([estimate(call) for call in calls.values()])
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in rounds(begin, seconds, comm):
        for name, call in calls.items():
            call()
            times[name] += [sample(call, batch, comm, synchronize) for _ in range(samples)]
    return {name: CallTimes(slowest(each, comm), batch) for name, each in times.items()}


def interleave_steps(
    calls: Mapping[str, Call], comm: Any, seconds: float, context: TurnContext
) -> dict[str, StepTimes]:
    """Time steps of all workers for about `seconds`. Collective over the workers' mpi4py communicator `comm`. context:
    `context(name, calls)` makes a context manager that surrounds a turn of that many calls."""
    begin = time.perf_counter()
    steps = dict.fromkeys(calls, 0)

    def turn(name: str, batch: int, samples: int) -> tuple[list[float], float]:
        steps[name] += 1 + batch * samples
        with context(name, 1 + batch * samples):
            return _turn_of_steps(calls[name], batch, samples, comm)

    def estimate(name: str) -> float:
        turn(name, 1, samples=1)
        return _estimate_call_s(lambda batch: max(turn(name, batch, samples=1)[0]))

    batch, samples = plan([estimate(name) for name in calls])
    times: dict[str, list[float]] = {name: [] for name in calls}
    elapsed = dict.fromkeys(calls, 0.0)
    for _ in rounds(begin, seconds, comm):
        for name in calls:
            all_times, longest = turn(name, batch, samples)
            times[name] += all_times
            elapsed[name] += longest
    return {
        name: StepTimes(CallTimes(np.array(times[name]), batch), batch * len(times[name]) / elapsed[name], steps[name])
        for name in calls
    }


def slowest(times: list[float], comm: Any) -> NDArray[np.float64]:
    """Elementwise maximum over all ranks. Collective."""
    return np.max(np.array(comm.allgather(times)), axis=0)  # type: ignore[no-any-return]


def rounds(begin: float, seconds: float, comm: Any) -> Iterator[int]:
    """The numbers of rounds, from 1, until the time is used up: rank 0 decides for all ranks."""
    for number in itertools.count(1):
        yield number
        if comm.bcast(number >= MIN_ROUNDS and time.perf_counter() - begin > seconds):
            return


def sample(call: Call, batch: int, comm: Any, synchronize: Call) -> float:
    """Seconds per call of a batch that all ranks start together. Collective."""
    synchronize()
    comm.Barrier()
    start = time.perf_counter()
    for _ in range(batch):
        call()
    synchronize()
    return (time.perf_counter() - start) / batch


def _turn_of_steps(call: Call, batch: int, samples: int, comm: Any) -> tuple[list[float], float]:
    """Seconds per call, for each sample of each worker; and the slowest worker's time of the whole turn."""
    call()
    comm.Barrier()
    ends = [time.perf_counter()]
    for _ in range(samples):
        for _ in range(batch):
            call()
        ends.append(time.perf_counter())
    workers = comm.allgather((np.diff(ends) / batch, ends[-1] - ends[0]))
    return [float(s) for each, _ in workers for s in each], max(seconds for _, seconds in workers)


def _estimate_call_s(timed: Callable[[int], float]) -> float:
    """Approximate seconds per call, the same on all ranks. timed: times a batch of that many calls."""
    batch = 1
    while (call_s := timed(batch)) * batch <= _WARM_S:
        batch *= 4
    return call_s
