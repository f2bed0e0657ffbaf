"""How the time of a call is taken, so that two ways of doing the same thing can be compared.

A sample is the mean of a batch of calls, so many that perf_counter does not count (one where a call takes long), after
a barrier that is not timed; of all ranks' values for it the largest is the sample's. The ways take turns of a few
milliseconds: A, B, A, B, ..., each turn opened by an untimed call, with the same batch and the same number of samples
on both sides, until the time is used up. p50 and p99 are over all samples of a way; speedup is the ratio of the p50.
Calls that leave something running (on a GPU) have a `settle`, which waits for it, before each sample and as its end.

    algbw = bytes / p50          busbw = algbw * 2 (n - 1) / n        (nccl-tests' definitions; GB = 10**9 bytes)
"""

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Call = Callable[[], object]


def nothing() -> None:
    """What there is to settle on the host."""


BATCH_S = 200e-6  # length of a sample of short calls
MAX_BATCH = 1000
TURN_S = 20e-3
MAX_TURN = 100
MIN_ROUNDS = 5


@dataclasses.dataclass(frozen=True)
class Samples:
    """What was measured of one way: seconds a call, one number a sample, each the mean of `batch` calls."""

    seconds: NDArray[np.float64]
    batch: int

    def us(self, percent: float) -> float:
        """A percentile over the samples, in microseconds."""
        return float(np.percentile(self.seconds, percent)) * 1e6


def algbw(nbytes: int, us: float) -> float:
    """GB/s, from bytes and microseconds.

    >>> algbw(64_000_000, us=8000)
    8.0
    """
    return nbytes / us / 1e3


def busbw(algbw_gbps: float, size: int) -> float:
    """What each link carries in a ring over `size` ranks.

    >>> busbw(8.0, size=2), busbw(8.0, size=4)
    (8.0, 12.0)
    """
    return algbw_gbps * 2 * (size - 1) / size


def plan(call_s: list[float]) -> tuple[int, int]:
    """Calls of a sample and samples of a turn, the same for every way, from the time a call takes on each.

    >>> plan([1e-6, 2e-6]), plan([80e-3, 20e-3])
    ((200, 50), (1, 2))
    """
    batch = min(max(round(BATCH_S / min(call_s)), 1), MAX_BATCH)
    return batch, min(max(round(TURN_S / (batch * max(call_s))), 2), MAX_TURN)


def measure(ways: Mapping[str, Call], comm: Any, seconds: float, settle: Call = nothing) -> dict[str, Samples]:
    """Time all ways against each other, for about `seconds`. Collective over the mpi4py communicator `comm`."""
    begin = time.perf_counter()
    batch, turn = plan([_call_s(call, comm, settle) for call in ways.values()])
    found: dict[str, list[float]] = {name: [] for name in ways}
    rounds, last = 0, False
    while not last:
        for name, call in ways.items():
            call()
            found[name] += [_sample(call, batch, comm, settle) for _ in range(turn)]
        rounds += 1
        last = comm.bcast(rounds >= MIN_ROUNDS and time.perf_counter() - begin > seconds)
    return {name: Samples(slowest(times, comm), batch) for name, times in found.items()}


def slowest(times: list[float], comm: Any) -> NDArray[np.float64]:
    """Of each number the largest over all ranks."""
    return np.max(np.array(comm.allgather(times)), axis=0)  # type: ignore[no-any-return]


def _sample(call: Call, batch: int, comm: Any, settle: Call) -> float:
    settle()
    comm.Barrier()
    start = time.perf_counter()
    for _ in range(batch):
        call()
    settle()
    return (time.perf_counter() - start) / batch


def _call_s(call: Call, comm: Any, settle: Call) -> float:
    """Roughly what a call takes, once it is warm; the same number on every rank."""
    call()
    batch = 1
    while True:
        call_s = float(slowest([_sample(call, batch, comm, settle)], comm)[0])
        if call_s * batch > 1e-3:
            return call_s
        batch *= 4
