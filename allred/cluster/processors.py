"""The cores that the ranks of a node may use, the BLAS threads that run on them, and the limits of cgroups.

By default, BLAS starts a thread for every core in each rank. More busy threads than cores is the most
frequent reason for slow training on CPU hosts.
"""

import dataclasses
import os
import pathlib
import time
from collections.abc import Mapping, Sequence

import numpy  # noqa: F401  (loads the BLAS whose threads are counted)

from allred import world
from allred.wording import count

_BLAS = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "OMP_NUM_THREADS")


@dataclasses.dataclass(frozen=True)
class Cores:
    """The cores and BLAS threads of one rank."""

    allowed: frozenset[int]  # the CPU affinity of the process
    of_machine: int  # the number of cores of the machine
    quota: float | None  # of the process's cgroup, in cores
    blas_threads: int
    blas: str  # the BLAS libraries, or the source of the guess
    measured: bool  # whether threadpoolctl counted the threads; else they are a guess


def own_cores() -> Cores:
    """Return the cores of this process."""
    allowed = frozenset(os.sched_getaffinity(0))
    try:
        import threadpoolctl
    except ImportError:
        threads, blas, measured = *guess_blas_threads(os.environ, len(allowed)), False
    else:
        pools = [pool for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"]
        threads = max((pool["num_threads"] for pool in pools), default=1)
        blas = ", ".join(sorted({pool["internal_api"] for pool in pools})) or "no BLAS that starts threads"
        measured = True
    return Cores(allowed, os.cpu_count() or 1, limits().cpus, threads, blas, measured)


def guess_blas_threads(environ: Mapping[str, str], cores: int) -> tuple[int, str]:
    """Return the number of BLAS threads that the environment variables imply, and their text.

    >>> guess_blas_threads({"OMP_NUM_THREADS": "2,1"}, cores=8), guess_blas_threads({}, cores=8)
    ((2, 'OMP_NUM_THREADS=2,1'), (8, 'no OMP_NUM_THREADS: a thread a core'))
    """
    for name in _BLAS:
        value = environ.get(name, "")
        if value.split(",")[0].strip().isdigit():
            return int(value.split(",")[0]), f"{name}={value}"
    return cores, "no OMP_NUM_THREADS: a thread a core"


def usable_cores(ranks: Sequence[Cores]) -> int:
    """Return the number of cores that the ranks of one node have together."""
    cores = len(frozenset[int]().union(*(rank.allowed for rank in ranks)))
    quotas = [int(rank.quota) or 1 for rank in ranks if rank.quota is not None]
    return min([cores, *quotas])


def _on_node(ranks: Sequence[Cores], nodes: Sequence[int], node: int) -> list[Cores]:
    return [one for one, its in zip(ranks, nodes, strict=True) if its == node]


def oversubscription(ranks: Sequence[Cores], nodes: Sequence[int]) -> str | None:
    """Return a warning if the ranks of a node have more BLAS threads than cores, else None. With several nodes: for the
    node with the most threads per core.

    ranks: the cores of all ranks of the job. nodes: the node of each rank.

    >>> print(oversubscription([Cores(frozenset({0, 1}), 2, None, 2, "openblas", True)] * 2, nodes=[0, 0]))
    2 ranks with 4 BLAS threads on 2 cores: steps may take many times as long; export OMP_NUM_THREADS=1 before the start
    """
    worst, text = 1.0, None
    for node in dict.fromkeys(nodes):
        there = _on_node(ranks, nodes, node)
        threads, cores = sum(max(1, rank.blas_threads) for rank in there), usable_cores(there)
        if threads > worst * cores:
            worst, remedies = threads / cores, []
            if threads > len(there):
                remedies.append(f"export OMP_NUM_THREADS={max(1, cores // len(there))} before the start")
            if len(there) > cores:
                remedies.append(f"start at most {count(cores, 'rank')} here")
            where = " of one node" if len(set(nodes)) > 1 else ""
            text = (
                f"{count(len(there), 'rank')} with {count(threads, 'BLAS thread')} on {count(cores, 'core')}{where}"
                f": steps may take many times as long; {' and '.join(remedies)}"
            )
    return text


def share(ranks: Sequence[Cores], nodes: Sequence[int], rank: int) -> int:
    """Return the share of a rank of the cores of its node, at least 1. ranks, nodes: as in `oversubscription`.

    >>> share([Cores(frozenset({0, 1, 2, 3}), 4, None, 4, "openblas", True)] * 2, nodes=[0, 0], rank=1)
    2
    """
    there = _on_node(ranks, nodes, nodes[rank])
    return max(1, min(usable_cores(there) // len(there), len(ranks[rank].allowed)))


def each_has_a_core(ranks: Sequence[Cores], nodes: Sequence[int], rank: int) -> bool:
    """Return whether the node of a rank has at least one core for each of its ranks. ranks, nodes: as in
    `oversubscription`.

    >>> two = Cores(frozenset({0, 1}), 2, None, 1, "openblas", True)
    >>> each_has_a_core([two] * 2, [0, 0], rank=1), each_has_a_core([two] * 3, [0, 0, 0], rank=1)
    (True, False)
    """
    there = _on_node(ranks, nodes, nodes[rank])
    return usable_cores(there) >= len(there)


def runnable_s() -> float:
    """Return for how long the calling thread has run or waited for a core, in seconds; without the waits if Linux does
    not tell."""
    try:
        with open("/proc/thread-self/schedstat") as file:
            ran_ns, waited_ns, _ = file.read().split()
    except (OSError, ValueError):
        return time.thread_time()
    return (int(ran_ns) + int(waited_ns)) / 1e9


def cores_per_rank() -> int:
    """Return this rank's share of the cores of its node, at least 1. Before init(): all cores of this process."""
    here = world.current_or_none()
    return usable_cores([own_cores()]) if here is None else here.cores


UNLIMITED = 2**60  # cgroups of version 1 have a number of about 2**63


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits of a process's cgroups; None: unlimited. cpus: in cores."""

    memory_bytes: int | None
    cpus: float | None


def limits(root: pathlib.Path = pathlib.Path("/sys/fs/cgroup"), own: str | None = None) -> Limits:
    """Return the memory and CPU limits of cgroups, version 1 and 2, for a process; the smallest limit of all levels.

    own: the text of its /proc/PID/cgroup; default: this process. In a container this text often has the path of the
    host. If the path does not exist under `root`, the mount is the container's own group.
    """
    text = read_file(pathlib.Path("/proc/self/cgroup")) if own is None else own
    memory: list[int] = []
    cpus: list[float] = []
    for entry in text.splitlines():
        _, controllers, path = entry.split(":", 2)
        mounts = [root / name for name in {controllers, *controllers.split(",")}] if controllers else [root]
        for mount in mounts:
            for group in _upwards(mount, path):
                memory += _memory(group)
                cpus += _cpus(group)
    return Limits(min(memory, default=None), min(cpus, default=None))


def _upwards(mount: pathlib.Path, path: str) -> list[pathlib.Path]:
    """Return the group of the process and its visible parents."""
    group = mount / path.lstrip("/")
    inside = [group, *group.parents]
    return [one for one in inside if one.is_relative_to(mount) and one.is_dir()]


def _memory(group: pathlib.Path) -> list[int]:
    values = (read_file(group / name) for name in ("memory.max", "memory.limit_in_bytes"))
    return [int(value) for value in values if value.isdigit() and int(value) < UNLIMITED]


def _cpus(group: pathlib.Path) -> list[float]:
    words = read_file(group / "cpu.max").split()
    words = words or [read_file(group / "cpu.cfs_quota_us"), read_file(group / "cpu.cfs_period_us")]
    if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]):
        return [int(words[0]) / int(words[1])]
    return []


def read_file(path: pathlib.Path) -> str:
    """Return the text of a small file without surrounding whitespace; "" if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
