"""Conditions of a measurement: malloc's tunables, MPI's settings, cores; and which rank prints before MPI starts.

glibc reads GLIBC_TUNABLES when a process starts, so `tune_malloc` replaces the process by itself. It does so before MPI
starts and keeps the launcher's sockets open, including MPICH's (watch/exit.py closes that one for programs that a rank
starts). Open MPI with more ranks than cores busy-waits unless mpi_yield_when_idle is set.
"""

import os
import sys
import time
from typing import Any, NoReturn

from allred.cluster import mpi

# Freed memory stays in the process; large blocks come from the heap too; the heap uses huge pages.
TUNABLES = f"glibc.malloc.hugetlb=1:glibc.malloc.trim_threshold={2**64 - 1}:glibc.malloc.mmap_threshold={2**64 - 1}"

_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
_MPI_PREFIXES = ("OMPI_MCA_", "MPIR_CVAR_", "I_MPI_", "UCX_", "FI_")
_SET_BY_LAUNCHER = {f"OMPI_MCA_{name}" for name in ("PREFIXES", "num_procs", "initial_wdir", "cpu_type")}
_EXIT_DELAY_S = 1.0


def first_rank() -> bool:
    """Whether this process is rank 0, from the launcher's environment variables. Works before MPI has started."""
    return next((os.environ[name] for name in _RANK_VARIABLES if name in os.environ), "0") == "0"


def fail(line: str, code: int = 2) -> int:
    """Print an error on rank 0 and return the exit code.

    Other ranks wait a second: a launcher may kill rank 0 before it prints if another rank exits first.
    """
    if first_rank():
        print(line, end="\n" * bool(line), file=sys.stderr, flush=True)
    else:
        time.sleep(_EXIT_DELAY_S)
    return code


def tuned() -> bool:
    """Whether this process was started with TUNABLES."""
    return TUNABLES in os.environ.get("GLIBC_TUNABLES", "")


def tune_malloc() -> None:
    """Restart this process with TUNABLES added to the user's, unless it has them."""
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


def before_mpi(against_mpi: bool) -> dict[str, str]:
    """The settings that MPI will start with: the user's and allred's. Call it before MPI starts.

    against_mpi: also sets mpi_yield_when_idle for raw Open MPI if this host has more ranks than cores.
    """
    ranks = os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "")
    if against_mpi and ranks.isdigit() and int(ranks) > (os.cpu_count() or 1):
        os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    environ = {**os.environ, **mpi.settings(os.environ)}
    return {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith(_MPI_PREFIXES) and name not in _SET_BY_LAUNCHER
    }


def describe(comm: Any, mpi_settings: dict[str, str]) -> dict[str, Any]:
    """The conditions as a JSON record. Collective over the mpi4py communicator `comm`."""
    from mpi4py import MPI

    library = mpi.library_name(MPI.Get_library_version())
    other_mpi = "MPIR_CVAR_" if library.startswith("Open MPI") else "OMPI_MCA_"
    levels = {getattr(MPI, f"THREAD_{word.upper()}"): word for word in ("single", "funneled", "serialized", "multiple")}
    return {
        "mpi": library,
        "thread_level": levels[MPI.Query_thread()],
        "threads": len(os.listdir("/proc/self/task")),
        "mpi_settings": {name: value for name, value in mpi_settings.items() if not name.startswith(other_mpi)},
        "binding": comm.allgather(cores(os.sched_getaffinity(0))),
        "cores": os.cpu_count(),
        "glibc_tunables": os.environ.get("GLIBC_TUNABLES", ""),
        "tuned": tuned(),
    }


def cores(numbers: set[int]) -> str:
    """Core numbers as ranges.

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
    """The conditions as two lines of text."""
    settings = " ".join(f"{name}={value}" for name, value in record["mpi_settings"].items())
    binding = record["binding"]
    where = f"{binding[0]} each" if len(set(binding)) == 1 else ", ".join(binding)
    return [
        f"{record['mpi']}, thread level {record['thread_level']}; settings: {settings or 'none'}",
        f"{record['cores']} cores, binding of the ranks: {where}; threads per rank: {record['threads']}; "
        f"GLIBC_TUNABLES: {record['glibc_tunables'] or 'none'}",
    ]
