"""Whole jobs in which rank 0 is a server and the others are expendable: one fails or dies, and the others continue."""

import os
import re
import signal
import threading
import time

import pytest
from failures import FAILURES, MPI_FIRST, WITHOUT_EXTENSION, check_end, count_tracebacks
from harness import BIN, MPICH_BY_DEFAULT, MPIS, ULFM, full, gone, mpirun, processes, run

GO_ON = {"ALLRED_WORKER_FAILURE": "go_on"}

# The others look at who is gone, as servers do, until `enough` are; then they take a moment more, and end.
PROGRAM = """
import os, signal, sys, threading, time
{before}
import allred
import allred.watch.start
from allred import world

original = allred.watch.start.start
everyone_but_rank_0 = lambda shape: {{"expendable": tuple(range(1, shape.size))}}
allred.watch.start.start = lambda *given, **more: original(*given, **more | everyone_but_rank_0(given[1]))
allred.init(banner=False)
rank, size = allred.rank(), allred.size()
allred.barrier()
world.watcher().set_role(f"worker {{rank - 1}}" if rank else "parameter server 0; last checkpoint ckpt/1")

def fails():
    {fails}

try:
    if rank in {who}:
        time.sleep(0.3 * rank)
        fails()
    deadline = time.monotonic() + 10
    while len(world.watcher().gone) < {enough} and time.monotonic() < deadline:
        time.sleep(0.01)
    for number, how in world.watcher().gone.items():
        print(f"rank {{rank}} sees that rank {{number}} {{how}}", flush=True)
    time.sleep({more_s} + 0.1 * rank)
    {after}
    print("done on", rank, round(time.monotonic(), 1), flush=True)
except allred.RemoteRankError as error:
    print(f"rank {{rank}} heard: {{error}}", flush=True)
    raise
finally:
    print("finally on", rank, flush=True)
"""

# Ranks 2 to 6 fail, each in another way. In ranks 4 and 5 Python owns the exit, not the extension.
LINGER = """
import atexit, resource
PMI = os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
if PMI == "4": sys.modules["allred.native._kernels"] = None
if PMI == "5": from mpi4py import MPI

def print_cpu():
    print("cpu", sum(resource.getrusage(0)[:2]), flush=True)

FAILS = {
    2: "print_cpu(); atexit.register(print_cpu); raise ValueError('boom 2')",
    3: "sys.exit(3)",
    4: "raise ValueError('boom 4')",
    5: "sys.exit(3)",
    6: "threading.Thread(target=threading.Event().wait).start(); raise ValueError('boom 6')",
}
"""


def program(fails, who=(2,), more_s=1.0, after="", before="", enough=None):
    enough = len(who) if enough is None else enough
    return PROGRAM.format(fails=fails, who=who, enough=enough, more_s=more_s, after=after, before=before)


@pytest.fixture
def mark(mark):
    """All processes of the program are to end."""
    yield mark
    assert gone(mark, 5)


def done(result):
    return {int(rank) for rank in re.findall(r"^done on (\d)", result.out, re.M)}


def sees(result, number, how):
    return {int(r) for r in re.findall(rf"^rank (\d) sees that rank {number} {re.escape(how)}", result.out, re.M)}


# ---- a worker that fails


@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize(
    "failure",
    ["raise", *(pytest.param(failure, marks=full) for failure in ("sys.exit", "raise SystemExit", "interrupt"))],
)
def test_the_others_go_on_and_its_exit_code_is_the_jobs(mpi, failure, mark):
    """tests/integration/test_watch.py has all failures, where they end the job."""
    fails, code, how = FAILURES[failure]
    result = mpirun(3, "-c", program(fails), mpi=mpi, timeout_s=40, env=GO_ON | mark)
    check_end(result, code, mpi)
    assert done(result) == sees(result, 2, how) == {0, 1}, result.text
    assert "heard" not in result.out, result.text
    said = re.findall(r"^allred: (rank 2 \(worker 1\) on \S+ .*); the other ranks continue$", result.err, re.M)
    assert len(said) == 1, result.text
    assert how in said[0], result.text
    tracebacks = failure in ("raise", "interrupt")
    assert count_tracebacks(result) == tracebacks, result.text
    if tracebacks:
        assert result.err.index("Traceback (most") > result.err.index("the other ranks continue"), result.text
    assert result.err.count("; ending the job") == 1, result.text


