"""Trials of all ranks together: shared memory, allred.init(), an allreduce of three sizes, the network between hosts,
MPI's own sums.

Network: one rank of each host takes part. In a round every host is in at most one pair, and all pairs of a round are
measured at the same time, so `hosts - 1` rounds (one more for an odd number) cover all pairs.

A trial runs under the watchdog. Afterwards rank 0 gathers the results of all ranks.
"""

import dataclasses
import socket
import time
from typing import Any

import numpy as np

import allred
from allred import world
from allred.bench import measure, output, verify
from allred.comm import functions
from allred.comm.backends import segment
from allred.doctor.findings import FAIL, NOTE, OK, WARN, Finding, RankFacts, Topic, compare, error_line, rank_names
from allred.errors import AllredError

SIZES = (4, 64 * 2**10, 4 * 2**20)  # bytes
MPI_SUMS = "MPI's sums"
NO_CMA = "MPICH with ranks in separate containers: export MPIR_CVAR_CH4_CMA_ENABLE=0"  # docs/limits.md
BETWEEN_HOSTS = "network between hosts"
_LEAST_BYTES, _MOST_BYTES = 2**16, 2**22  # of an array that measures the bandwidth
_ROUND_S = 0.3  # for the bandwidth of the pairs of a round
_ALL_S = 10.0  # for all rounds
_CALLS = 50  # for the latency
_SLOW_FACTOR = 2  # a pair is slow if the best bandwidth is more than this many times its own
_EXTRA_US = 500.0  # or if its latency exceeds the best by this
_TIME_S = 0.3  # for each size
_BATCHES = 5
_SLOW_US = 500.0  # for a small allreduce on one host; 1 to 10 us if each rank has a core


@dataclasses.dataclass(frozen=True)
class SharingResult:
    """way: how the ranks of this host share memory, "" if they cannot. ranks: number of ranks on this host."""

    way: str
    ranks: int


@dataclasses.dataclass(frozen=True)
class InitResult:
    """The result of allred.init(): the backend and why it was chosen, or `error`."""

    backend: str = ""
    reason: str = ""
    nodes: int = 0
    error: str = ""


@dataclasses.dataclass(frozen=True)
class AllreduceResult:
    """An allreduce of `nbytes`. us: time of a call on the slowest rank. wrong: the error in the sums, or ""."""

    nbytes: int
    us: float
    wrong: str


def share(comm: Any) -> SharingResult:
    """Share memory with the ranks of the host. Collective over the mpi4py communicator; no time limit of its own."""
    from mpi4py import MPI

    from allred.comm.backends.mpi_bootstrap import MpiBootstrap

    node = MpiBootstrap(comm.Split_type(MPI.COMM_TYPE_SHARED))
    try:
        return SharingResult(segment.way(node) if node.size > 1 else "", node.size)
    finally:
        node.close()


