"""The doctor's trial of the network: latency and bandwidth between each pair of hosts.

One rank of each host takes part. In a round every host is in at most one pair, and all pairs of a round are measured at
the same time, so `hosts - 1` rounds (one more for an odd number) cover all pairs.
"""

import dataclasses
import time
from typing import Any

import numpy as np

import allred
from allred.bench import output
from allred.doctor.findings import NOTE, OK, WARN, Finding, RankFacts

TITLE = "network between hosts"
_LEAST_BYTES, _MOST_BYTES = 2**16, 2**22  # of an array that measures the bandwidth
_ROUND_S = 0.3  # for the bandwidth of the pairs of a round
_ALL_S = 10.0  # for all rounds
_CALLS = 50  # for the latency
_SLOW_FACTOR = 2  # a pair is slow if the best bandwidth is more than this many times its own
_EXTRA_US = 500.0  # or if its latency exceeds the best by this


@dataclasses.dataclass(frozen=True)
class Pair:
    """The result for two hosts, named in the order of their ranks.

    us: time of an allreduce of 4 bytes. gb_s: bandwidth of each direction.
    """

    hosts: tuple[str, str]
    us: float
    gb_s: float


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """Return rounds of pairs of the numbers 0 to count - 1, so that each pair is in one round.

    >>> rounds(3)
    [[(1, 2)], [(0, 2)], [(0, 1)]]
    """
    even = count + count % 2
    ring = list(range(even - 1))
    found = []
    for turn in range(even - 1):
        order = [*ring[turn:], *ring[:turn]]
        pairs = [(order[0], even - 1), *((order[i], order[-i]) for i in range(1, even // 2))]
        found.append(sorted((min(pair), max(pair)) for pair in pairs if max(pair) < count))
    return found


def measure(leaders: list[tuple[int, str]]) -> list[Pair]:
    """Measure all pairs; return those in which this rank is the first. Collective.

    leaders: a rank of each host, and the host's name.
    """
    ranks, found = [rank for rank, _ in leaders], []
    if len(leaders) < 2 or not allred.is_initialized():
        return []
    schedule = rounds(len(leaders))
    for pairs in schedule:
        for first, second in pairs:
            if allred.rank() in (ranks[first], ranks[second]):
                us, gb_s = _measure([ranks[first], ranks[second]], min(_ROUND_S, _ALL_S / len(schedule)))
                if allred.rank() == ranks[first]:
                    found.append(Pair((leaders[first][1], leaders[second][1]), us, gb_s))
        allred.barrier()
    return found


def _measure(ranks: list[int], time_s: float) -> tuple[float, float]:
    """Return latency and bandwidth between two ranks. An allreduce of two ranks is one exchange of the array."""
    pair = allred.ProcessSet(ranks)

    def call_s(nbytes: int, calls: int) -> float:
        array = np.zeros(nbytes // 4, np.float32)
        start = time.perf_counter()
        for _ in range(calls):
            allred.allreduce_(array, allred.Sum, process_set=pair)
        return float(allred.allreduce((time.perf_counter() - start) / calls, allred.Max, process_set=pair))

    call_s(4, 3)
    latency_s = call_s(4, _CALLS)
    nbytes = _LEAST_BYTES
    while (took_s := call_s(nbytes, 2)) < time_s / 8 and nbytes < _MOST_BYTES:
        nbytes *= 2
    took_s = call_s(nbytes, max(2, min(20, int(time_s / took_s))))
    return latency_s * 1e6, nbytes / took_s / 1e9


def diagnose(ranks: list[RankFacts[list[Pair]]]) -> list[Finding]:
    pairs = [pair for rank in ranks for pair in rank.facts]
    if not pairs:
        return [Finding(NOTE, TITLE, "not tried: all ranks are on one host")]
    if len(pairs) == 1:
        return [Finding(OK, TITLE, _describe(pairs[0]))]
    us, gb_s = min(pair.us for pair in pairs), max(pair.gb_s for pair in pairs)
    slow = [pair for pair in pairs if pair.gb_s * _SLOW_FACTOR < gb_s or pair.us > us + _EXTRA_US]
    best = f"the best of {len(pairs)} pairs: {output.number(us)} us, {output.number(gb_s)} GB/s"
    if not slow:
        slowest = min(pairs, key=lambda pair: pair.gb_s)
        return [Finding(OK, TITLE, f"{best}; the slowest: {_describe(slowest)}")]
    worst = sorted(slow, key=lambda pair: pair.gb_s)[:5]
    found = f"slow: {'; '.join(map(_describe, worst))}" + f"; and {len(slow) - 5} more" * (len(slow) > 5)
    remedy = "check cable, switch port and speed (ethtool eth0) of the host in all slow pairs, or leave that host out"
    return [Finding(WARN, TITLE, f"{found}; {best}", remedy)]


def _describe(pair: Pair) -> str:
    """Return a pair as text.

    >>> _describe(Pair(("node1", "node2"), 45.0, 0.117))
    'node1 - node2 45 us, 0.117 GB/s'
    """
    return f"{pair.hosts[0]} - {pair.hosts[1]} {output.number(pair.us)} us, {output.number(pair.gb_s)} GB/s"


def leaders(comm: Any, host: str) -> list[tuple[int, str]]:
    """Return the lowest rank of each host, and the host's name. Collective over the mpi4py communicator."""
    names: list[str] = comm.allgather(host)
    return [(names.index(name), name) for name in dict.fromkeys(names)]
