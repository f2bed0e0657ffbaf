"""Mode ps when ranks fail, die or stall: who goes on, how the job ends, and what is said."""

import os
import re

import pytest
from failures import FAILURES
from harness import MPICH_BY_DEFAULT, MPIS, ULFM, full
from ps_jobs import CUT_SHORT, MAKE, POLICIES, check_end, check_failure, done, job


def shared_memory():
    """Return the files of allred in shared memory."""
    return {name for name in os.listdir("/dev/shm") if "allred" in name or "psm" in name}


# ---- a worker that fails


@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize(
    "fails", ["raise", *(pytest.param(failure, marks=full) for failure in ("sys.exit", "interrupt"))]
)
def test_it_ends_the_job_and_leaves_nothing_in_shared_memory(fails, mpi, tmp_path):
    action, code, _ = FAILURES[fails]
    before = shared_memory()
    body = f"train(3)\nif me == 1:\n    {action}\ntrain(10_000)"
    result = job(tmp_path, body, 2, 1, mpi=mpi, consistency="sync")
    check_failure(result, code, "; ending the job", mpi, tracebacks=int(fails != "sys.exit"))
    assert not shared_memory() - before


@pytest.mark.parametrize("mpi", MPICH_BY_DEFAULT)
@pytest.mark.parametrize(
    ("policy", "who", "apart"),
    [
        ("sync", 0, True),
        pytest.param("backup", 1, False, marks=full),
        pytest.param("async", 0, False, marks=full),
        pytest.param("async", 1, True, marks=full),
        pytest.param("bounded", 0, False, marks=full),
        pytest.param("bounded", 1, True, marks=full),
    ],
)
def test_the_others_go_on(policy, who, apart, mpi, tmp_path):
    body = f"train(3)\nif me == {who}: raise ValueError('boom')\ntrain(20, 0.03)\ndone()"
    result = job(tmp_path, body, 3, 2, apart, mpi=mpi, worker_failure="go_on", **POLICIES[policy])
    check_end(result, 1, mpi)
    assert done(result) == {0, 1, 2} - {who}, result.text
    assert f"rank {who + 2} (worker {who})" in result.err, result.text
    assert "ValueError: boom; the other ranks continue" in result.err, result.text


@pytest.mark.parametrize("apart", [False, pytest.param(True, marks=full)], ids=["shared", "messages"])
@pytest.mark.parametrize("policy", ["sync", *(pytest.param(name, marks=full) for name in ("async", "bounded"))])
def test_the_others_go_on_when_it_is_interrupted_while_it_waits_in_a_step(policy, apart, tmp_path):
    """Worker 2 is late, the others wait for it."""
    body = """
train(3)
if me == 1: threading.Timer(0.7, os.kill, (os.getpid(), signal.SIGINT)).start()
if me == 2: time.sleep(1.5)
train(40, 0.02)
done()
"""
    result = job(tmp_path, body, 3, 1, apart, worker_failure="go_on", **POLICIES[policy])
    check_end(result, 130)
    assert done(result) == {0, 2}, result.text


@pytest.mark.parametrize("locking", [pytest.param(0, marks=full), 1])
@pytest.mark.parametrize("apart", [pytest.param(False, marks=full), True], ids=["shared", "messages"])
def test_the_others_go_on_when_it_is_interrupted_in_the_middle_of_its_gradient(apart, locking, tmp_path):
    body = "if me == 1: cut_short(signal.SIGINT)\nothers()\ntrain(4)\ndone()"
    make = "STOPS = False" + CUT_SHORT
    result = job(tmp_path, body, 2, 1, apart, 2_000_000, make, worker_failure="go_on", use_locking=locking)
    check_end(result, 130)
    assert done(result) == {0}, result.text


@pytest.mark.parametrize("setting", [pytest.param("end", marks=full), "go_on"])
@pytest.mark.parametrize("policy", [pytest.param("async", marks=full), "sync"])
def test_all_workers_raise(policy, setting, tmp_path):
    result = job(tmp_path, "train(3)\nraise ValueError('boom')", 2, 1, worker_failure=setting, **POLICIES[policy])
    check_end(result, 1)
    assert "ValueError: boom" in result.err, result.text


@pytest.mark.parametrize("mpi", MPICH_BY_DEFAULT)
def test_a_worker_is_killed(mpi, tmp_path):
    body = "train(3)\nif me == 1: os.kill(os.getpid(), signal.SIGKILL)\ntrain(100_000)"
    result = job(tmp_path, body, 2, 1, mpi=mpi, consistency="sync")
    assert result.code != 0, result.text
    assert "rank 2 (worker 1)" in result.err, result.text
    assert "was killed by signal 9 (SIGKILL)" in result.err, result.text
    assert not result.left, result.text


