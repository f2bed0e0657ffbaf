"""Resources of a host: cores and BLAS threads, memory and /dev/shm."""

import dataclasses
import os

from allred.bench.output import size_name
from allred.cluster.processors import Cores, limits, usable_cores
from allred.doctor.findings import (
    FAIL,
    NOTE,
    OK,
    WARN,
    Finding,
    RankFacts,
    by_host,
    compare,
    rank_names,
    summarize_hosts,
)
from allred.watch import shm_files
from allred.wording import count, named, ranges

# A rank's part of /dev/shm: Open MPI 5 asks for files of 16 MiB, MPICH 5 fills about 5 MiB (measured).
SHM_RANK_BYTES = 16 * 2**20
_SHM = "/dev/shm"


def diagnose_processors(ranks: list[RankFacts[Cores]]) -> list[Finding]:
    """Binding, ranks per core, the cgroup's quota, BLAS threads."""
    hosts = by_host(ranks)
    cores = [finding for host, there in hosts.items() for finding in _diagnose_cores(host, there)]
    no_tool = []
    if not all(rank.facts.measured for rank in ranks):
        found = "read from environment variables, because threadpoolctl is not installed"
        no_tool = [Finding(NOTE, "BLAS threads", found, "pip install 'allred[doctor]'")]
    return [
        _diagnose_binding(ranks),
        *summarize_hosts(cores, len(hosts), "cores", "enough for the ranks on"),
        *no_tool,
        _diagnose_blas(ranks),
    ]


def _diagnose_binding(ranks: list[RankFacts[Cores]]) -> Finding:
    found = compare(ranks, lambda facts: f"cores {ranges(facts.allowed)} of {facts.of_machine}")
    for there in by_host(ranks).values():
        for i, one in enumerate(there):
            for other in there[i + 1 :]:
                a, b = one.facts.allowed, other.facts.allowed
                if a & b and (a != b or len(a) == 1):
                    both = f"{rank_names([one, other])} are bound to the same core {ranges(a & b)}"
                    remedy = "mpirun --bind-to core, or mpirun --bind-to none"
                    return Finding(WARN, "binding", f"{both}; {found}", remedy)
    return Finding(OK, "binding", found)


def _diagnose_cores(host: str, ranks: list[RankFacts[Cores]]) -> list[Finding]:
    cores = _usable(ranks)
    found = f"{count(len(ranks), 'rank')} on {count(cores, 'core')} of {host}"
    few = len(ranks) > cores
    remedy = f"mpirun -np {cores} on this host; ranks that share a core wait for each other" if few else ""
    findings = [Finding(WARN if few else OK, "cores", found, remedy)]
    quota, visible = ranks[0].facts.quota, len(ranks[0].facts.allowed)
    if quota is not None and quota < visible:
        found = f"the cgroup on {host} allows the time of {quota:g} cores, but {visible} cores are visible"
        remedy = f"docker run --cpuset-cpus=0-{cores - 1}, or request whole cores; export OMP_NUM_THREADS="
        findings.append(Finding(WARN, "cpu quota", found, f"{remedy}{_cores_per_rank(ranks)}"))
    return findings


def _usable(ranks: list[RankFacts[Cores]]) -> int:
    return usable_cores([rank.facts for rank in ranks])


