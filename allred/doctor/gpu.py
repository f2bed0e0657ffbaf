"""GPUs of a host: driver, devices, cupy and NCCL. Without GPUs, arrays stay on the host."""

import dataclasses
import importlib.util
import pathlib
import re

from allred.doctor.findings import NOTE, OK, WARN, Finding, RankFacts, by_host, compare, probe_in_subprocess
from allred.wording import count

# Runs in a new process, because cupy needs a second to load, creates a context on the device, and may crash.
_PROBE = """
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


def probe() -> GpuFacts:
    """GPUs of this host, through cupy if it is installed."""
    path = pathlib.Path("/proc/driver/nvidia/version")
    version = re.search(r"\b\d+\.\d+(\.\d+)?\b", path.read_text()) if path.is_file() else None
    files = [one for one in pathlib.Path("/dev").glob("nvidia*") if one.name.removeprefix("nvidia").isdigit()]
    facts = GpuFacts(version[0] if version else "", len(files), "", "")
    if importlib.util.find_spec("cupy") is None:
        return facts
    found, error = probe_in_subprocess(_PROBE)
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


def diagnose(ranks: list[RankFacts[GpuFacts]]) -> list[Finding]:
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
    found = compare(ranks, _describe)
    old = [rank for rank in ranks if rank.facts.cuda_runtime // 1000 > rank.facts.cuda_driver // 1000]
    if old:
        remedy = f"pip install cupy-cuda{old[0].facts.cuda_driver // 1000}x"
        return Finding(WARN, "GPU", f"cupy needs a newer CUDA than the driver supports: {found}", remedy)
    return Finding(OK, "GPU", found)


def _driver(facts: GpuFacts) -> str:
    return f"{count(facts.device_files, 'device')}, driver {facts.driver or 'unknown'}"


def _describe(facts: GpuFacts) -> str:
    devices = ", ".join(sorted({f"{facts.devices.count(name)} x {name}" for name in facts.devices})) or "no device"
    driver = f"driver {facts.driver or 'unknown'} (CUDA {cuda_version(facts.cuda_driver)})"
    return f"{devices}; {driver}, CUDA {cuda_version(facts.cuda_runtime)}, cupy {facts.cupy}"