@pytest.mark.parametrize("mpi", MPIS)
def test_ranks_that_fail_linger_without_cpu_time_whoever_owns_the_exit_and_end_soon_after_the_others(mpi, mark):
    """They linger for longer than a verdict takes: Python's patience is 3 s, that of C 10 s."""
    run_it = program("exec(FAILS[rank])", who=(2, 3, 4, 5, 6), more_s=11.5, before=LINGER)
    result = mpirun(7, "-c", run_it, mpi=mpi, timeout_s=60, env=GO_ON | mark)
    assert result.code in (1, 3) or (mpi == "openmpi" and result.code == -11), result.text
    assert done(result) == {0, 1}, result.text
    assert result.seconds > 11, result.text
    before, after = re.findall(r"^cpu ([\d.]+)", result.out, re.M)
    assert float(after) < float(before) + 1, result.text  # of 11.5 s
    for rank in (2, 4, 6):
        assert result.err.count(f"\nValueError: boom {rank}") == 1, result.text
    assert count_tracebacks(result) == 3, result.text


@full
@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize("failure", ["raise", "sys.exit"])
@pytest.mark.parametrize("before", [WITHOUT_EXTENSION, MPI_FIRST])
def test_where_python_owns_the_exit(mpi, failure, before, mark):
    fails, code, _ = FAILURES[failure]
    run_it = program(fails, before=before, more_s=4.5)
    result = mpirun(3, "-c", run_it, mpi=mpi, timeout_s=40, env=GO_ON | mark)
    check_end(result, code, mpi)
    assert done(result) == {0, 1}, result.text
    assert count_tracebacks(result) == (failure == "raise"), result.text


@pytest.mark.parametrize("mpi", MPIS)
def test_the_last_that_fails_ends_the_servers(mpi):
    result = mpirun(3, "-c", program("raise ValueError(f'boom {rank}')", who=(1, 2), enough=3), mpi=mpi, timeout_s=40,
                    env=GO_ON)  # fmt: skip
    assert result.code == 1, result.text
    assert not done(result), result.text
    assert re.search(r"^rank 0 heard: rank 2 \(worker 1\) on \S+ failed .*boom 2$", result.out, re.M), result.text
    assert count_tracebacks(result) == 2, result.text
    assert result.err.index("ValueError: boom 1") < result.err.rindex("ValueError: boom 2"), result.text


@pytest.mark.parametrize("mpi", MPIS)
def test_a_server_that_fails_ends_all(mpi):
    after = "\n    if rank == 0: raise KeyError('server')\n    time.sleep(30)"
    result = mpirun(3, "-c", program("raise ValueError('boom')", after=after), mpi=mpi, timeout_s=40, env=GO_ON)
    assert result.code == 1, result.text
    name = r"rank 0 \(parameter server 0; last checkpoint ckpt/1\) on \S+ failed with exit code 1: KeyError: 'server'"
    assert re.search(rf"^rank 1 heard: {name}$", result.out, re.M), result.text
    assert result.err.index("\nValueError: boom") < result.err.index("\nKeyError: 'server'"), result.text


@pytest.mark.parametrize("mpi", MPIS)
def test_a_collective_with_a_rank_that_is_gone(mpi):
    result = mpirun(3, "-c", program("sys.exit(3)", after="allred.barrier()"), mpi=mpi, timeout_s=40, env=GO_ON)
    assert result.code == 3, result.text
    assert not done(result), result.text
    words = r"rank 2 \(worker 1\) on \S+ has failed, and will never call barrier\(\) #\d+, in which rank \d waits"
    assert len(re.findall(rf"^rank \d heard: {words}$", result.out, re.M)) == 2, result.text


@pytest.mark.parametrize("mpi", MPICH_BY_DEFAULT)
@pytest.mark.parametrize("nodes", [pytest.param("2,2", marks=full), "1,1,2"])
def test_on_several_nodes(mpi, nodes):
    environment = GO_ON | {"ALLRED_PRETEND_NODES": nodes}
    result = mpirun(4, "-c", program("raise ValueError('boom')", who=(3,)), mpi=mpi, timeout_s=40, env=environment)
    check_end(result, 1, mpi)
    assert done(result) == sees(result, 3, "failed with exit code 1: ValueError: boom") == {0, 1, 2}, result.text


# ---- a worker that dies

LETS_LIVE = {"mpich": [BIN["mpich"] / "mpirun", "-disable-auto-cleanup"], "openmpi": ULFM}
KILL = "os.kill(os.getpid(), 9)"


def survive(mpi, code, mark, ranks=3):
    command = [*LETS_LIVE[mpi], "-np", ranks, BIN[mpi] / "python", "-c", code]
    return run(command, timeout_s=40, env=GO_ON | mark)