def _cores_per_rank(ranks: list[RankFacts[Cores]]) -> int:
    return max(1, _usable(ranks) // len(ranks))


def _diagnose_blas(ranks: list[RankFacts[Cores]]) -> Finding:
    found = compare(ranks, lambda facts: f"{count(facts.blas_threads, 'thread')} ({facts.blas})")
    for host, there in by_host(ranks).items():
        threads = sum(rank.facts.blas_threads for rank in there)
        remedy = f"export OMP_NUM_THREADS={_cores_per_rank(there)} before mpirun"
        if threads > max(_usable(there), len(there)):  # with one thread each, the finding `cores` is enough
            total = f"in total {count(threads, 'thread')} on {count(_usable(there), 'core')} of {host}"
            return Finding(WARN, "BLAS threads", f"{found}; {total}", remedy)
        squeezed = [rank for rank in there if rank.facts.blas_threads > len(rank.facts.allowed)]
        if squeezed:
            only = f"{rank_names(squeezed[:1])} may use only {named('core', squeezed[0].facts.allowed)}"
            return Finding(WARN, "BLAS threads", f"{found}; {only}", f"{remedy}, or mpirun --bind-to none")
    if len(ranks) == 1 and ranks[0].facts.blas_threads > 1:
        remedy = f"before mpirun -np N: export OMP_NUM_THREADS=$(({_usable(ranks)} / N))"
        return Finding(NOTE, "BLAS threads", found, remedy)
    if len({rank.facts.blas_threads for rank in ranks}) > 1:
        remedy = "export the same OMP_NUM_THREADS on all ranks; other ranks wait for the slowest"
        return Finding(WARN, "BLAS threads", found, remedy)
    return Finding(OK, "BLAS threads", found)


@dataclasses.dataclass(frozen=True)
class MemoryFacts:
    """Memory of a rank's host in bytes.

    cgroup_bytes None: no limit; shm_bytes None: /dev/shm is missing or not writable.
    """

    shm_bytes: int | None
    shm_free: int
    machine_bytes: int
    cgroup_bytes: int | None
    unused_files: int = 0  # files of MPICH in /dev/shm that belong to this user and that no process uses
    unused_bytes: int = 0


def probe_memory() -> MemoryFacts:
    shm_bytes, shm_free = None, 0
    if os.access(_SHM, os.W_OK):
        status = os.statvfs(_SHM)
        shm_bytes, shm_free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    unused = shm_files.unused()
    return MemoryFacts(
        shm_bytes=shm_bytes,
        shm_free=shm_free,
        machine_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        cgroup_bytes=limits().memory_bytes,
        unused_files=len(unused),
        unused_bytes=sum(unused.values()),
    )


def rounded_size(nbytes: int) -> str:
    """Bytes with three significant digits.

    >>> rounded_size(67108864), rounded_size(25 * 2**30 + 5), rounded_size(9 * 2**20 // 2)
    ('64 MiB', '25 GiB', '4.5 MiB')
    """
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if nbytes >= 1024**power:
            return f"{nbytes / 1024**power:.3g} {unit}"
    return size_name(nbytes)


def diagnose_memory(ranks: list[RankFacts[MemoryFacts]]) -> list[Finding]:
    """/dev/shm of every host, the cgroup's limit."""
    hosts = by_host(ranks)
    shm = [_diagnose_shm(host, there) for host, there in hosts.items()]
    shm = summarize_hosts(shm, len(hosts), _SHM, "enough space on")
    return [*shm, _diagnose_cgroup(ranks)]


def _diagnose_shm(host: str, ranks: list[RankFacts[MemoryFacts]]) -> Finding:
    facts, needed = ranks[0].facts, len(ranks) * SHM_RANK_BYTES
    short = facts.shm_free < needed
    if facts.shm_bytes is None:
        found = f"missing or not writable on {host}; MPI needs it between the ranks of a host"
        return Finding(FAIL, _SHM, found, "mount -t tmpfs -o mode=1777,size=1g tmpfs /dev/shm")
    found, remedies = f"{rounded_size(facts.shm_free)} free of {rounded_size(facts.shm_bytes)} on {host}", []
    if facts.unused_files:
        files = count(facts.unused_files, "file")
        found += f"; {rounded_size(facts.unused_bytes)} in {files} of killed MPICH jobs"
        remedies.append("python -m allred.watch.shm_files")
    if short:
        found += f"; MPI may need {rounded_size(needed)} for {count(len(ranks), 'rank')}"
        remedies.append("docker run --shm-size=1g ..., or mount -o remount,size=1g /dev/shm")
    verdict = WARN if short else NOTE if facts.unused_files else OK
    return Finding(verdict, _SHM, found, "; or ".join(remedies))


def _diagnose_cgroup(ranks: list[RankFacts[MemoryFacts]]) -> Finding:
    def text(facts: MemoryFacts) -> str:
        if facts.cgroup_bytes is None or facts.cgroup_bytes >= facts.machine_bytes:
            return f"{rounded_size(facts.machine_bytes)}, no smaller limit of a cgroup"
        return f"the cgroup allows {rounded_size(facts.cgroup_bytes)} of {rounded_size(facts.machine_bytes)}"

    found = compare(ranks, text)
    if any((rank.facts.cgroup_bytes or 2**62) < rank.facts.machine_bytes for rank in ranks):
        remedy = "raise it with docker run --memory=... or sbatch --mem=...; above it ranks are killed without a "
        return Finding(NOTE, "memory", found, f"{remedy}message (exit code 137)")
    return Finding(OK, "memory", found)
