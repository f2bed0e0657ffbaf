"""init() in the surroundings that users have: variables, launchers, nodes."""

import json
import os
import re

import pytest
from harness import ANY_BLAS_THREADS, BIN, MPICH_BY_DEFAULT, MPIS, mpirun, python, run

INIT = "import allred; allred.init(); print(allred.rank(), 'of', allred.size(), flush=True)"


BAD = {
    ("ALLRED_MODE", "pz"): "ALLRED_MODE='pz' is not available; choose one of sync, local, ps",
    ("ALLRED_BACKEND", "single"): "backend 'single' is for one rank, but there are 2; use auto, shm or mpi",
    ("ALLRED_BUCKETS", "1"): "unknown variable ALLRED_BUCKETS; did you mean ALLRED_BUCKET_BYTES?",
}


@pytest.mark.parametrize("mpi", MPIS)
def test_a_bad_variable_is_one_clear_error(mpi):
    """The program catches the error of all but the last."""
    code = (
        "import os, allred\n"
        f"for name, value in {list(BAD)}:\n"
        "    os.environ[name] = value\n"
        "    try: allred.init()\n"
        "    except allred.ConfigError as error:\n"
        "        if name == 'ALLRED_BUCKETS': raise\n"
        "        print(f'{error}\\n', end='', flush=True)\n"
        "    del os.environ[name]\n"
        "print('never')\n"
    )
    result = mpirun(2, "-c", code, mpi=mpi, timeout_s=40)
    assert result.code == 1, result.text
    *caught, raised = BAD.values()
    lines = result.out.splitlines()
    assert len(lines) == 2 * len(caught), result.text
    assert all(sum(line.startswith(message) for line in lines) == 2 for message in caught), result.text
    assert result.err.count(f"allred: ConfigError: {raised}\n") == 1, result.text
    assert "Traceback" not in result.err, result.text


def test_a_later_world_without_watcher_leaves_the_signal_of_batch_systems_to_a_session():
    """The watcher's connection ignores SIGUSR1 behind its world, for the end of the process under MPICH."""
    code = (
        "import os, signal, allred\n"
        "allred.init(banner=False)\n"
        "allred.shutdown()\n"
        "os.environ['ALLRED_WATCHER'] = '0'\n"
        "allred.init(banner=False)\n"
        "with allred.Session(log_steps=None) as session:\n"
        "    opt, params = allred.distributed(allred.optim.SGD(lr=1.0)), [allred.empty(2)]\n"
        "    params[0][:] = 1\n"
        "    session.track(params=params, optimizer=opt)\n"
        "    for step in session.steps(range(5)):\n"
        "        opt.step(params, [params[0] * 0])\n"
        "        if step == 1 and allred.rank() == 1: signal.raise_signal(signal.SIGUSR1)\n"
        "print(f'{session.step}\\n', end='', flush=True)\n"
    )
    result = mpirun(2, "-c", code, timeout_s=40)
    assert result.out.split() == ["2", "2"], result.text


def test_ranks_without_a_variable_take_the_chiefs_and_another_value_is_an_error():
    code = (
        "import os, allred\nfrom allred import world\n"
        "rank = int(os.environ['PMI_RANK'])\n"
        "if rank == 0: os.environ['ALLRED_TIMEOUT_S'] = '5'\n"
        "world.last_generation = 5 * rank\n"  # as if it had been in more worlds
        "allred.init(banner=False)\n"
        "print(f'{world.config().timeout_s} {world.current().generation}\\n', end='', flush=True)\n"
        "allred.shutdown()\n"
        "if rank == 1: os.environ['ALLRED_TIMEOUT_S'] = '6'\n"
        "allred.init(banner=False)\n"
    )
    result = mpirun(2, "-c", code, timeout_s=40)
    assert result.code == 1, result.text
    assert result.out.split() == ["5.0", "6"] * 2, result.text
    differs = "ConfigError: timeout_s is 5.0 on rank 0 but 6.0 on rank 1; set the same value on all ranks"
    assert result.err.count(differs) == 1, result.text


