"""Resources of a host: cores and BLAS threads; memory and /dev/shm; GPUs with their driver, cupy and NCCL."""

import dataclasses
import importlib.util
import os
import pathlib
import re

from allred.bench.output import size_name
from allred.cluster.processors import Cores, limited, limits, usable_cores
from allred.doctor.findings import (
    FAIL,
    NOTE,
    OK,
    WARN,
    Finding,
    RankFacts,
    by_host,
    compare,
    probe_in_subprocess,
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
    return [
        _diagnose_binding(ranks),
        *summarize_hosts(cores, len(hosts), "cores", "enough for the ranks on"),
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
    """The threads as they are after init(), which limits them unless the user has set the number."""
    nodes = [rank.host for rank in ranks]
    facts = limited([rank.facts for rank in ranks], nodes)
    found = compare(ranks, lambda facts: f"{count(facts.threads, 'thread')} ({facts.libraries})")
    if facts != [rank.facts for rank in ranks]:
        ranks = [dataclasses.replace(rank, facts=after) for rank, after in zip(ranks, facts, strict=True)]
        found += f"; init() limits them to {compare(ranks, lambda facts: count(facts.threads, 'thread'))}"
    for host, there in by_host(ranks).items():
        threads = sum(rank.facts.threads for rank in there)
        remedy = f"export OMP_NUM_THREADS={_cores_per_rank(there)} before mpirun"
        if names := sorted({name for rank in there for name in rank.facts.set_by}):
            remedy = f"unset {' '.join(names)} before mpirun; init() limits the threads"
        if threads > max(_usable(there), len(there)):  # with one thread each, the finding `cores` is enough
            total = f"in total {count(threads, 'thread')} on {count(_usable(there), 'core')} of {host}"
            return Finding(WARN, "BLAS threads", f"{found}; {total}", remedy)
        squeezed = [rank for rank in there if rank.facts.threads > len(rank.facts.allowed)]
        if squeezed:
            only = f"{rank_names(squeezed[:1])} may use only {named('core', squeezed[0].facts.allowed)}"
            return Finding(WARN, "BLAS threads", f"{found}; {only}", f"{remedy}, or mpirun --bind-to none")
    if len({rank.facts.threads for rank in ranks}) > 1:
        remedy = "set the same OMP_NUM_THREADS on all ranks, or on none; other ranks wait for the slowest"
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


# GPUs. Without GPUs, arrays stay on the host.

# Runs in a new process, because cupy needs a second to load, creates a context on the device, and may crash.
GPU_PROBE = """
import json, cupy
from cupy.cuda import runtime
found = {"cupy": cupy.__version__, "cuda_runtime": runtime.runtimeGetVersion()}
found["cuda_driver"] = runtime.driverGetVersion()
count = runtime.getDeviceCount()
found["devices"] = [runtime.getDeviceProperties(i)["name"].decode() for i in range(count)]
if count:
    cupy.arange(1)  # compiles a kernel, with NVRTC and the headers of CUDA
try:
    from cupy.cuda import nccl
    found["nccl"] = nccl.get_version()
except Exception:
    found["nccl"] = 0
print(json.dumps(found))
"""


@dataclasses.dataclass(frozen=True)
class GpuFacts:
    """Facts of the kernel driver and of cupy. Versions are CUDA's and NCCL's numbers (13020 is CUDA 13.2)."""

    driver: str  # version of NVIDIA's kernel driver, or ""
    device_files: int  # /dev/nvidia0, ...
    cupy: str  # version; "" if cupy is not installed
    error: str  # why cupy does not work
    cuda_driver: int = 0
    cuda_runtime: int = 0
    devices: tuple[str, ...] = ()
    nccl: int = 0


def probe_gpus() -> GpuFacts:
    """GPUs of this host, through cupy if it is installed."""
    path = pathlib.Path("/proc/driver/nvidia/version")
    version = re.search(r"\b\d+\.\d+(\.\d+)?\b", path.read_text()) if path.is_file() else None
    files = [one for one in pathlib.Path("/dev").glob("nvidia*") if one.name.removeprefix("nvidia").isdigit()]
    facts = GpuFacts(version[0] if version else "", len(files), "", "")
    if importlib.util.find_spec("cupy") is None:
        return facts
    found, error = probe_in_subprocess(GPU_PROBE)
    if error:
        return dataclasses.replace(facts, cupy="installed", error=error)
    return dataclasses.replace(facts, **{**found, "devices": tuple(found["devices"])})


def cuda_version(number: int) -> str:
    """CUDA's version number as text.

    >>> cuda_version(13020), cuda_version(11080)
    ('13.2', '11.8')
    """
    return f"{number // 1000}.{number % 1000 // 10}"


def nccl_version(number: int) -> str:
    """NCCL's version number as text.

    >>> nccl_version(22707), nccl_version(2708)
    ('2.27.7', '2.7.8')
    """
    major, rest = divmod(number, 10000 if number >= 10000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


def diagnose_gpus(ranks: list[RankFacts[GpuFacts]]) -> list[Finding]:
    usable = _diagnose_cupy(ranks)
    if usable.verdict != OK:
        return [usable]
    found = compare(ranks, lambda facts: nccl_version(facts.nccl) if facts.nccl else "cupy cannot load it")
    missing = [rank.facts for rank in ranks if not rank.facts.nccl]
    remedy = f"pip install nvidia-nccl-cu{missing[0].cuda_runtime // 1000}" if missing else ""
    findings = [usable, Finding(NOTE if missing else OK, "NCCL", found, remedy)]
    for host, there in by_host(ranks).items():
        devices = len(there[0].facts.devices)
        if len(there) > devices:
            found = f"{count(len(there), 'rank')} for {count(devices, 'device')} on {host}"
            remedy = f"mpirun -np {devices} on this host, for one rank per device"
            findings.append(Finding(NOTE, "GPU", found, remedy))
    return findings


def _diagnose_cupy(ranks: list[RankFacts[GpuFacts]]) -> Finding:
    facts = next((rank.facts for rank in ranks if rank.facts.error), ranks[0].facts)
    devices = any(rank.facts.device_files for rank in ranks)
    install = "pip install cupy-cuda12x, or the cupy for your CUDA"
    if facts.error:
        found = f"cupy does not work: {compare(ranks, lambda facts: facts.error or 'works')}"
        return Finding(WARN if devices else NOTE, "GPU", found, f"{install} ({_driver(facts)})" * devices)
    if not facts.cupy:
        if devices:
            found = f"{compare(ranks, _driver)}, but cupy is not installed: arrays stay on the host"
            return Finding(NOTE, "GPU", found, install)
        return Finding(NOTE, "GPU", "none, and cupy is not installed: arrays stay on the host")
    found = compare(ranks, _describe_gpus)
    old = [rank for rank in ranks if rank.facts.cuda_runtime // 1000 > rank.facts.cuda_driver // 1000]
    if old:
        remedy = f"pip install cupy-cuda{old[0].facts.cuda_driver // 1000}x"
        return Finding(WARN, "GPU", f"cupy needs a newer CUDA than the driver supports: {found}", remedy)
    return Finding(OK, "GPU", found)


def _driver(facts: GpuFacts) -> str:
    return f"{count(facts.device_files, 'device')}, driver {facts.driver or 'unknown'}"


def _describe_gpus(facts: GpuFacts) -> str:
    devices = ", ".join(sorted({f"{facts.devices.count(name)} x {name}" for name in facts.devices})) or "no device"
    driver = f"driver {facts.driver or 'unknown'} (CUDA {cuda_version(facts.cuda_driver)})"
    return f"{devices}; {driver}, CUDA {cuda_version(facts.cuda_runtime)}, cupy {facts.cupy}"