@pytest.mark.parametrize(
    "policy", ["backup", *(pytest.param(name, marks=full) for name in ("async", "bounded", "sync"))]
)
def test_the_others_go_on_where_the_launcher_lets_them(policy, tmp_path):
    body = "train(3)\nif me == 1: os.kill(os.getpid(), signal.SIGKILL)\ntrain(20)\ndone()"
    result = job(tmp_path, body, 3, 2, mpi="openmpi", mpirun=ULFM, worker_failure="go_on", **POLICIES[policy])
    assert done(result) == {0, 2}, result.text
    assert "rank 3 (worker 1)" in result.err, result.text
    assert not result.left, result.text


@pytest.mark.parametrize("apart", [False, pytest.param(True, marks=full)], ids=["shared", "messages"])
def test_after_an_interrupted_step_another_step_is_an_error_and_so_is_a_good_end(apart, tmp_path):
    """A server may still wait for the rest of the gradient."""
    body = """
try:
    others() if me == 0 else cut_short(signal.SIGINT)
    train(4)
except KeyboardInterrupt:
    try: train(1)
    except allred.AllredError as error: print("caught:", error, flush=True)
"""
    result = job(tmp_path, body, 2, 1, apart, 2_000_000, "STOPS = False" + CUT_SHORT)
    check_end(result, 1)
    assert "caught: a request to the parameter servers was interrupted" in result.out, result.text
    assert "an operation that never completed" in result.err, result.text


# ---- a server that fails


@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize("setting", [pytest.param("end", marks=full), "go_on"])
def test_an_optimizer_that_raises_on_the_server(setting, mpi, tmp_path):
    make = MAKE.replace("allred.optim.SGD(lr=1.0)", "Own()")
    own = """
class Own:
    count = 0
    def step(self, params, grads):
        self.count += 1
        if self.count == 5 and allred.world_rank() == 0: raise ZeroDivisionError("on the server")
"""
    result = job(tmp_path, "train(10_000)", 2, 2, make=own + make, mpi=mpi, worker_failure=setting, placement="greedy")
    check_failure(result, 1, "ZeroDivisionError: on the server", mpi)


@pytest.mark.parametrize(
    ("launcher", "mpi"),
    [("mpirun", "mpich"), *(pytest.param(launcher, "openmpi", marks=full) for launcher in ("ulfm", "mpirun"))],
)
def test_a_server_is_killed(launcher, mpi, tmp_path):
    """The message names it and the last checkpoint, and nothing is left in shared memory."""
    before = shared_memory()
    body = """
train(3)
if me == 0:
    opt.save(here / "saved", params)
    os.kill(pid(1), signal.SIGKILL)
train(100_000)
"""
    how = {"mpirun": ULFM} if launcher == "ulfm" else {}
    result = job(tmp_path, body, 1, 2, mpi=mpi, consistency="sync", **how)
    assert result.code != 0, result.text
    words = r"rank 1 \(parameter server 1; last checkpoint \S*saved/\S+\) on \S+ was killed by signal 9"
    assert re.search(words, result.err), result.text
    assert not result.left, result.text
    assert not shared_memory() - before


@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize("setting", [pytest.param("end", marks=full), "go_on"])
def test_a_worker_fails_when_the_chief_is_done(setting, mpi, tmp_path):
    body = (
        "train(2)\nif me == 0: sys.exit()\ntime.sleep(1)\nif me == 1: raise ValueError('boom')\ntrain(30, 0.03)\ndone()"
    )
    result = job(tmp_path, body, 3, 1, mpi=mpi, worker_failure=setting, banner=1)
    check_end(result, 1, mpi)
    assert result.err.count("ValueError: boom") == (1 if setting == "end" else 2), result.text
    assert done(result) == ({2} if setting == "go_on" else set()), result.text
    assert ("gradients, 3" in result.err) == (setting == "go_on"), result.text


@pytest.mark.parametrize("mpi", MPIS)
def test_a_server_is_killed_when_the_chief_is_done(mpi, tmp_path):
    body = "train(2)\nif me == 0: sys.exit()\ntime.sleep(1)\nif me == 1: os.kill(pid(0), 9)\ntrain(30, 0.03)"
    result = job(tmp_path, body, 2, 1, mpi=mpi)
    assert result.code != 0, result.text
    assert "rank 0 (parameter server 0)" in result.err, result.text
    assert not result.left, result.text


