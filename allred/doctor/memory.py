"""Memory: /dev/shm, which MPI uses for its queues, and the files of killed jobs in it; the limit of locked memory,
which RDMA needs; the limit of the cgroup.

allred's own shared memory is a memfd, which is not in /dev/shm; which way ranks share it is tried in trials.py.
"""

import dataclasses
import os
import pathlib
import resource

from allred.bench.table import size_name
from allred.cluster import limits
from allred.doctor.line import FAIL, NOTE, OK, WARN, Line
from allred.doctor.ranks import Seen, by_host, compared, who
from allred.watch import shm_files

# What a rank takes of /dev/shm: Open MPI 5 asks for files of 16 MiB, MPICH 5 fills about 5 MiB. Measured.
SHM_RANK_BYTES = 16 * 2**20
_INFINIBAND = pathlib.Path("/sys/class/infiniband")
_SHM = "/dev/shm"


@dataclasses.dataclass(frozen=True)
class Memory:
    """Sizes in bytes; None: without limit, or for /dev/shm: not there or not writable."""

    shm_bytes: int | None
    shm_free: int
    locked_bytes: int | None
    rdma: bool
    machine_bytes: int
    cgroup_bytes: int | None
    unused_files: int = 0  # MPICH's files of this user in /dev/shm that no process uses
    unused_bytes: int = 0


def look() -> Memory:
    """Look at this process and its host."""
    shm_bytes, shm_free = None, 0
    if os.access(_SHM, os.W_OK):
        status = os.statvfs(_SHM)
        shm_bytes, shm_free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    unused = shm_files.unused()
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Memory(
        shm_bytes=shm_bytes,
        shm_free=shm_free,
        locked_bytes=None if locked == resource.RLIM_INFINITY else locked,
        rdma=_INFINIBAND.is_dir() and any(_INFINIBAND.iterdir()),
        machine_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        cgroup_bytes=limits.look().memory_bytes,
        unused_files=len(unused),
        unused_bytes=sum(unused.values()),
    )


def about(nbytes: int) -> str:
    """A size as people say it.

    >>> about(67108864), about(25 * 2**30 + 5), about(9 * 2**20 // 2)
    ('64 MiB', '25 GiB', '4.5 MiB')
    """
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if nbytes >= 1024**power:
            return f"{nbytes / 1024**power:.3g} {unit}"
    return size_name(nbytes)


def judge(ranks: list[Seen[Memory]]) -> list[Line]:
    """/dev/shm on every host, locked memory, the cgroup's limit."""
    shm = [_shm(host, there) for host, there in by_host(ranks).items()]
    if len(shm) > 1:  # one line for all that is good
        bad = [line for line in shm if line.verdict != OK]
        shm = bad or [Line(OK, "/dev/shm", f"room enough on each of the {len(shm)} hosts")]
    return [*shm, _locked(ranks), _cgroup(ranks)]


def _shm(host: str, ranks: list[Seen[Memory]]) -> Line:
    facts, needed = ranks[0].facts, len(ranks) * SHM_RANK_BYTES
    if facts.shm_bytes is None:
        found = f"not there, or not writable, on {host}; MPI's ranks of a host meet in it"
        return Line(FAIL, "/dev/shm", found, "mount -t tmpfs -o mode=1777,size=1g tmpfs /dev/shm")
    found, remedies = f"{about(facts.shm_free)} free of {about(facts.shm_bytes)} on {host}", []
    if facts.unused_files:
        plural = "s" * (facts.unused_files > 1)
        found += f"; {about(facts.unused_bytes)} in {facts.unused_files} file{plural} of killed MPICH jobs"
        remedies.append("python -m allred.watch.shm_files")
    if facts.shm_free < needed:
        found += f"; MPI may ask for {about(needed)} for {len(ranks)} rank{'s' * (len(ranks) > 1)}"
        remedies.append("docker run --shm-size=1g ..., or mount -o remount,size=1g /dev/shm")
    verdict = WARN if facts.shm_free < needed else NOTE if facts.unused_files else OK
    return Line(verdict, "/dev/shm", found, "; or ".join(remedies))


def _locked(ranks: list[Seen[Memory]]) -> Line:
    found = compared(ranks, lambda facts: "unlimited" if facts.locked_bytes is None else about(facts.locked_bytes))
    short = [rank for rank in ranks if rank.facts.rdma and rank.facts.locked_bytes is not None]
    if short:
        remedy = "ulimit -l unlimited; for all: '* - memlock unlimited' in /etc/security/limits.d, docker run "
        remedy += "--ulimit memlock=-1, Slurm's slurmd with LimitMEMLOCK=infinity"
        return Line(WARN, "locked memory", f"{found}; InfiniBand on {who(short)} needs more", remedy)
    rdma = any(rank.facts.rdma for rank in ranks)
    return Line(OK, "locked memory", found if rdma else f"{found}; no InfiniBand here that would need more")


def _cgroup(ranks: list[Seen[Memory]]) -> Line:
    def text(facts: Memory) -> str:
        if facts.cgroup_bytes is None or facts.cgroup_bytes >= facts.machine_bytes:
            return f"{about(facts.machine_bytes)}, no smaller limit of a cgroup"
        return f"{about(facts.cgroup_bytes)} of the machine's {about(facts.machine_bytes)} by the cgroup's limit"

    small = any((rank.facts.cgroup_bytes or 2**62) < rank.facts.machine_bytes for rank in ranks)
    remedy = "above it ranks are killed without a word (exit code 137); docker run --memory=..., sbatch --mem=..."
    return Line(NOTE if small else OK, "memory", compared(ranks, text), remedy if small else "")
