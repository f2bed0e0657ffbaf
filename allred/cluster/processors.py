"""The cores that the ranks of a node may use, the threads that run on them, and the limits of cgroups.

By default, BLAS and torch start a thread for every core in each rank. More busy threads than cores is the most
frequent reason for slow training on CPU hosts, so init() gives each rank its share (`thread_limits`).
"""

import collections
import dataclasses
import os
import pathlib
import time
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy  # noqa: F401  (loads the BLAS whose threads are counted)

from allred import launcher_variables, world
from allred.wording import count

# The variables by which users set the number of threads of BLAS and torch.
THREAD_VARIABLES = (
    "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "GOTO_NUM_THREADS",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Cores:
    """The cores of one rank, and the threads of BLAS and torch that run on them.

    allowed: the CPU affinity of the process. of_machine: the number of cores of the machine. quota: of the process's
    cgroup, in cores. threads: the largest number of threads of a library. libraries: their names. chosen: the part of
    `threads` that the program has set by a call, which init() keeps. set_by: the environment variables that the user
    has set, with which init() keeps all. launched: the number of ranks on this host, as the launcher knows it; 0 if it
    does not. given: the cores that the batch system gives to each rank, 0 if it does not.
    """

    allowed: frozenset[int]
    of_machine: int
    quota: float | None
    threads: int
    libraries: str
    chosen: int = 0
    set_by: tuple[str, ...] = ()
    launched: int = 0
    given: int = 0


def own_cores() -> Cores:
    """Return the cores of this process."""
    from allred.cluster import threads  # imports threadpoolctl

    pools = [pool for pool in threads.pools() if pool.kind != "openmp"]
    given = os.environ.get("SLURM_CPUS_PER_TASK", "")
    return Cores(
        frozenset(os.sched_getaffinity(0)),
        os.cpu_count() or 1,
        limits().cpus,
        max((pool.get() for pool in pools), default=1),
        ", ".join(sorted({pool.name for pool in pools})) or "no BLAS that starts threads",
        max((pool.get() for pool in pools if pool.is_chosen), default=0),
        tuple(name for name in THREAD_VARIABLES if os.environ.get(name)),
        launcher_variables.local_size(os.environ) or 0,
        int(given) if given.isdigit() else 0,
    )


def usable_cores(ranks: Sequence[Cores]) -> int:
    """Return the number of cores that the ranks of one node have together."""
    cores = len(frozenset[int]().union(*(rank.allowed for rank in ranks)))
    quotas = [int(rank.quota) or 1 for rank in ranks if rank.quota is not None]
    return min([cores, *quotas])


def _on_node(ranks: Sequence[Cores], nodes: Sequence[Hashable], node: Hashable) -> list[Cores]:
    return [one for one, its in zip(ranks, nodes, strict=True) if its == node]


def _by_node(ranks: Sequence[Cores], nodes: Sequence[Hashable]) -> dict[Hashable, list[Cores]]:
    found: dict[Hashable, list[Cores]] = {}
    for one, its in zip(ranks, nodes, strict=True):
        found.setdefault(its, []).append(one)
    return found


def share(ranks: Sequence[Cores], nodes: Sequence[Hashable], rank: int) -> int:
    """Return the share of a rank of the cores of its node, at least 1.

    ranks: the cores of all ranks of the job. nodes: the node of each rank. Ranks that the launcher has started on the
    node and that are not in `ranks` count too (`init(comm)` of a part of the ranks).

    >>> share([Cores(frozenset({0, 1, 2, 3}), 4, None, 4, "openblas")] * 2, nodes=[0, 0], rank=1)
    2
    """
    return _Node.of(_on_node(ranks, nodes, nodes[rank])).share(ranks[rank])


class _Node(NamedTuple):
    """The ranks of a node. cores: of all of them. started: the number of ranks there, also of those that are not in
    the job. bound: the cores that only one of the ranks may use, if no quota limits these."""

    cores: int
    started: int
    bound: frozenset[int]

    @classmethod
    def of(cls, there: Sequence[Cores]) -> "_Node":
        users: collections.Counter[int] = collections.Counter()
        for allowed, number in collections.Counter(rank.allowed for rank in there).items():
            users.update(dict.fromkeys(allowed, number))
        cores, started = usable_cores(there), max(len(there), *(rank.launched for rank in there))
        is_bound = len(there) > 1 and cores == len(users)
        return cls(cores, started, frozenset(core for core, ranks in users.items() if ranks == 1 and is_bound))

    def share(self, own: Cores) -> int:
        most = len(own.allowed) if own.allowed <= self.bound else self.cores // self.started
        return max(1, min(most, len(own.allowed), own.given or self.cores))


def thread_limits(ranks: Sequence[Cores], nodes: Sequence[Hashable]) -> list[int | None]:
    """Return the number of threads to which init() limits each rank; None: it changes nothing, because the rank is
    alone on its node, the user has set the number, or there are not more threads. ranks, nodes: as in `share`.

    >>> free = Cores(frozenset({0, 1, 2, 3}), 4, None, 4, "openblas")
    >>> thread_limits([free, free, free], nodes=[0, 0, 1])
    [2, 2, None]
    """
    of_node = {node: _Node.of(there) for node, there in _by_node(ranks, nodes).items()}
    found: list[int | None] = []
    for own, node in zip(ranks, nodes, strict=True):
        most, is_alone = of_node[node].share(own), of_node[node].started == 1
        is_enough = most >= max(own.threads, len(own.allowed))  # libraries that are loaded later start one a core
        found.append(None if is_alone or own.set_by or is_enough else most)
    return found


def limited(ranks: Sequence[Cores], nodes: Sequence[Hashable]) -> list[Cores]:
    """Return the cores of all ranks with the threads that run after init(). ranks, nodes: as in `share`."""
    return [
        own if limit is None else dataclasses.replace(own, threads=max(own.chosen, min(own.threads, limit)))
        for own, limit in zip(ranks, thread_limits(ranks, nodes), strict=True)
    ]


def oversubscription(ranks: Sequence[Cores], nodes: Sequence[Hashable]) -> str | None:
    """Return a warning if the ranks of a node have more threads than cores after init(), else None. With several nodes:
    for the node with the most threads per core. ranks, nodes: as in `share`.

    >>> print(oversubscription([Cores(frozenset({0, 1}), 2, None, 2, "openblas", set_by=("OMP_NUM_THREADS",))] * 2,
    ...                        nodes=[0, 0]))
    2 ranks with 4 BLAS threads on 2 cores: steps may take many times as long; unset OMP_NUM_THREADS
    """
    worst, text, of_nodes = 1.0, None, _by_node(limited(ranks, nodes), nodes)
    for there in of_nodes.values():
        threads, cores = sum(max(1, rank.threads) for rank in there), usable_cores(there)
        if threads > worst * cores:
            worst, remedies, most = threads / cores, [], max(1, cores // len(there))
            if names := sorted({name for rank in there for name in rank.set_by}):
                remedies.append(f"unset {' '.join(names)}")
            elif any(rank.chosen > most for rank in there):
                remedies.append(f"let the program set at most {count(most, 'thread')}, as with torch.set_num_threads")
            elif threads > len(there):
                remedies.append(f"export OMP_NUM_THREADS={most} before the start")
            if len(there) > cores:
                remedies.append(f"start at most {count(cores, 'rank')} here")
            where = " of one node" if len(of_nodes) > 1 else ""
            text = (
                f"{count(len(there), 'rank')} with {count(threads, 'BLAS thread')} on {count(cores, 'core')}{where}"
                f": steps may take many times as long; {' and '.join(remedies)}"
            )
    return text


def each_has_a_core(ranks: Sequence[Cores], nodes: Sequence[Hashable], rank: int) -> bool:
    """Return whether the node of a rank has at least one core for each of its ranks. ranks, nodes: as in
    `share`.

    >>> two = Cores(frozenset({0, 1}), 2, None, 1, "openblas")
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
