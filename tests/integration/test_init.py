"""init() in the surroundings that users have: variables, launchers, nodes."""

import os
import re

import pytest
from harness import BIN, mpirun, python, run

MPIS = ["mpich", "openmpi"]
INIT = "import allred; allred.init(); print(allred.rank(), 'of', allred.size(), flush=True)"


@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("ALLRED_BUCKETS", "1", "unknown variable ALLRED_BUCKETS; did you mean ALLRED_BUCKET_BYTES?"),
        pytest.param(
            *("ALLRED_MODE", "pz", "ALLRED_MODE='pz' is not available; choose one of sync, ps"), marks=pytest.mark.full
        ),
        ("ALLRED_BACKEND", "single", "backend 'single' is for one rank, but there are 2; use auto, shm or mpi"),
    ],
)
def test_a_bad_variable_is_one_clear_error(mpi, variable, value, message):
    result = mpirun(2, "-c", INIT, mpi=mpi, timeout_s=40, env={variable: value})
    assert result.code == 1, result.text
    assert f"ConfigError: {message}" in result.err, result.text
    assert " of 2" not in result.out, result.text


def test_variables_that_differ_between_ranks():
    command = [BIN["mpich"] / "mpirun"]
    for value in ("5", "6"):
        command += ["-n", "1", "-env", "ALLRED_TIMEOUT_S", value, BIN["mpich"] / "python", "-c", INIT, ":"]
    result = run(command[:-1], timeout_s=40)
    assert result.code == 1, result.text
    assert "ConfigError: timeout_s is 5.0 on rank 0 but 6.0 on rank 1; set the same value on all ranks" in result.err, (
        result.text
    )


def test_ranks_without_the_variable_take_the_chiefs():
    code = "import allred; allred.init(); from allred import world; print(world.config().timeout_s)"
    python_ = BIN["mpich"] / "python"
    command = [
        BIN["mpich"] / "mpirun",
        "-n",
        "1",
        "-env",
        "ALLRED_TIMEOUT_S",
        "5",
        python_,
        "-c",
        code,
        ":",
        "-n",
        "2",
        python_,
    ]
    result = run([*command, "-c", code], timeout_s=40)
    assert result.out.split() == ["5.0"] * 3, result.text


@pytest.mark.parametrize(
    ("launcher", "options", "environment", "found"),
    [
        ("mpich", [], "openmpi", "MPICH's mpirun started 2 processes (PMI_SIZE=2), but mpi4py loads Open MPI 5."),
        ("mpich", ["-pmi-port"], "openmpi", "MPICH's mpirun started 2 processes (MPI_LOCALNRANKS=2), but mpi4py"),
        ("openmpi", [], "mpich", "Open MPI's mpirun started 2 processes (OMPI_COMM_WORLD_SIZE=2), but mpi4py loads"),
    ],
)
def test_the_mpirun_of_another_mpi_is_an_error_with_the_command_to_type(launcher, options, environment, found):
    python_ = BIN[environment] / "python"
    result = run([BIN[launcher] / "mpirun", *options, "-np", 2, python_, "-c", INIT], timeout_s=40)
    assert result.code == 1, result.text
    errors = [line for line in result.err.splitlines() if "ConfigError: " in line]
    assert 1 <= len(errors) <= 2, result.text  # one for each rank; Open MPI's mpirun may drop the second
    for error in errors:
        assert f"ConfigError: {found}" in error, result.text
        assert error.endswith(f"; type {BIN[environment] / 'mpirun'} -np 2 python ..."), result.text
    assert "Sorry" not in result.err, result.text  # MPI has not been started
    assert "Abort(" not in result.err, result.text
    assert " of 1" not in result.out, result.text


@pytest.mark.parametrize(
    ("launcher", "environment", "error"),
    [
        pytest.param("mpich", "openmpi", "ConfigError: MPICH's mpirun started 2 processes", marks=pytest.mark.full),
        ("mpich", "mpich", "ConfigError: a rank started this process without its connection to the launcher (PMI_FD="),
    ],
)
def test_a_program_that_a_rank_starts_counts_as_launched(launcher, environment, error):
    """It inherits the variables: training alone in each rank would be an accident. Without them it is on its own."""
    start = "import os, subprocess, sys\n"
    start += "alone = {k: v for k, v in os.environ.items() if not k.startswith(('PMI', 'MPI', 'OMPI_', 'HYDI'))}\n"
    start += f"for env in (None, alone): subprocess.run([sys.executable, '-c', {INIT!r}], env=env)\n"
    result = run([BIN[launcher] / "mpirun", "-np", 2, BIN[environment] / "python", "-c", start], timeout_s=60)
    assert result.err.count(error) == 2, result.text
    assert result.out == "0 of 1\n0 of 1\n", result.text


def test_two_nodes():
    code = (
        "import allred as a; a.init()\n"
        "print(a.rank(), a.local_rank(), a.local_size(), a.cross_rank(), a.cross_size(), a.allreduce(1.0, a.Sum))"
    )
    launcher = [BIN["mpich"] / "mpiexec", "-launcher", "fork", "-hosts", "nodea:2,nodeb:1", "-n", 3]
    result = run([*launcher, BIN["mpich"] / "python", "-c", code], timeout_s=40)
    assert sorted(result.out.strip().split("\n")) == ["0 0 2 0 2 3.0", "1 1 2 0 1 3.0", "2 0 1 1 2 3.0"], result.text
    assert "3 ranks on 2 nodes" in result.err