def mpi_sums(comm: Any) -> str:
    """The error in the sums of MPI_Allreduce, or "". Collective. Ranks that share no memory depend on these sums."""
    from mpi4py import MPI

    for nbytes in SIZES:
        array = np.empty(nbytes // 4, np.float32)
        verify.fill([array], comm.Get_rank())
        comm.Allreduce(MPI.IN_PLACE, array, MPI.SUM)
        if wrong := verify.wrong([array], comm.Get_size()):
            return f"{output.size_name(nbytes)}: {wrong}"
    return ""


def init(limit_s: float) -> InitResult:
    """Call allred.init(). Collective; an error is the same on all ranks."""
    try:
        allred.init(banner=False, timeout_s=limit_s)
    except AllredError as error:
        return InitResult(error=error_line(error))
    return InitResult(functions.current().name, world.current().reason, world.current().topology.nodes)


def time_allreduce(nbytes: int) -> AllreduceResult:
    """Check the sums of one size, then time it. Collective; raises CollectiveTimeout."""
    array = np.empty(nbytes // 4, np.float32)
    verify.fill([array], allred.rank())
    allred.allreduce_(array, allred.Sum)
    wrong = verify.wrong([array], allred.size())
    array.fill(0)
    call_s = float(allred.allreduce(_batch_s(array, 3), allred.Max))
    calls = min(max(int(_TIME_S / _BATCHES / call_s), 1), 1000)
    times = [_batch_s(array, calls) for _ in range(_BATCHES)]
    return AllreduceResult(nbytes, float(allred.allreduce(float(np.median(times)), allred.Max)) * 1e6, wrong)


def _batch_s(array: Any, calls: int) -> float:
    allred.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        allred.allreduce_(array, allred.Sum)
    return (time.perf_counter() - start) / calls


def topics(comm: Any, limit_s: float) -> list[list[Topic[Any]]]:
    """The trials, in groups that are reported together. MPI's sums come last: with MPICH an error ends the process."""
    remedy = "read the findings above; if the machine is slow, add --limit-s 120"

    def time_all() -> list[AllreduceResult] | None:
        return [time_allreduce(nbytes) for nbytes in SIZES] if allred.is_initialized() else None

    alone: list[Topic[Any]] = [
        Topic("allred.init()", lambda: init(limit_s), diagnose_init, remedy),
        Topic("allreduce", time_all, diagnose_allreduce, remedy),
    ]
    if comm is None or comm.Get_size() == 1:
        return [alone]
    sharing: Topic[Any] = Topic("shared memory", lambda: share(comm), diagnose_sharing, remedy)

    def time_hosts() -> list[Pair]:
        return time_pairs(leaders(comm, socket.gethostname()))

    between: Topic[Any] = Topic(BETWEEN_HOSTS, time_hosts, diagnose_pairs, remedy)
    return [[sharing, *alone], [between], [Topic(MPI_SUMS, lambda: mpi_sums(comm), diagnose_mpi, NO_CMA)]]


def diagnose_sharing(ranks: list[RankFacts[SharingResult]]) -> list[Finding]:
    if all(rank.facts.ranks == 1 for rank in ranks):
        return [Finding(NOTE, "shared memory", "not tried: no host has two ranks")]
    without = [rank for rank in ranks if rank.facts.ranks > 1 and not rank.facts.way]
    if without:
        found = f"{rank_names(without)} cannot share memory with other ranks of the host"
        remedy = "docker run --pid=host --cap-add=SYS_PTRACE ..., or run all ranks in one container and as one user"
        return [Finding(WARN, "shared memory", found, remedy)]
    return [Finding(OK, "shared memory", compare(ranks, lambda facts: facts.way or "alone on its host"))]


def diagnose_mpi(ranks: list[RankFacts[str]]) -> list[Finding]:
    wrong = [rank for rank in ranks if rank.facts]
    if wrong:
        found = f"wrong on {rank_names(wrong)}; {wrong[0].facts}"
        return [Finding(FAIL, MPI_SUMS, found, f"{NO_CMA}; otherwise use another MPI or another release of it")]
    return [Finding(OK, MPI_SUMS, "correct")]


def diagnose_init(ranks: list[RankFacts[InitResult]]) -> list[Finding]:
    facts = ranks[0].facts
    if facts.error:
        remedy = "read the findings above; python -m allred info --config lists the settings"
        return [Finding(FAIL, "allred.init()", facts.error, remedy)]
    found = compare(ranks, lambda facts: f"{facts.backend} ({facts.reason})")
    if facts.backend == "mpi" and facts.reason != "as requested" and facts.nodes < len(ranks):
        remedy = "see the warning above about the C extension or shared memory"
        return [Finding(WARN, "backend", found, remedy)]
    return [Finding(OK, "backend", found)]


def diagnose_allreduce(ranks: list[RankFacts[list[AllreduceResult]]]) -> list[Finding]:
    for rank in ranks:
        for result in rank.facts:
            if result.wrong:
                found = f"{output.size_name(result.nbytes)}: wrong on {rank_names([rank])}, {result.wrong}"
                remedy = f"{NO_CMA}; otherwise compare ALLRED_BACKEND=mpi with ALLRED_BACKEND=shm"
                return [Finding(FAIL, "allreduce", found, remedy)]
    if len(ranks) == 1:
        return [Finding(OK, "allreduce", "one rank: nothing to send; sums are correct")]
    found = "; ".join(_describe(result) for result in ranks[0].facts) + "; sums are correct"
    if len({rank.host for rank in ranks}) == 1 and ranks[0].facts[0].us > _SLOW_US:
        remedy = "give each rank a core (see binding, cores and BLAS threads above); look with top for other programs"
        return [Finding(WARN, "allreduce", f"{found}; ranks wait for cores", remedy)]
    return [Finding(OK, "allreduce", found)]


def _describe(result: AllreduceResult) -> str:
    """Time and bandwidth (algbw of nccl-tests, 1 GB = 10**9 bytes).

    >>> _describe(AllreduceResult(65536, 32.0, ""))
    '64 KiB 32 us, 2.048 GB/s'
    """
    algbw = f", {output.number(measure.algbw(result.nbytes, result.us))} GB/s" if result.nbytes > 4 else ""
    return f"{output.size_name(result.nbytes)} {output.number(result.us)} us{algbw}"


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


def time_pairs(leaders: list[tuple[int, str]]) -> list[Pair]:
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
                us, gb_s = _time_pair([ranks[first], ranks[second]], min(_ROUND_S, _ALL_S / len(schedule)))
                if allred.rank() == ranks[first]:
                    found.append(Pair((leaders[first][1], leaders[second][1]), us, gb_s))
        allred.barrier()
    return found


def _time_pair(ranks: list[int], time_s: float) -> tuple[float, float]:
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


def diagnose_pairs(ranks: list[RankFacts[list[Pair]]]) -> list[Finding]:
    pairs = [pair for rank in ranks for pair in rank.facts]
    if not pairs:
        return [Finding(NOTE, BETWEEN_HOSTS, "not tried: all ranks are on one host")]
    if len(pairs) == 1:
        return [Finding(OK, BETWEEN_HOSTS, _describe_pair(pairs[0]))]
    us, gb_s = min(pair.us for pair in pairs), max(pair.gb_s for pair in pairs)
    slow = [pair for pair in pairs if pair.gb_s * _SLOW_FACTOR < gb_s or pair.us > us + _EXTRA_US]
    best = f"the best of {len(pairs)} pairs: {output.number(us)} us, {output.number(gb_s)} GB/s"
    if not slow:
        slowest = min(pairs, key=lambda pair: pair.gb_s)
        return [Finding(OK, BETWEEN_HOSTS, f"{best}; the slowest: {_describe_pair(slowest)}")]
    worst = sorted(slow, key=lambda pair: pair.gb_s)[:5]
    found = f"slow: {'; '.join(map(_describe_pair, worst))}" + f"; and {len(slow) - 5} more" * (len(slow) > 5)
    remedy = "check cable, switch port and speed (ethtool eth0) of the host in all slow pairs, or leave that host out"
    return [Finding(WARN, BETWEEN_HOSTS, f"{found}; {best}", remedy)]


def _describe_pair(pair: Pair) -> str:
    """Return a pair as text.

    >>> _describe_pair(Pair(("node1", "node2"), 45.0, 0.117))
    'node1 - node2 45 us, 0.117 GB/s'
    """
    return f"{pair.hosts[0]} - {pair.hosts[1]} {output.number(pair.us)} us, {output.number(pair.gb_s)} GB/s"


def leaders(comm: Any, host: str) -> list[tuple[int, str]]:
    """Return the lowest rank of each host, and the host's name. Collective over the mpi4py communicator."""
    names: list[str] = comm.allgather(host)
    return [(names.index(name), name) for name in dict.fromkeys(names)]