@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize("fails", [KILL, pytest.param("os.kill(os.getpid(), 11)", marks=full)])
def test_under_a_plain_mpirun_a_death_ends_all_with_one_line(mpi, fails, mark):
    result = mpirun(3, "-c", program(fails, more_s=20), mpi=mpi, timeout_s=40, env=GO_ON | mark)
    assert result.code != 0, result.text
    lines = re.findall(r"^allred: (rank \d .*was killed by signal.*)$", result.err, re.M)
    assert len(lines) == 1, result.text
    assert lines[0].startswith("rank 2 (worker 1) on "), result.text
    assert not done(result), result.text


def test_survivors_go_on_and_the_job_ends_with_the_code_of_the_death(mark):
    result = survive("openmpi", program(KILL, more_s=2.0), mark)
    assert done(result) == sees(result, 2, "was killed by signal 9 (SIGKILL)") == {0, 1}, result.text
    assert len(re.findall(r"^allred: rank 2 \(worker 1\) on \S+ was killed by signal 9", result.err, re.M)) == 1
    assert result.err.count("allred: the other ranks continue without rank 2 (worker 1)") == 1, result.text
    assert result.code == 137, result.text


@full  # by default under a plain mpirun, above
@pytest.mark.parametrize("ranks", [3, 4])
def test_mpich_ends_the_survivors_and_the_line_is_about_the_first_death(ranks, mark):
    """Its launcher kills them within a second or two, also of programs without allred [ran]."""
    result = survive("mpich", program(KILL, more_s=2.0), mark, ranks)
    assert result.code != 0, result.text
    lines = re.findall(r"^allred: (rank \d .*was killed by signal.*)$", result.err, re.M)
    assert len(lines) == 1, result.text
    assert lines[0].startswith("rank 2 (worker 1) on "), result.text


# ---- while the others have ended already


@pytest.mark.parametrize("mpi", MPIS)
def test_one_that_fails_while_the_others_are_in_mpi_finalize(mpi, mark):
    late = program("time.sleep(3); raise ValueError('boom')", more_s=0, enough=0)
    result = mpirun(3, "-c", late, mpi=mpi, timeout_s=40, env=GO_ON | mark)
    check_end(result, 1, mpi)
    assert done(result) == {0, 1}, result.text
    assert result.err.count("ValueError: boom") >= 1, result.text


@full
def test_one_that_dies_while_the_others_are_in_mpi_finalize(mark):
    """Which with ULFM returns all the same: the line is there, but mpirun's exit code is 0 [ran]."""
    result = survive("openmpi", program(f"time.sleep(3); {KILL}", more_s=0, enough=0), mark)
    assert done(result) == {0, 1}, result.text
    assert "allred: rank 2 (worker 1) on " in result.err, result.text


# ---- while a rank lingers

SLEEPS = "\n    time.sleep(25)"


@pytest.mark.parametrize("mpi", MPICH_BY_DEFAULT)
@pytest.mark.parametrize("fails", ["raise ValueError('boom')", pytest.param("sys.exit(1)", marks=full)])
@pytest.mark.parametrize(
    ("nodes", "which"),
    [
        pytest.param("3", 0, marks=full),
        pytest.param("2,2", 0, marks=full),
        pytest.param("2,2", 1, marks=full),
        pytest.param("2,1,1", 0, marks=full),
        ("2,1,1", 1),
        pytest.param("2,1,1", 2, marks=full),
    ],
)
def test_a_watcher_that_is_killed(mpi, fails, nodes, which, mark, tmp_path):
    """Nobody could tell the rank that lingers any more when the others have ended; so it ends the job, whichever
    watcher it is."""
    ready = tmp_path / "ready"

    def kill():
        deadline = time.monotonic() + 20
        while not ready.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(sorted(processes(mark, "allred.watch.process"))[which], signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    ranks = sum(map(int, nodes.split(",")))
    code = program(fails, who=(ranks - 1,), after=f"\n    if rank == 0: open({str(ready)!r}, 'w').close(){SLEEPS}")
    environment = GO_ON | mark | {"ALLRED_PRETEND_NODES": nodes}
    result = mpirun(ranks, "-c", code, mpi=mpi, timeout_s=40, env=environment)
    thread.join()
    assert result.code == 1, result.text
    assert not done(result), result.text
    assert result.err.count("\nValueError: boom") == ("boom" in fails), result.text


@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize("fails", ["raise ValueError('boom')", pytest.param("sys.exit(1)", marks=full)])
def test_a_launcher_that_is_ended_takes_it_along(mpi, fails, mark):
    ends = (
        "from allred.watch.process_state import launcher\n"
        "    if rank == 0: os.kill(launcher(os.getpid())[-1], signal.SIGTERM)"
    )
    result = mpirun(3, "-c", program(fails, after=ends + SLEEPS), mpi=mpi, timeout_s=40, env=GO_ON | mark)
    assert result.code != 0, result.text
    assert not done(result), result.text
