"""Which MPI mpi4py loads: its name, version and file, and whether mpi4py was built for its binary interface (ABI).

It is asked in a process of its own, which does not start MPI: a library that crashes while it is loaded is a line then.
"""

import dataclasses
import json
import os
import subprocess
import sys

from allred.cluster.mpi import library_name
from allred.doctor.line import FAIL, OK, WARN, Line
from allred.doctor.ranks import Seen, compared, who

_LIMIT_S = 20.0
_ASK = """
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

# Which libraries each ABI serves, by how they call themselves. mpi4py's wheels bring a module for each ABI.
_FAMILIES = {
    "mpich": ("MPICH", "Intel", "CRAY", "MVAPICH", "ParaStation"),
    "openmpi": ("Open MPI", "IBM Spectrum"),
    "impi": ("Intel",),
}


@dataclasses.dataclass(frozen=True)
class Library:
    """The MPI that mpi4py loads, or the error in words."""

    error: str = ""
    mpi4py: str = ""
    abi: str = ""  # mpich, openmpi, impi, mpiabi
    text: str = ""
    standard: tuple[int, int] = (0, 0)
    path: str = ""
    forced: str = ""  # by the variable MPI4PY_LIBMPI or MPI4PY_MPIABI

    @property
    def name(self) -> str:
        """In short, as in allred's banner."""
        return library_name(self.text)


def look() -> Library:
    """Ask mpi4py in a process of its own."""
    forced = next((f"{name}={os.environ[name]}" for name in _FORCING if name in os.environ), "")
    command = [sys.executable, "-c", _ASK]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return Library(error=f"loading it took longer than {_LIMIT_S:g} s", forced=forced)
    if asked.returncode:
        return Library(error=last_error(asked.stderr, asked.returncode), forced=forced)
    found = json.loads(asked.stdout.splitlines()[-1])
    abi = _abi(found["module"], found["vendor"])
    standard = (int(found["standard"][0]), int(found["standard"][1]))
    return Library("", found["mpi4py"], abi, found["text"], standard, found["path"], forced)


_FORCING = ("MPI4PY_LIBMPI", "MPI4PY_MPIABI")


def last_error(text: str, code: int) -> str:
    """The exception of a traceback in one line, or the signal that ended the process.

    >>> last_error("Traceback ...\\n  File x\\nRuntimeError: cannot load MPI library\\nlibmpi.so: not found\\n", 1)
    'RuntimeError: cannot load MPI library; libmpi.so: not found'
    >>> last_error("", -11)
    'the process that loaded it ended by signal 11'
    """
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    starts = [i for i, line in enumerate(lines) if line[0] not in " \t" and not line.startswith("Traceback")]
    if code < 0:
        return f"the process that loaded it ended by signal {-code}"
    if not starts:
        return f"the process that loaded it ended with exit code {code}"
    return "; ".join(lines[starts[0] :][:3])


def _abi(module: str, vendor: str) -> str:
    """The ABI that mpi4py's module was built for: in its file name, or of the MPI it was compiled with.

    >>> _abi("MPI.mpich.cpython-311-x86_64-linux-gnu.so", "MPICH"), _abi("MPI.cpython-311-x86_64.so", "Open MPI")
    ('mpich', 'openmpi')
    """
    word = module.split(".")[1]
    if word in _FAMILIES or word.startswith("mpiabi"):
        return word
    return next((abi for abi, names in _FAMILIES.items() if vendor.startswith(names)), vendor)


def judge(ranks: list[Seen[Library]]) -> list[Line]:
    """The library, and whether mpi4py fits."""
    broken = [rank for rank in ranks if rank.facts.error]
    if broken:
        return [_broken(ranks, broken[0].facts)]
    found = compared(ranks, _described)
    if len({rank.facts.name for rank in ranks}) > 1:
        remedy = "the same environment on all hosts: mpirun -np N /path/to/it/bin/python ..."
        return [Line(FAIL, "MPI library", f"ranks load different ones: {found}", remedy)]
    old = [rank for rank in ranks if rank.facts.standard < (3, 0)]
    if old:
        remedy = "pip install 'allred[mpich]', or module load a newer MPI"
        return [Line(FAIL, "MPI library", f"{found}; allred needs MPI 3.0", remedy)]
    return [Line(OK, "MPI library", found), _fit(ranks)]


def _described(facts: Library) -> str:
    standard = f"MPI {facts.standard[0]}.{facts.standard[1]}"
    path = facts.path or "a file that was not found"
    return f"{facts.name} ({standard}) from {path}{', by ' * bool(facts.forced)}{facts.forced}"


def _broken(ranks: list[Seen[Library]], facts: Library) -> Line:
    found = f"none can be loaded: {compared(ranks, lambda facts: facts.error or facts.name)}"
    if facts.forced:
        remedy = f"unset {facts.forced.split('=')[0]} ({facts.forced}), or name a file that is there"
    elif "mpi4py" in facts.error and "No module" in facts.error:
        remedy = "pip install 'allred[mpich]'"
    elif "undefined symbol" in facts.error:
        remedy = "mpi4py was built for another MPI: pip install --force-reinstall --no-cache-dir mpi4py"
    else:
        remedy = "pip install 'allred[mpich]', or allred[openmpi]; on a cluster: module load its MPI, and look again"
    return Line(FAIL, "MPI library", found, remedy)


def _fit(ranks: list[Seen[Library]]) -> Line:
    found = compared(ranks, lambda facts: f"mpi4py {facts.mpi4py}, built for the ABI {facts.abi}")
    for rank in ranks:
        families = _FAMILIES.get(rank.facts.abi, ())
        if families and not rank.facts.name.startswith(families):
            remedy = "pip install --force-reinstall --no-cache-dir mpi4py, and unset MPI4PY_MPIABI"
            return Line(WARN, "ABI", f"{found}, but {who([rank])} loads {rank.facts.name}", remedy)
    return Line(OK, "ABI", found)
