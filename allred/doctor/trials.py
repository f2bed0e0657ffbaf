"""What can only be tried, by all ranks together: sharing memory, allred.init(), and an allreduce of three sizes.

Every trial is made under a guard. What a rank found goes to rank 0 once, after all of them.
"""

import dataclasses
import time
from typing import Any

import numpy as np

import allred
from allred.bench import measure, table, verify
from allred.cluster import topology
from allred.comm import functions
from allred.comm.backends import segment
from allred.doctor.line import FAIL, NOTE, OK, WARN, Line, words
from allred.doctor.ranks import Rank, Seen, Unseen, compared, who
from allred.errors import AllredError

SIZES = (4, 64 * 2**10, 4 * 2**20)  # bytes
_SIZE_S = 0.3  # for each of them
_BATCHES = 5
MPI_SUMS = "MPI's sums"
NO_CMA = "MPICH, ranks in containers of their own: export MPIR_CVAR_CH4_CMA_ENABLE=0"  # README, honest limits
_SLOW_US = 500.0  # a small allreduce within one host: 1 to 10 us where each rank has a core


@dataclasses.dataclass(frozen=True)
class Sharing:
    """The way in which the ranks of this host share memory, in words; "" for none. ranks: of this host."""

    way: str
    ranks: int


@dataclasses.dataclass(frozen=True)
class Init:
    """What allred.init() came to, or its error in words."""

    backend: str = ""
    reason: str = ""
    nodes: int = 0
    error: str = ""


@dataclasses.dataclass(frozen=True)
class Timed:
    """An allreduce of so many bytes; us: a call on the slowest rank. wrong: what is wrong with the sums, or ""."""

    nbytes: int
    us: float
    wrong: str


def share(comm: Any) -> Sharing:
    """Find the way. Collective over the mpi4py communicator `comm`, and without a time limit of its own."""
    from mpi4py import MPI

    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    try:
        return Sharing(segment.way(node) if node.Get_size() > 1 else "", node.Get_size())
    finally:
        node.Free()


