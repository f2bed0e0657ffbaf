"""What a measurement runs under: the rank before MPI starts, malloc's settings, MPI's settings, cores.

glibc reads GLIBC_TUNABLES when a process starts, so `tune_malloc` replaces the process by itself; that has to be before
MPI starts, and keeps the launcher's sockets open, MPICH's included (watch/exit.py closes that for programs which a rank
starts). Open MPI with more ranks than cores spins unless it is told to yield when idle.
"""

import os
import sys
import time
from typing import Any, NoReturn

from allred.cluster import mpi

# "Tuned" in PERF.md: freed memory is kept, large blocks come from the heap too, and in huge pages.
TUNABLES = f"glibc.malloc.hugetlb=1:glibc.malloc.trim_threshold={2**64 - 1}:glibc.malloc.mmap_threshold={2**64 - 1}"

_RANK = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
_OF_MPI = ("OMPI_MCA_", "MPIR_CVAR_", "I_MPI_", "UCX_", "FI_")
_OF_THE_LAUNCHER = {f"OMPI_MCA_{name}" for name in ("PREFIXES", "num_procs", "initial_wdir", "cpu_type")}
_BEHIND_S = 1.0


def first_rank() -> bool:
    """Whether this process is the one that speaks, by what launchers say, before MPI has started."""
    return next((os.environ[name] for name in _RANK if name in os.environ), "0") == "0"


def fail(line: str, code: int = 2) -> int:
    """Say on one rank, for all, what went wrong; the exit code. A rank that leaves first would end the job unheard."""
    if first_rank():
        print(line, end="\n" * bool(line), file=sys.stderr, flush=True)
    else:
        time.sleep(_BEHIND_S)
    return code


def tuned() -> bool:
    """Whether this process started with TUNABLES."""
    return TUNABLES in os.environ.get("GLIBC_TUNABLES", "")


def tune_malloc() -> None:
    """Start this process again with TUNABLES, unless it has them; the user's other tunables stay."""
    if tuned():
        return
    descriptor = os.environ.get("PMI_FD", "")
    if descriptor.isdigit():
        os.set_inheritable(int(descriptor), True)
    _restart({**os.environ, "GLIBC_TUNABLES": ":".join(filter(None, (os.environ.get("GLIBC_TUNABLES"), TUNABLES)))})


def _restart(environ: dict[str, str]) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environ)


def before_mpi(against: bool) -> dict[str, str]:
    """MPI's settings as it is going to start with them: the user's, allred's, and yielding where raw MPI needs it."""
    ranks = os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "")
    if against and ranks.isdigit() and int(ranks) > (os.cpu_count() or 1):
        os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    environ = {**os.environ, **mpi.settings(os.environ)}
    return {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith(_OF_MPI) and name not in _OF_THE_LAUNCHER
    }


def describe(comm: Any, mpi_settings: dict[str, str]) -> dict[str, Any]:
    """The setting as a record for JSON. Collective over the mpi4py communicator `comm`."""
    from mpi4py import MPI

    library = mpi.library_name(MPI.Get_library_version())
    foreign = "MPIR_CVAR_" if library.startswith("Open MPI") else "OMPI_MCA_"
    levels = {getattr(MPI, f"THREAD_{word.upper()}"): word for word in ("single", "funneled", "serialized", "multiple")}
    return {
        "mpi": library,
        "thread_level": levels[MPI.Query_thread()],
        "threads": len(os.listdir("/proc/self/task")),
        "mpi_settings": {name: value for name, value in mpi_settings.items() if not name.startswith(foreign)},
        "binding": comm.allgather(cores(os.sched_getaffinity(0))),
        "cores": os.cpu_count(),
        "glibc_tunables": os.environ.get("GLIBC_TUNABLES", ""),
        "tuned": tuned(),
    }


def cores(numbers: set[int]) -> str:
    """Core numbers as people write them.

    >>> cores({0, 1, 2, 5})
    '0-2,5'
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def lines(record: dict[str, Any]) -> list[str]:
    """The record for people."""
    settings = " ".join(f"{name}={value}" for name, value in record["mpi_settings"].items())
    binding = record["binding"]
    where = f"{binding[0]} each" if len(set(binding)) == 1 else ", ".join(binding)
    return [
        f"{record['mpi']}, thread level {record['thread_level']}; settings: {settings or 'none'}",
        f"{record['cores']} cores, those of the ranks: {where}; threads of a rank: {record['threads']}; "
        f"GLIBC_TUNABLES: {record['glibc_tunables'] or 'none'}",
    ]