@pytest.mark.parametrize(
    ("launcher", "options", "environment", "found"),
    [
        ("mpich", [], "openmpi", "MPICH's mpirun started 2 processes (PMI_SIZE=2), but mpi4py loads Open MPI 5."),
        pytest.param(
            *("mpich", ["-pmi-port"], "openmpi", "MPICH's mpirun started 2 processes (MPI_LOCALNRANKS=2), but mpi4py"),
            marks=pytest.mark.full,
        ),
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
    start = "import os, subprocess, sys\nif os.environ['PMI_RANK'] != '0': sys.exit()\n"
    start += "alone = {k: v for k, v in os.environ.items() if not k.startswith(('PMI', 'MPI', 'OMPI_', 'HYDI'))}\n"
    start += f"for env in (None, alone): subprocess.run([sys.executable, '-c', {INIT!r}], env=env)\n"
    result = run([BIN[launcher] / "mpirun", "-np", 2, BIN[environment] / "python", "-c", start], timeout_s=60)
    assert result.err.count(error) == 1, result.text
    assert result.out == "0 of 1\n", result.text


@pytest.mark.parametrize("mpi", MPIS)
def test_without_mpirun_it_is_a_world_of_one(mpi):
    result = run([BIN[mpi] / "python", "-c", INIT], timeout_s=40, env={"OMP_NUM_THREADS": "1"})
    assert (result.code, result.out) == (0, "0 of 1\n"), result.text
    assert result.err.count("\n") == 1, result.text  # the banner


def test_the_banner_says_what_runs_where():
    """test_watch.test_watchers_end_after_shutdown_and_with_their_ranks silences it with ALLRED_BANNER=0."""
    result = mpirun(2, "-c", INIT, timeout_s=40, env={"OMP_NUM_THREADS": str(os.cpu_count()), **ANY_BLAS_THREADS})
    assert result.err.count("allred: 0.") == 1, result.text
    for words in ("2 ranks on ", "mode sync", "backend shm (ranks share a node)", "MPICH ", "C extension"):
        assert words in result.err
    assert "limited" not in result.err, result.text
    pattern = r"allred: warning: 2 ranks with \d+ BLAS threads on \d+ cores?: .*; unset OMP_NUM_THREADS"
    assert len(re.findall(pattern, result.err)) == (os.cpu_count() > 1), result.text


THREADS = """
import json, os, subprocess, sys
import numpy
import threadpoolctl
import allred
from allred import testing

def blas():
    return max(pool["num_threads"] for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas")

def fork():
    read, write = os.pipe()
    if os.fork() == 0:
        numpy.ones((200, 200)) @ numpy.ones((200, 200))
        os.write(write, str(blas()).encode())
        os._exit(0)
    return int(os.read(read, 100))

def child():
    code = "import numpy, threadpoolctl; print(threadpoolctl.threadpool_info()[0]['num_threads'])"
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout)

def variable():
    return os.environ.get("OMP_NUM_THREADS")

found = {"cores": len(os.sched_getaffinity(0)), "before": blas()}
testing.threads(2, lambda: None)
found["threads"] = [blas(), variable()]
allred.init()
found |= {"rank": allred.rank(), "in": [blas(), variable(), fork(), child()]}
allred.shutdown()
found["after"] = [blas(), variable()]
os.environ["MKL_NUM_THREADS"] = "7"
allred.init(banner=False)
found["user"] = [blas(), variable()]
allred.shutdown()
del os.environ["MKL_NUM_THREADS"]
if found["rank"] == 0:
    allred.init(comm=[0], banner=False)
    found["part"] = [blas(), variable()]
    allred.shutdown()
allred.init(banner=False)
with threadpoolctl.threadpool_limits(5, user_api="blas"):  # by the program, which stays
    os.environ["OMP_NUM_THREADS"] = "6"
    allred.shutdown()
    found["changed"] = [blas(), variable()]
del os.environ["OMP_NUM_THREADS"]
allred.init(mode="ps", banner=False)
found["ps"] = [blas(), variable()]
print(json.dumps(found) + "\\n", end="", flush=True)
"""


@pytest.mark.parametrize(("mpi", "options"), [
    ("mpich", []), *(pytest.param("openmpi", each, marks=pytest.mark.full) for each in ([], ["--bind-to", "none"])),
])  # fmt: skip
def test_init_limits_the_threads_to_the_cores_of_a_rank_and_shutdown_restores_them(mpi, options):
    """3 s. numpy's OpenBLAS starts a thread for each core that it may use."""
    if (cores := len(os.sched_getaffinity(0))) < 2:
        pytest.skip("with one core there is nothing to limit")
    result = run([BIN[mpi] / "mpirun", *options, "-np", 2, BIN[mpi] / "python", "-c", THREADS], env=ANY_BLAS_THREADS)
    assert result.code == 0, result.text
    ranks = [json.loads(line) for line in result.out.splitlines()]
    assert sorted(rank["rank"] for rank in ranks) == [0, 1], result.text
    for rank in ranks:
        before, most = rank["before"], cores // 2
        free, limited = [before, None], [min(before, most), str(most)]
        if rank["cores"] == most:  # bound by Open MPI
            limited = free
        assert rank["threads"] == rank["after"] == rank["user"] == free, result.text
        assert rank["in"] == [*limited, limited[0], limited[0]], result.text
        assert rank["ps"] == limited, result.text
        assert rank["changed"] == [5, "6"], result.text
        assert rank.get("part", limited) == limited, result.text
    words = f"; BLAS and torch limited to {most} thread{'s' * (most > 1)} per rank\n"
    assert result.err.count(words) == (limited != free), result.text
    assert "warning" not in result.err, result.text


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
    assert "pip install mpich" in result.err


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
        "import os\n"
        "from mpi4py import MPI\n"
        "import allred\n"
        "taken = [MPI.COMM_SELF.Dup() for _ in range(2036)]\n"
        "for settings in {}:\n"
        "    os.environ.update(settings)\n"
        "    for _ in range(12):\n"
        "        allred.init(banner=False)\n"
        "        allred.shutdown()\n"
        "print('left', flush=True)\n"
    )
    assert python("-c", code.format([{}])).out == "left\n"
    worlds = [
        {"ALLRED_WATCHER": "0", "ALLRED_BACKEND": "mpi"},
        {"ALLRED_WATCHER": "1", "ALLRED_BACKEND": "auto"},
    ]
    two = mpirun(2, "-c", code.format(worlds))
    assert two.out.count("left") == 2, two.text


@pytest.mark.parametrize("mpi", MPICH_BY_DEFAULT)
def test_a_rank_that_waits_in_init_for_others_prints_it(mpi, tmp_path):
    """Rank 1 calls init() after the first line of rank 0."""
    code = (
        "import os, pathlib, time\nimport allred\n"
        "rank = int(os.environ.get('PMI_RANK') or os.environ['OMPI_COMM_WORLD_RANK'])\n"
        f"lines = pathlib.Path('{tmp_path}/lines')\n"
        "if rank == 0: os.dup2(os.open(lines, os.O_CREAT | os.O_WRONLY), 2)\n"
        "while rank == 1 and not (lines.exists() and '\\n' in lines.read_text()): time.sleep(0.1)\n"
        "allred.init(banner=False)\nprint('there', flush=True)\n"
    )
    result = mpirun(2, "-c", code, mpi=mpi, timeout_s=60, env={"ALLRED_STALL_WARNING_S": "1"})
    assert (result.code, result.out.count("there")) == (0, 2), result.text
    for line in (tmp_path / "lines").read_text().splitlines():
        assert re.match(r"allred: rank 0 on \S+ has waited for \d+ s in allred.init\(\) for the other ranks: ", line)


@pytest.mark.parametrize("mpi", MPIS)
def test_a_rank_gives_up_waiting_in_init_at_the_time_limit(mpi):
    code = (
        "import os, time\nimport allred\nfrom allred.watch import start\nstart.LEAST_MPI_INIT_S = 3\n"
        "rank = int(os.environ.get('PMI_RANK') or os.environ['OMPI_COMM_WORLD_RANK'])\n"
        "if rank == 1: time.sleep(60)\n"
        "allred.init(banner=False)\nprint('there', flush=True)\n"
    )
    result = mpirun(2, "-c", code, mpi=mpi, timeout_s=30, env={"ALLRED_TIMEOUT_S": "3"})
    assert result.code != 0, result.text
    assert len(re.findall(r"has waited for \d+ s in allred.init\(\)", result.err)) == 1, result.text
    assert "time limit reached" in result.err, result.text
    assert "there" not in result.out, result.text
