"""GPUs, if there are any: driver, devices, cupy and NCCL. Without them a note: arrays are numpy's then.

cupy is asked in a process of its own: it takes a second to load, makes a context on the device, and may crash.
"""

import dataclasses
import importlib.util
import json
import pathlib
import re
import subprocess
import sys

from allred.doctor.line import NOTE, OK, WARN, Line
from allred.doctor.ranks import Seen, by_host, compared

_LIMIT_S = 20.0
_ASK = """
import json, cupy
from cupy.cuda import runtime
found = {"cupy": cupy.__version__, "runtime": runtime.runtimeGetVersion(), "driver": runtime.driverGetVersion()}
count = runtime.getDeviceCount()
found["devices"] = [runtime.getDeviceProperties(i)["name"].decode() for i in range(count)]
try:
    from cupy.cuda import nccl
    found["nccl"] = nccl.get_version()
except Exception:
    found["nccl"] = 0
print(json.dumps(found))
"""


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What the kernel's driver shows, and what cupy says; versions as CUDA numbers them (13020 is 13.2)."""

    driver: str  # "" without NVIDIA's driver
    device_files: int
    cupy: str  # "" where it is not installed
    error: str  # why cupy does not work
    cuda_driver: int = 0
    cuda_runtime: int = 0
    devices: tuple[str, ...] = ()
    nccl: int = 0


def look() -> Gpu:
    """Look at this host, through cupy where it is installed."""
    driver, files = _driver()
    if importlib.util.find_spec("cupy") is None:
        return Gpu(driver, files, "", "")
    command = [sys.executable, "-c", _ASK]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return Gpu(driver, files, "installed", f"no answer within {_LIMIT_S:g} s")
    if asked.returncode:
        return Gpu(driver, files, "installed", (asked.stderr.strip().splitlines() or ["it ended without a word"])[-1])
    found = json.loads(asked.stdout.splitlines()[-1])
    devices = tuple(found["devices"])
    return Gpu(driver, files, found["cupy"], "", found["driver"], found["runtime"], devices, found["nccl"])


def _driver() -> tuple[str, int]:
    """The version of NVIDIA's kernel module, and how many devices it has made."""
    path = pathlib.Path("/proc/driver/nvidia/version")
    version = re.search(r"\b\d+\.\d+(\.\d+)?\b", path.read_text()) if path.is_file() else None
    files = [one for one in pathlib.Path("/dev").glob("nvidia*") if one.name.removeprefix("nvidia").isdigit()]
    return version[0] if version else "", len(files)


def cuda(version: int) -> str:
    """A version as people write it.

    >>> cuda(13020), cuda(11080)
    ('13.2', '11.8')
    """
    return f"{version // 1000}.{version % 1000 // 10}"


def nccl(version: int) -> str:
    """The same for NCCL.

    >>> nccl(22707), nccl(2708)
    ('2.27.7', '2.7.8')
    """
    large = version >= 10000
    major, rest = divmod(version, 10000 if large else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


def judge(ranks: list[Seen[Gpu]]) -> list[Line]:
    """Devices and cupy together, then NCCL, then ranks against devices."""
    line = _cupy(ranks)
    if line.verdict != OK:
        return [line]
    versions = compared(ranks, lambda facts: nccl(facts.nccl) if facts.nccl else "not with this cupy")
    have = all(rank.facts.nccl for rank in ranks)
    lines = [line, Line(OK if have else NOTE, "NCCL", versions)]
    for host, there in by_host(ranks).items():
        devices = len(there[0].facts.devices)
        if len(there) > devices:
            found = f"{len(there)} ranks for {devices} device{'s' * (devices > 1)} on {host}"
            lines.append(Line(NOTE, "GPU", found, f"mpirun -np {devices} here, for one rank a device"))
    return lines


def _cupy(ranks: list[Seen[Gpu]]) -> Line:
    facts = next((rank.facts for rank in ranks if rank.facts.error), ranks[0].facts)
    if facts.error:
        found = f"cupy does not work: {compared(ranks, lambda facts: facts.error or 'it does')}"
        devices = any(rank.facts.device_files for rank in ranks)
        remedy = f"pip install cupy-cuda12x, or the one of your CUDA ({_seen(facts)})" if devices else ""
        return Line(WARN if devices else NOTE, "GPU", found, remedy)
    if not facts.cupy:
        if any(rank.facts.device_files for rank in ranks):
            found = f"{compared(ranks, _seen)}, but cupy is not installed: arrays on the host only"
            return Line(NOTE, "GPU", found, "pip install cupy-cuda12x, or the one of your CUDA")
        return Line(NOTE, "GPU", "none, and no cupy: arrays on the host")
    found = compared(ranks, _described)
    old = [rank for rank in ranks if rank.facts.cuda_runtime // 1000 > rank.facts.cuda_driver // 1000]
    if old:
        major = old[0].facts.cuda_driver // 1000
        return Line(WARN, "GPU", f"cupy is for a newer CUDA than the driver: {found}", f"pip install cupy-cuda{major}x")
    return Line(OK, "GPU", found)


def _seen(facts: Gpu) -> str:
    return f"{facts.device_files} device{'s' * (facts.device_files != 1)}, driver {facts.driver or 'unknown'}"


def _described(facts: Gpu) -> str:
    devices = ", ".join(sorted({f"{facts.devices.count(name)} x {name}" for name in facts.devices})) or "no device"
    versions = f"driver {facts.driver or '?'} (CUDA {cuda(facts.cuda_driver)}), CUDA {cuda(facts.cuda_runtime)}"
    return f"{devices}; {versions}, cupy {facts.cupy}"
