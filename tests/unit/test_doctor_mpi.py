"""The doctor's findings about launchers, the world and the MPI library, from given facts."""

import dataclasses

import pytest
from doctor_facts import finding_about, rank_facts, verdicts

from allred.doctor import mpi
from allred.doctor.findings import FAIL, NOTE, OK, WARN, Finding

# ---- launchers


def facts_of_launch(**change):
    facts = mpi.LaunchFacts("", 1, "/env/bin/mpirun", "/env/bin/mpirun", "MPICH", False, True)
    return dataclasses.replace(facts, **change)


@pytest.mark.parametrize(
    ("change", "topic", "verdict", "remedy"),
    [
        ({}, "mpirun", OK, ""),
        ({"on_path": "/usr/bin/mpirun"}, "mpirun", WARN, "export PATH=/env/bin:$PATH"),
        ({"on_path": "/usr/bin/mpirun", "launcher": "MPICH's mpirun"}, "mpirun", NOTE, "export PATH=/env/bin:$PATH"),
        ({"local": "", "on_path": "/usr/bin/mpirun"}, "mpirun", OK, ""),
        ({"local": "", "on_path": ""}, "mpirun", WARN, "pip install mpich"),
        ({"local": "", "on_path": "", "slurm": True}, "mpirun", OK, ""),
        ({"slurm": True}, "launcher", NOTE, "srun --mpi=pmi2"),
        ({"slurm": True, "launcher": "srun with PMI"}, "launcher", OK, ""),
    ],
)
def test_launchers(change, topic, verdict, remedy):
    found = finding_about(mpi.diagnose_launch(rank_facts(facts_of_launch(**change))), topic)
    assert (found.verdict, found.remedy[: len(remedy)]) == (verdict, remedy)


def test_warnings_about_an_mpirun_of_another_mpi_and_about_root():
    alone = facts_of_launch(local="", on_path="/usr/bin/mpirun")
    assert verdicts(mpi.diagnose_start(alone, "Open MPI 5.0.11")) == {"mpirun": WARN, "root": WARN}
    assert mpi.diagnose_start(alone, "MPICH 5.0.2") == []
    local = facts_of_launch(on_path="/usr/bin/mpirun", root_refused=False)
    assert mpi.diagnose_start(local, "Open MPI 5.0.11") == []
    launched = dataclasses.replace(alone, launcher="Open MPI's mpirun", on_path_kind="")
    assert mpi.diagnose_start(launched, "Open MPI 5.0.11") == []


WORLD = mpi.WorldFacts(0, 1, "nodeA", 4)


@pytest.mark.parametrize(
    ("launcher", "name", "remedy"),
    [
        ("srun with PMI", "Open MPI 5.0.11", "srun --mpi=pmix python"),
        ("srun with PMIx", "MPICH 5.0.2", "srun --mpi=pmi2 python"),
        ("MPICH's mpirun", "Open MPI 5.0.11", "/env/bin/mpirun -np 4 python"),
    ],
)
def test_worlds_of_one_rank_fail_and_the_remedy_names_the_right_launcher(launcher, name, remedy):
    loaded = mpi.LibraryFacts(text=name)
    (found,) = mpi.diagnose_world(rank_facts(WORLD), facts_of_launch(launcher=launcher), loaded)
    assert (found.verdict, found.topic) == (FAIL, "world")
    assert found.found.startswith(f"4 processes were started, but {name} sees 4 worlds of one rank")
    assert found.remedy.startswith(remedy)


def test_a_world_of_several_hosts():
    worlds = [mpi.WorldFacts(rank, 3, "", 3) for rank in range(3)]
    lines = mpi.diagnose_world(rank_facts(*worlds, hosts=("a", "a", "b")), None, None)
    assert lines == [Finding(OK, "world", "3 ranks: 2 on a, 1 on b")]


# ---- library

LIBRARY = mpi.LibraryFacts("", "4.1.2", "mpich", "MPICH Version:      5.0.2\n", (5, 0), "/env/lib/libmpi.so.12")


@pytest.mark.parametrize(
    ("change", "topic", "verdict", "remedy"),
    [
        ({}, "MPI library", OK, ""),
        ({"standard": (2, 2)}, "MPI library", FAIL, "pip install mpich"),
        ({"error": "RuntimeError: cannot load MPI library"}, "MPI library", FAIL, "pip install mpich"),
        ({"error": "ImportError: undefined symbol: MPI_X"}, "MPI library", FAIL, "pip install --force-reinstall"),
        ({"error": "x", "forced": "MPI4PY_LIBMPI=/x"}, "MPI library", FAIL, "unset MPI4PY_LIBMPI"),
        (
            {"error": "ModuleNotFoundError: No module named 'mpi4py'"},
            "MPI library",
            FAIL,
            "pip install mpich",
        ),
    ],
)
def test_libraries(change, topic, verdict, remedy):
    found = finding_about(mpi.diagnose_library(rank_facts(dataclasses.replace(LIBRARY, **change))), topic)
    assert (found.verdict, found.remedy[: len(remedy)]) == (verdict, remedy)


def test_ranks_with_different_libraries_fail():
    other = dataclasses.replace(LIBRARY, text="MPICH Version: 4.3.0")
    (found,) = mpi.diagnose_library(rank_facts(LIBRARY, LIBRARY, other))
    assert found.verdict == FAIL
    assert "rank 2 on nodeA: MPICH 4.3.0" in found.found
