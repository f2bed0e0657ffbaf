"""Starting MPI: the settings it reads once, the import, and whether the world it found is the one that was launched."""

import os
import sys
from collections.abc import Mapping
from typing import Any

from allred.errors import ConfigError

# What launchers tell each process about how many they start. The first that is set counts: an mpirun inside a Slurm job
# starts its ranks through a step of other size.
_LAUNCHED_SIZE = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")


_given: dict[str, str] | None = None  # what MPI was started with; None where it was not allred that started it


def load() -> tuple[Any, bool]:
    """The module mpi4py.MPI with MPI started, and whether it was this call that started it.

    The module is None where no MPI can be loaded and no launcher started this process. Raises ConfigError if one did.
    """
    global _given
    import mpi4py

    ours = "mpi4py.MPI" not in sys.modules
    if ours:
        mpi4py.rc.finalize = False  # watch/exit.py does it
    passing = settings(os.environ) if ours else {}
    os.environ.update(passing)
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        launched = launched_size(os.environ)
        if launched == 1:
            return None, False
        raise ConfigError(
            f"{launched} processes were launched, but mpi4py cannot load an MPI library ({error}); install the MPI of "
            "your launcher into this environment, for example: pip install 'allred[mpich]'"
        ) from None
    finally:
        for name in passing:  # not for programs that this one starts
            os.environ.pop(name, None)
    if ours:
        _given = passing
    if not MPI.Is_initialized():
        MPI.Init_thread()
        ours = True
    return MPI, ours


def look() -> tuple[str, bool]:
    """The MPI library, without starting it, and whether it is running already; empty where there is none."""
    import mpi4py

    if "mpi4py.MPI" not in sys.modules:
        mpi4py.rc.initialize = mpi4py.rc.finalize = False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        return "", False
    return library_name(MPI.Get_library_version()), MPI.Is_initialized()


def given() -> str:
    """Which settings of allred's MPI was started with, in words."""
    if "mpi4py.MPI" not in sys.modules:
        return "MPI has not been started"
    from mpi4py import MPI

    meant = settings(os.environ) if _given is None else _given
    words = " ".join(f"{name}={value}" for name, value in meant.items())
    if not words or not MPI.Get_library_version().startswith("Open MPI"):
        return "none needed"
    if _given is None:
        return f"too late for {words}: MPI was started before allred.init(); call that before importing mpi4py.MPI"
    return f"{words}, given at its start"


def settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Settings for MPI's start, which save a second; the user's own are left alone.

    Open MPI probes for libfabric, which ranks of one node never use. Without a launcher it also leaves a file in
    /dev/shm on every exit, unless it is told that it talks to nobody but itself. (A program that has no launcher and
    spawns others with MPI sets OMPI_MCA_btl itself.)
    """
    if "OMPI_MCA_btl" in environ:
        return {}
    if "PMIX_RANK" not in environ and launched_size(environ) == 1:
        return {"OMPI_MCA_btl": "self"}
    if environ.get("OMPI_COMM_WORLD_SIZE") == environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "several nodes, perhaps"):
        return {"OMPI_MCA_btl": "^ofi"}
    return {}


def launched_size(environ: Mapping[str, str]) -> int:
    """How many processes the launcher says that it has started; 1 without a launcher."""
    return next((int(environ[name]) for name in _LAUNCHED_SIZE if environ.get(name, "").isdigit()), 1)


def check_world(size: int, library: str, environ: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError if the launcher started more processes than this MPI sees: N worlds of one, silently wrong."""
    launched = launched_size(environ)
    if size == 1 and launched > 1:
        raise ConfigError(
            f"the launcher started {launched} processes, but {library} sees a world of one: the launcher belongs to "
            "another MPI. Use the mpirun next to this Python, or in Slurm the --mpi= that fits: pmi2 for MPICH, pmix "
            "for Open MPI"
        )


def library_name(text: str) -> str:
    """MPI's own name and version, in short, from what Get_library_version says.

    >>> library_name("Open MPI v5.0.11, package: ...")
    'Open MPI 5.0.11'
    """
    first = text.split("\n")[0].strip("\0 ")
    if first.startswith("MPICH Version:"):
        return f"MPICH {first.split(':')[1].strip()}"
    return first.split(",")[0].replace("Open MPI v", "Open MPI ")