def mpi_sums(comm: Any) -> str:
    """What is wrong with MPI's own sums, in words, or "": allred uses them wherever ranks share no memory."""
    from mpi4py import MPI

    for nbytes in SIZES:
        array = np.empty(nbytes // 4, np.float32)
        verify.fill([array], comm.Get_rank())
        comm.Allreduce(MPI.IN_PLACE, array, MPI.SUM)
        if wrong := verify.wrong([array], comm.Get_size()):
            return f"{table.size_name(nbytes)}: {wrong}"
    return ""


def init(limit_s: float) -> Init:
    """allred.init(); its errors are the same on all ranks. Collective."""
    try:
        allred.init(banner=False, timeout_s=limit_s)
    except AllredError as error:
        return Init(error=words(error))
    return Init(functions.current().name, functions.reason(), topology.current().nodes)


def time_allreduce(nbytes: int) -> Timed:
    """Time one size, after its sums have been checked. Collective; raises CollectiveTimeout."""
    array = np.empty(nbytes // 4, np.float32)
    verify.fill([array], allred.rank())
    allred.allreduce_(array, allred.Sum)
    wrong = verify.wrong([array], allred.size())
    array.fill(0)
    call_s = float(allred.allreduce(_batch_s(array, 3), allred.Max))
    calls = min(max(int(_SIZE_S / _BATCHES / call_s), 1), 1000)
    times = [_batch_s(array, calls) for _ in range(_BATCHES)]
    return Timed(nbytes, float(allred.allreduce(float(np.median(times)), allred.Max)) * 1e6, wrong)


def _batch_s(array: Any, calls: int) -> float:
    allred.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        allred.allreduce_(array, allred.Sum)
    return (time.perf_counter() - start) / calls


def judge(ranks: list[Rank]) -> list[Line]:
    """The lines about the trials that were made: topics `sharing`, `init`, `allreduce` and `mpi` of every rank."""
    lines: list[Line] = []
    for name, title, judge_one in (
        ("sharing", "shared memory", judge_sharing),
        ("init", "allred.init()", judge_init),
        ("allreduce", "allreduce", judge_times),
        ("mpi", MPI_SUMS, judge_mpi),
    ):
        seen: list[Seen[Any]] = [Seen(rank.rank, rank.host, rank.topics[name]) for rank in ranks if name in rank.topics]
        ended = [rank for rank in seen if isinstance(rank.facts, Unseen)]
        for error in dict.fromkeys(rank.facts.error for rank in ended):
            found = f"{error} ({who([rank for rank in ended if rank.facts.error == error])})"
            remedy = NO_CMA if name == "mpi" else "see the lines above; --limit-s 120 if the machine is only slow"
            lines.append(Line(FAIL, title, found, remedy))
        lines += judge_one(seen) if seen and not ended else []
    return lines


def judge_sharing(ranks: list[Seen[Sharing]]) -> list[Line]:
    """Whether ranks of a host share memory."""
    alone = all(rank.facts.ranks == 1 for rank in ranks)
    if alone:
        return [Line(NOTE, "shared memory", "not tried: no host has two ranks")]
    found = compared(ranks, lambda facts: facts.way or ("none" if facts.ranks > 1 else "alone on its host"))
    without = [rank for rank in ranks if rank.facts.ranks > 1 and not rank.facts.way]
    if without:
        remedy = "docker run --pid=host --cap-add=SYS_PTRACE ..., or all ranks in one container and as one user"
        return [Line(WARN, "shared memory", f"{who(without)} cannot share memory with others of the host", remedy)]
    return [Line(OK, "shared memory", found)]


def judge_mpi(ranks: list[Seen[str]]) -> list[Line]:
    """Whether MPI itself sums right."""
    wrong = [rank for rank in ranks if rank.facts]
    if wrong:
        found = f"wrong on {who(wrong)}; {wrong[0].facts}"
        return [Line(FAIL, MPI_SUMS, found, f"{NO_CMA}; else another MPI, or another release of it")]
    return [Line(OK, MPI_SUMS, "right")]


def judge_init(ranks: list[Seen[Init]]) -> list[Line]:
    """Whether allred.init() works, and the backend it takes."""
    facts = ranks[0].facts
    if facts.error:
        return [Line(FAIL, "allred.init()", facts.error, "see the lines above; python -m allred info --config")]
    found = compared(ranks, lambda facts: f"{facts.backend} ({facts.reason})")
    if facts.backend == "mpi" and facts.reason != "as requested" and facts.nodes < len(ranks):
        remedy = "the warning above, on the C extension or on shared memory, is the reason"
        return [Line(WARN, "backend", found, remedy)]
    return [Line(OK, "backend", found)]


def judge_times(ranks: list[Seen[list[Timed]]]) -> list[Line]:
    """Whether the sums are right, and how long they take."""
    for rank in ranks:
        for timed in rank.facts:
            if timed.wrong:
                found = f"{table.size_name(timed.nbytes)}: wrong on {who([rank])}, {timed.wrong}"
                return [Line(FAIL, "allreduce", found, f"{NO_CMA}; ALLRED_BACKEND=mpi or shm, to compare")]
    if len(ranks) == 1:
        return [Line(OK, "allreduce", "one rank: nothing to send; sums are right")]
    found = "; ".join(_timed(timed) for timed in ranks[0].facts) + "; sums are right"
    one_host = len({rank.host for rank in ranks}) == 1
    if one_host and ranks[0].facts[0].us > _SLOW_US:
        remedy = "a core for each rank: see binding, cores and BLAS threads above; look with top for who else is busy"
        return [Line(WARN, "allreduce", f"{found}; ranks wait for processors", remedy)]
    return [Line(OK, "allreduce", found)]


def _timed(timed: Timed) -> str:
    """In words; bandwidth as nccl-tests' algbw, GB = 10**9 bytes.

    >>> _timed(Timed(65536, 32.0, ""))
    '64 KiB 32 us, 2.048 GB/s'
    """
    algbw = f", {table.number(measure.algbw(timed.nbytes, timed.us))} GB/s" if timed.nbytes > 4 else ""
    return f"{table.size_name(timed.nbytes)} {table.number(timed.us)} us{algbw}"