@pytest.mark.parametrize("mpi", MPIS)
def test_control_c(mpi, tmp_path):
    """mpirun gets it, and ends the ranks."""
    launcher = "int(open(f'/proc/{os.getppid()}/stat').read().rpartition(')')[2].split()[1])" if mpi == "mpich" else ""
    body = f"train(3)\nif me == 0: os.kill({launcher or 'os.getppid()'}, signal.SIGINT)\ntrain(100_000)"
    result = job(tmp_path, body, 2, 1, mpi=mpi, consistency="sync")
    assert result.code != 0, result.text
    assert not result.left, result.text


# ---- a rank that stalls

STALLS = {"stall_warning_s": 1, "consistency": "sync"}


@pytest.mark.parametrize("apart", [False, pytest.param(True, marks=full)], ids=["shared", "messages"])
@pytest.mark.parametrize("servers", [1, pytest.param(2, marks=full)])
def test_a_warning_says_who_waits_for_a_worker_that_is_stopped_or_computes_and_for_a_stopped_server(
    servers, apart, tmp_path
):
    """Worker 1 is stopped in step 3 and computes in step 6. The last server is stopped in step 9."""
    body = f"""
def go_on_later(world_rank):
    threading.Timer(4, os.kill, (pid(world_rank), signal.SIGCONT)).start()

train(3)
if me == 0: go_on_later({servers} + 1)
if me == 1: os.kill(os.getpid(), signal.SIGSTOP)
train(3)
if me == 1: time.sleep(3)
train(3)
if me == 0:
    time.sleep(0.5)
    go_on_later({servers} - 1)
    os.kill(pid({servers} - 1), signal.SIGSTOP)
train(3)
time.sleep(1)  # for the report that the wait has ended, before the job is over
done()
"""
    result = job(tmp_path, body, 2, servers, apart, **STALLS)
    check_end(result, 0)
    assert done(result) == {0, 1}, result.text
    warning = r"^allred: rank \d has waited for \d+ s in step (\d+) with the parameter servers\n((?:  rank.*\n)*)"
    tables = dict(reversed(re.findall(warning, result.err, re.M)))  # the first one of each step
    assert tables.keys() == {"3", "6", "9"}, result.text
    worker = rf"rank {servers + 1} \(worker 1\) +\S+"
    assert re.search(rf"{worker} +stopped \(kill -CONT", tables["3"]), result.text
    assert re.search(rf"{worker} +in Python at <string>:\d+ \(<module>\)", tables["6"]), result.text
    for step in ("3", "6"):
        server = r"rank 0 \(parameter server 0\) +\S+ +in service: worker 0 waits for worker 1"
        assert re.search(server, tables[step]), result.text
    stopped = rf"rank {servers - 1} \(parameter server {servers - 1}\) +\S+ +stopped \(kill -CONT"
    assert re.search(stopped, tables["9"]), result.text
    assert "no longer waits in step 3" in result.err, result.text


def test_stopped_in_the_middle_of_its_gradient(tmp_path):
    """The server waits for it, in the middle of a request, with the others behind it."""
    body = """
def go_on_later():
    await_file("cut short")
    time.sleep(5)
    os.kill(pid(2), signal.SIGCONT)

if me == 0: threading.Thread(target=go_on_later).start()
others() if me == 0 else cut_short(signal.SIGSTOP)
train(4)
done()
"""
    result = job(tmp_path, body, 2, 1, False, 2_000_000, "STOPS = True" + CUT_SHORT, stall_warning_s=1)
    check_end(result, 0)
    assert done(result) == {0, 1}, result.text
    assert re.search(r"rank 2 \(worker 1\) +\S+ +stopped", result.err), result.text


@pytest.mark.parametrize("mpi", MPICH_BY_DEFAULT)
@pytest.mark.parametrize("who", [pytest.param("worker", marks=full), "server"])
def test_the_time_limit(who, mpi, tmp_path):
    number = 2 if who == "worker" else 0
    # A worker stops itself, between two steps: within a request, the wait of the server would end first.
    stop = "me == 1: os.kill(os.getpid()" if who == "worker" else "me == 0: os.kill(pid(0)"
    body = f"train(3)\nif {stop}, signal.SIGSTOP)\ntrain(10_000)"
    result = job(tmp_path, body, 2, 1, mpi=mpi, timeout_s=3, consistency="sync")
    assert result.code != 0, result.text
    assert "CollectiveTimeout" in result.err, result.text
    assert "with the parameter servers: not complete after 3 s" in result.err, result.text
    assert re.search(rf"rank {number} \({'worker 1' if number else 'parameter server 0'}\) +\S+ +stopped", result.err)
    assert not result.left, result.text