@pytest.mark.parametrize("mpi", MPIS)
def test_without_mpirun_it_is_a_world_of_one(mpi):
    result = run([BIN[mpi] / "python", "-c", INIT], timeout_s=40, env={"OMP_NUM_THREADS": "1"})
    assert (result.code, result.out) == (0, "0 of 1\n"), result.text
    assert result.err.count("\n") == 1, result.text  # the banner


def test_the_banner_says_what_runs_where_and_can_be_silenced():
    result = mpirun(3, "-c", INIT, timeout_s=40, env={"OMP_NUM_THREADS": str(os.cpu_count())})
    assert result.err.count("allred: 0.") == 1, result.text
    for words in ("3 ranks on ", "mode sync", "backend shm (ranks share a node)", "MPICH ", "C extension"):
        assert words in result.err
    pattern = (
        r"allred: warning: 3 ranks with \d+ BLAS threads on \d+ cores?: .*; export OMP_NUM_THREADS=\d+ before the start"
    )
    assert len(re.findall(pattern, result.err)) == 1, result.text
    assert mpirun(2, "-c", INIT, timeout_s=40, env={"ALLRED_BANNER": "0"}).err == ""


def test_without_any_mpi_library():
    """mpi4py finds no libmpi: a world of one all the same; under a launcher an error with the remedy."""
    hide = (
        "import sys\n"
        "class NoMPI:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'mpi4py.MPI': raise RuntimeError('cannot load MPI library')\n"
        "sys.meta_path.insert(0, NoMPI())\n"
    )
    assert python("-c", hide + INIT).out == "0 of 1\n"
    result = mpirun(2, "-c", hide + INIT, timeout_s=40)
    assert result.code != 0, result.text
    assert "2 processes were launched, but mpi4py cannot load an MPI library" in result.err
    assert "pip install 'allred[mpich]'" in result.err


@pytest.mark.parametrize("mpi", MPIS)
def test_a_rank_that_waits_too_long_says_for_what(mpi):
    code = (
        "import time, numpy as np, allred\nallred.init(timeout_s=1, banner=False)\n"
        "if allred.rank() == 1: time.sleep(60)\n"
        "allred.allreduce(np.ones(3), name='fc1.weight')\n"
    )
    result = mpirun(2, "-c", code, mpi=mpi, timeout_s=40)
    assert result.code == 1, result.text
    words = r"CollectiveTimeout: allreduce\(Average\) #\d+ 'fc1.weight' float64 \(3,\): not complete after 1 s"
    assert re.search(words, result.err), result.text


@pytest.mark.parametrize("mpi", MPIS)
def test_nothing_is_left_in_dev_shm_by_a_world_of_one(mpi):
    """In a /dev/shm of its own, where nobody else's files come and go."""
    shell = 'mount -t tmpfs none /dev/shm && "$0" -c "$1" && ls -A /dev/shm'
    alone = ["unshare", "--mount", "--map-root-user", "sh", "-c"]
    if run([*alone, "mount -t tmpfs none /dev/shm"]).code:
        pytest.skip("unshare cannot make a mount namespace here")
    result = run([*alone, shell, BIN[mpi] / "python", INIT], timeout_s=40)
    assert (result.code, result.out) == (0, "0 of 1\n"), result.text


def test_worlds_can_be_made_and_left_any_number_of_times():
    """MPICH has 2048 communicators, and each init() takes one. Here most of them are taken before."""
    code = (
        "from mpi4py import MPI\n"
        "import allred\n"
        "taken = [MPI.COMM_SELF.Dup() for _ in range({})]\n"
        "for _ in range({}):\n"
        "    allred.init(banner=False)\n"
        "    allred.shutdown()\n"
        "print('left', flush=True)\n"
    )
    assert python("-c", code.format(2030, 30)).out == "left\n"
    without_watchers = {"ALLRED_WATCHER": "0", "ALLRED_BACKEND": "mpi"}
    for taken, times, environment in ((2030, 30, without_watchers), (2036, 15, {})):
        two = mpirun(2, "-c", code.format(taken, times), env=environment)
        assert two.out.count("left") == 2, two.text


LATE = (
    "import os, time\nimport allred\n"
    "rank = int(os.environ.get('PMI_RANK') or os.environ['OMPI_COMM_WORLD_RANK'])\n"
    "if rank == 1: time.sleep({})\n"
    "allred.init(banner=False)\nprint('there', flush=True)\n"
)


@pytest.mark.parametrize("mpi", MPIS)
def test_who_waits_for_ranks_that_do_not_come_says_so(mpi):
    """One warning, or more where rank 1 takes longer to start than it sleeps."""
    result = mpirun(2, "-c", LATE.format(4), mpi=mpi, timeout_s=60, env={"ALLRED_STALL_WARNING_S": "2"})
    assert (result.code, result.out.count("there")) == (0, 2), result.text
    lines = result.err.splitlines()
    assert lines, result.text
    for line in lines:
        assert re.match(r"allred: rank 0 on \S+ has waited for \d+ s in allred.init\(\) for the other ranks: ", line)


@pytest.mark.parametrize("mpi", MPIS)
def test_and_gives_up_at_the_time_limit(mpi):
    shorter = LATE.format(60).replace(
        "allred.init", "from allred.watch import start\nstart.SHORTEST_S = 3\nallred.init"
    )
    result = mpirun(2, "-c", shorter, mpi=mpi, timeout_s=30, env={"ALLRED_TIMEOUT_S": "3"})
    assert result.code != 0, result.text
    assert len(re.findall(r"has waited for \d+ s in allred.init\(\)", result.err)) == 1, result.text
    assert "that is the limit" in result.err, result.text
    assert "there" not in result.out, result.text
