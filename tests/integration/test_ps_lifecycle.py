"""Mode ps from the first rank that ends to the last: who may leave when, what a failure does, what is left behind."""

import os
import pathlib
import re

import pytest
from harness import BIN, mpirun, run

from allred import checkpoint

MPIS = ["mpich", "openmpi"]
POLICIES = {
    "async": {"consistency": "async"},
    "bounded": {"consistency": "bounded", "staleness": 1},
    "sync": {"consistency": "sync"},
    "backup": {"consistency": "sync", "replicas_to_aggregate": 2},
}
ULFM = [BIN["openmpi"] / "mpirun", "--with-ft", "ulfm"]

# Each rank leaves its process's number in a file of the directory argv[1], named by its world rank.
HEAD = """
import os, pathlib, signal, sys, threading, time
{before}
import numpy as np
import allred
allred.init()
here = pathlib.Path(sys.argv[1])
me, workers = allred.rank(), allred.size()
(here / f"writing-{{allred.world_rank()}}").write_text(str(os.getpid()))
(here / f"writing-{{allred.world_rank()}}").rename(here / f"pid-{{allred.world_rank()}}")

def pid(world_rank):
    return int((here / f"pid-{{world_rank}}").read_text())

params = {{"w": np.zeros({elements}), "b": np.zeros(3, np.float32)}}
ones = {{"w": np.ones({elements}), "b": np.ones(3, np.float32)}}
"""
MAKE = """
opt = allred.distributed(allred.optim.SGD(lr=1.0))
opt.broadcast(params)

def train(steps, pause_s=0.0):
    for _ in range(steps):
        time.sleep(pause_s)
        opt.step(params, ones)

def done(*words):
    print("done", me, *words, flush=True)
"""


def job(
    here,
    body,
    workers=3,
    servers=1,
    apart=False,
    elements=200_000,
    make=MAKE,
    before="",
    mpi="mpich",
    words=(),
    **settings,
):
    """Run a script on so many ranks. apart: all goes by MPI. `mpirun`: other words to start it by."""
    options = {key: settings.pop(key) for key in ("mpirun",) if key in settings}
    env = {"ALLRED_MODE": "ps", "ALLRED_NUM_PS": str(servers or 1), "ALLRED_BANNER": "0"}
    env |= {f"ALLRED_{key.upper()}": str(value) for key, value in settings.items()}
    if apart:
        env["ALLRED_PRETEND_NODES"] = ",".join("1" * (workers + servers))
    script = HEAD.format(before=before, elements=elements) + make + body
    options["timeout_s"] = 40
    if "mpirun" in options:
        command = [*options.pop("mpirun"), "-np", workers + servers, BIN[mpi] / "python", "-c", script, here, *words]
        return run(command, env=env, **options)
    return mpirun(workers + servers, "-c", script, here, *words, mpi=mpi, env=env, **options)


def check_end(result, code, mpi="mpich"):
    """Exit code, and nothing left. prterun crashes now and then where a rank aborts while another finalizes [ran]."""
    assert result.code == code or (mpi == "openmpi" and result.code == -11 and code), result.text
    assert not result.left, result.text


def done(result):
    return {int(who) for who in re.findall(r"^done (\d)", result.out, re.M)}


def check_failure(result, code, words, mpi="mpich", tracebacks=1):
    """It ended by one failure, which is told once, after everything else."""
    check_end(result, code, mpi)
    assert result.err.count("Traceback (most recent call last)") == tracebacks, result.text
    assert result.err.count(words) >= 1, result.text
    told = result.err.rindex("Traceback (most recent call last)") if tracebacks else 0
    after = [line for line in result.err[told:].splitlines() if line.startswith("allred: ")]
    assert len(after) <= 1 or not tracebacks, result.text


# ---- a good end


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("apart", [False, True], ids=["shm", "mpi"])
@pytest.mark.parametrize("policy", ["async", "bounded", "sync"])
def test_a_worker_that_ends_early_gives_back_its_share(policy, apart, servers, tmp_path):
    body = "train(4 + 4 * me)\ndone()"
    result = job(tmp_path, body, 3, servers, apart, **POLICIES[policy])
    check_end(result, 0)
    assert done(result) == {0, 1, 2}, result.text
    assert not result.err, result.text


@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize("policy", POLICIES)
def test_also_with_one_worker_left_which_is_not_the_chief(policy, mpi, tmp_path):
    body = "train(3 if me < 2 else 12, 0.02)\nopt.pull(params)\ndone(params['w'][0])"
    if policy == "backup":
        body = body.replace("12", "24")  # it gives several gradients a step
    check = job(tmp_path, body, 3, 2, mpi=mpi, **POLICIES[policy])
    check_end(check, 0)
    assert done(check) == {0, 1, 2}, check.text


@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize("end", ["sys.exit(0)", "sys.exit()", "raise SystemExit"])
def test_sys_exit_is_a_good_end(end, mpi, tmp_path):
    result = job(tmp_path, f"train(3)\nif me == 1: {end}\ntrain(5)\ndone()", mpi=mpi)
    check_end(result, 0)
    assert done(result) == {0, 2}, result.text


def test_the_chief_tells_at_the_end_of_all_what_has_passed(tmp_path):
    result = job(tmp_path, "train(2 if me == 0 else 10, 0.05 * (me > 0))", banner=1)
    check_end(result, 0)
    assert "22 gradients, 22 updates" in result.err, result.text


def test_shutdown_ends_it_too(tmp_path):
    result = job(tmp_path, "train(3)\nallred.shutdown()\ndone(allred.is_initialized())", banner=1)
    check_end(result, 0)
    assert result.out.count("False") == 3, result.text
    assert "9 gradients, 9 updates" in result.err, result.text


def test_init_after_it_is_an_error(tmp_path):
    body = "train(3)\nallred.shutdown()\ntry: allred.init()\nexcept allred.AllredError as e: done(e)"
    result = job(tmp_path, body)
    check_end(result, 0)
    assert result.out.count("parameter servers have left") == 3, result.text


# ---- scripts that are not meant for mode ps


@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize("who", [0, 1])
def test_a_worker_that_never_makes_an_optimizer(who, mpi, tmp_path):
    """Without the chief's parameters nobody can start; without another's everybody can."""
    body = f"if me == {who}: sys.exit(0)\n" + MAKE.replace("opt.broadcast(params)", "") + "train(3)\ndone()"
    result = job(tmp_path, body, make="", mpi=mpi, consistency="sync")
    if who == 1:
        check_end(result, 0)
        assert done(result) == {0, 2}, result.text
    else:
        check_end(result, 1, mpi)
        assert "worker 0 has ended without giving the parameters to start from" in result.err, result.text


def test_the_server_ends_without_an_optimizer(tmp_path):
    result = job(tmp_path, "if me < workers:\n    opt = allred.distributed(allred.optim.SGD(lr=1.0))\n"
                 "    opt.broadcast(params)", make="")  # fmt: skip
    check_end(result, 1)
    assert "rank 0 (parameter server 0)" in result.err, result.text
    assert "has ended, and will never" in result.err, result.text
    assert result.seconds < 15, result.text


def test_collectives_are_not_for_servers(tmp_path):
    result = job(tmp_path, "allred.barrier()", make="")
    check_failure(result, 1, "barrier was called by a parameter server")


@pytest.mark.parametrize("form", ["call", "argument"])
def test_a_gradient_function_is_an_error(form, tmp_path):
    body = {
        "call": "@allred.distributed.gradients\ndef g(): return [np.ones(3)]\ng()",
        "argument": "allred.distributed.gradients(lambda: [np.ones(3)], op=allred.Sum)()",
    }
    result = job(tmp_path, body[form], make="")
    check_end(result, 1)
    assert "gradient function" in result.err, result.text
    assert "mode ps" in result.err, result.text
    assert "step(params, grads)" in result.err, result.text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("opt = allred.distributed([allred.optim.SGD, allred.optim.Adam][me == 1](lr=1.0))", "worker 1 has Adam"),
        ("opt = allred.distributed([allred.optim.SGD, allred.optim.Adam][me == workers](lr=1.0))", "the server has Ad"),
        ("opt = allred.distributed(allred.optim.SGD(lr=1.0), placement=lambda t: me % 2)", "worker 1 places the par"),
        ("opt = allred.distributed(allred.optim.SGD(lr=1.0), use_locking=me != 1)", "worker 1 has SGD"),
        ("opt = allred.distributed(allred.optim.SGD(lr=1.0), consistency=allred.ps.Bounded(me))", "Bounded"),
        ("opt = allred.distributed(allred.optim.SGD(lr=1.0))\nparams['w'] = params['w'][me:]", "parameters differ"),
    ],
    ids=["worker's optimizer", "server's optimizer", "placement", "locking", "policy", "parameters"],
)
def test_ranks_that_differ(change, words, tmp_path):
    result = job(tmp_path, f"{change}\nopt.broadcast(params)", 2, 2, make="")
    check_end(result, 1)
    assert words in result.err, result.text
    assert "MismatchError" in result.err, result.text


def test_steps_before_broadcast_from_different_values(tmp_path):
    body = "params['w'] += me\nopt = allred.distributed(allred.optim.SGD(lr=1.0))\nopt.step(params, ones)"
    result = job(tmp_path, body, make="")
    check_end(result, 1)
    assert "DriftError" in result.err, result.text
    assert "call opt.broadcast(params) before the first step" in result.err, result.text


def test_two_optimizers(tmp_path):
    body = "two = allred.distributed(allred.optim.SGD(lr=1.0))\ntwo.broadcast({'v': np.zeros(3)})"
    result = job(tmp_path, body)
    check_end(result, 1)
    assert "this program trains another optimizer with the parameter servers already" in result.err, result.text


@pytest.mark.parametrize("mpi", MPIS)
def test_too_few_ranks(mpi, tmp_path):
    result = job(tmp_path, "", 1, 2, num_ps=3, make="", mpi=mpi)
    assert result.code == 1, result.text
    assert "mode ps with 3 parameter servers and no worker: 3 ranks in all; start at least 4" in result.err


# ---- a worker that fails

FAILS = {
    "raises": ("raise ValueError('boom')", 1, "failed with exit code 1: ValueError: boom"),
    "exits": ("sys.exit(3)", 3, "failed with exit code 3: sys.exit(3)"),
    "interrupted": ("threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start(); time.sleep(9)", 130,
                    "failed with exit code 130: KeyboardInterrupt"),
}  # fmt: skip


@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize("fails", FAILS)
def test_it_ends_the_job(fails, mpi, tmp_path):
    action, code, _ = FAILS[fails]
    body = f"train(3)\nif me == 1:\n    {action}\ntrain(10_000)"
    result = job(tmp_path, body, 3, 2, mpi=mpi, consistency="sync")
    check_failure(result, code, "; ending the job", mpi, tracebacks=int(fails != "exits"))
    assert result.seconds < 15, result.text


@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("who", [0, 2])
def test_the_others_go_on(who, policy, mpi, tmp_path):
    body = f"train(3)\nif me == {who}: raise ValueError('boom')\ntrain(20, 0.03)\ndone()"
    result = job(tmp_path, body, 3, 2, mpi=mpi, worker_failure="go_on", **POLICIES[policy])
    check_end(result, 1, mpi)
    assert done(result) == {0, 1, 2} - {who}, result.text
    assert f"rank {who + 2} (worker {who})" in result.err, result.text
    assert "ValueError: boom; the others go on" in result.err, result.text


@pytest.mark.parametrize("apart", [False, True], ids=["shm", "mpi"])
@pytest.mark.parametrize("policy", ["async", "bounded", "sync"])
def test_the_others_go_on_when_it_is_interrupted_while_it_waits_in_a_step(policy, apart, tmp_path):
    """Worker 2 is late, the others wait for it, or not."""
    body = """
train(3)
if me == 1: threading.Timer(0.7, os.kill, (os.getpid(), signal.SIGINT)).start()
if me == 2: time.sleep(1.5)
train(40, 0.02)
done()
"""
    result = job(tmp_path, body, 3, 2, apart, worker_failure="go_on", **POLICIES[policy])
    check_end(result, 130)
    assert done(result) == {0, 2}, result.text


SLOW = """
class Slow:  # takes its time for each step, so what comes meanwhile is stuck in the middle
    def __init__(self): self.count = 0
    def step(self, params, grads):
        self.count += 1
        time.sleep(0.6 if self.count > 2 else 0)
        params["w"] -= grads["w"]
opt = allred.distributed(Slow())
opt.broadcast(params)
def train(steps):
    for _ in range(steps): opt.step(params, ones)
def done(*words):
    print("done", me, *words, flush=True)
"""


@pytest.mark.parametrize("locking", [0, 1])
@pytest.mark.parametrize("apart", [False, True], ids=["shm", "mpi"])
def test_also_in_the_middle_of_its_gradient(apart, locking, tmp_path):
    body = "if me == 1: threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGINT)).start()\ntrain(8)\ndone()"
    result = job(tmp_path, body, 3, 1, apart, 2_000_000, SLOW, worker_failure="go_on", use_locking=locking)
    check_end(result, 130)
    assert done(result) == {0, 2}, result.text


@pytest.mark.parametrize("setting", ["end", "go_on"])
@pytest.mark.parametrize("policy", ["async", "sync"])
def test_all_workers_raise(policy, setting, tmp_path):
    result = job(tmp_path, "train(3)\nraise ValueError('boom')", 3, 2, worker_failure=setting, **POLICIES[policy])
    check_end(result, 1)
    assert "ValueError: boom" in result.err, result.text
    assert result.seconds < 15, result.text


def test_a_step_after_one_that_was_interrupted_is_an_error(tmp_path):
    body = """
train(3)
try:
    if me == 1:
        threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGINT)).start()
    if me == 2:
        time.sleep(1)
    train(40, 0.01)
except KeyboardInterrupt:
    train(1)
"""
    result = job(tmp_path, body, consistency="sync")
    check_end(result, 1)
    assert "was interrupted" in result.err, result.text


@pytest.mark.parametrize("mpi", MPIS)
def test_a_worker_is_killed(mpi, tmp_path):
    body = "train(3)\nif me == 1: os.kill(os.getpid(), signal.SIGKILL)\ntrain(100_000)"
    result = job(tmp_path, body, 3, 2, mpi=mpi, consistency="sync")
    assert result.code != 0, result.text
    assert "rank 3 (worker 1)" in result.err, result.text
    assert "was killed by signal 9 (SIGKILL)" in result.err, result.text
    assert not result.left, result.text


@pytest.mark.parametrize("policy", POLICIES)
def test_the_others_go_on_where_the_launcher_lets_them(policy, tmp_path):
    body = "train(3)\nif me == 1: os.kill(os.getpid(), signal.SIGKILL)\ntrain(20)\ndone()"
    result = job(tmp_path, body, 3, 2, mpi="openmpi", mpirun=ULFM, worker_failure="go_on", **POLICIES[policy])
    assert done(result) == {0, 2}, result.text
    assert "rank 3 (worker 1)" in result.err, result.text
    assert not result.left, result.text


# ---- a server that fails


@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize("setting", ["end", "go_on"])
def test_an_optimizer_that_raises_on_the_server(setting, mpi, tmp_path):
    make = MAKE.replace("allred.optim.SGD(lr=1.0)", "Own()")
    own = """
class Own:
    count = 0
    def step(self, params, grads):
        self.count += 1
        if self.count == 5 and allred.world_rank() == 0: raise ZeroDivisionError("on the server")
"""
    result = job(tmp_path, "train(10_000)", 3, 2, make=own + make, mpi=mpi, worker_failure=setting, placement="greedy")
    check_failure(result, 1, "ZeroDivisionError: on the server", mpi)
    assert result.seconds < 15, result.text


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_a_gradient_that_is_not_finite(nonfinite, tmp_path):
    body = "train(3)\nif me == 1: ones['w'][7] = np.inf\ntrain(4)\ndone(opt.skipped)"
    result = job(tmp_path, body, nonfinite=nonfinite)
    if nonfinite == "skip":
        check_end(result, 0)
        assert "done 1 4" in result.out, result.text
    else:
        check_failure(result, 1, "the gradient of 'w' of worker 1 is not finite")


@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize("launcher", ["mpirun", "ulfm"])
def test_a_server_is_killed(launcher, mpi, tmp_path):
    """The line names it, and the last checkpoint."""
    if launcher == "ulfm" and mpi == "mpich":
        pytest.skip("Open MPI's")
    body = """
train(3)
if me == 0:
    opt.save(here / "saved", params)
    os.kill(pid(1), signal.SIGKILL)
train(100_000)
"""
    how = {"mpirun": ULFM} if launcher == "ulfm" else {}
    result = job(tmp_path, body, 3, 2, mpi=mpi, consistency="sync", **how)
    assert result.code != 0, result.text
    words = r"rank 1 \(parameter server 1; last checkpoint \S*saved/\S+\) on \S+ was killed by signal 9"
    assert re.search(words, result.err), result.text
    assert not result.left, result.text


# ---- a rank that stalls

STALLS = {"stall_warning_s": 1, "consistency": "sync"}


@pytest.mark.parametrize("apart", [False, True], ids=["shm", "mpi"])
@pytest.mark.parametrize("servers", [1, 2])
def test_the_table_says_who_waits_for_a_worker_that_is_stopped(servers, apart, tmp_path):
    body = f"""
train(3)
if me == 0: threading.Timer(4, os.kill, (pid({servers} + 1), signal.SIGCONT)).start()
if me == 1: os.kill(os.getpid(), signal.SIGSTOP)
train(3)
done()
"""
    result = job(tmp_path, body, 3, servers, apart, **STALLS)
    check_end(result, 0)
    assert done(result) == {0, 1, 2}, result.text
    warning = result.err.partition("has waited for")[2]
    assert "in step 3 with the parameter servers" in warning, result.text
    assert re.search(rf"rank {servers + 1} \(worker 1\) +\S+ +stopped \(kill -CONT", warning), result.text
    server = re.search(r"rank 0 \(parameter server 0\) +\S+ +in (.*)", warning)
    assert server, result.text
    assert server[1].startswith("service: workers 0,2 wait for worker 1"), result.text
    assert "waits no more in step 3" in result.err, result.text


def test_and_of_one_that_computes(tmp_path):
    body = "train(3)\nif me == 1: time.sleep(3)\ntrain(3)"
    result = job(tmp_path, body, **STALLS)
    check_end(result, 0)
    assert re.search(r"rank 2 \(worker 1\) +\S+ +in Python at <string>:\d+ \(<module>\)", result.err), result.text


@pytest.mark.parametrize("apart", [False, True], ids=["shm", "mpi"])
@pytest.mark.parametrize("servers", [1, 2])
def test_and_of_a_server(servers, apart, tmp_path):
    body = f"""
train(3)
if me == 0:
    threading.Timer(4, os.kill, (pid({servers - 1}), signal.SIGCONT)).start()
    os.kill(pid({servers - 1}), signal.SIGSTOP)
train(3)
done()
"""
    result = job(tmp_path, body, 2, servers, apart, **STALLS)
    check_end(result, 0)
    assert done(result) == {0, 1}, result.text
    assert "with the parameter servers" in result.err, result.text
    stopped = rf"rank {servers - 1} \(parameter server {servers - 1}\) +\S+ +stopped \(kill -CONT"
    assert re.search(stopped, result.err), result.text


def test_stopped_in_the_middle_of_its_gradient(tmp_path):
    """The server waits for it, in the middle of a request, with the others behind it."""
    body = """
if me == 1:
    threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGSTOP)).start()
if me == 0: threading.Timer(6.5, os.kill, (pid(2), signal.SIGCONT)).start()
train(6)
done()
"""
    result = job(tmp_path, body, 3, 1, False, 2_000_000, SLOW, stall_warning_s=1)
    check_end(result, 0)
    assert done(result) == {0, 1, 2}, result.text
    assert re.search(r"rank 2 \(worker 1\) +\S+ +stopped", result.err), result.text


@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize("who", ["worker", "server"])
def test_the_time_limit(who, mpi, tmp_path):
    number = 2 if who == "worker" else 0
    body = f"train(3)\nif me == 0: os.kill(pid({number}), signal.SIGSTOP)\ntrain(10_000)"
    result = job(tmp_path, body, 3, 1, mpi=mpi, timeout_s=3, consistency="sync")
    assert result.code != 0, result.text
    assert "CollectiveTimeout" in result.err, result.text
    assert "with the parameter servers: not complete after 3 s" in result.err, result.text
    assert re.search(rf"rank {number} \({'worker 1' if number else 'parameter server 0'}\) +\S+ +stopped", result.err)
    assert not result.left, result.text


# ---- SIGTERM

DRAIN = """
try:
    train(100_000, 0.002)
except allred.ShutdownError as error:
    print("shutdown", me, error, flush=True)
    sys.exit(0)
"""


def check_drained(result, tmp_path, workers, mpi="mpich", code=0):
    check_end(result, code, mpi)
    said = re.findall(r"^shutdown (\d) .* was asked to end \(SIGTERM\); the checkpoint is (\S+)$", result.out, re.M)
    assert {int(worker) for worker, _ in said} == set(range(workers)), result.text
    [path] = {path for _, path in said}
    found = checkpoint.read(path)
    assert set(found.params) == {"w", "b"}, result.text
    assert [p.name for p in (tmp_path / "drained").iterdir()] == [pathlib.Path(path).name]
    return found


@pytest.mark.parametrize(
    ("who", "policy", "apart"),
    [
        (0, "async", False), (0, "bounded", True), (0, "sync", False), (0, "backup", True), (1, "async", True),
        (1, "sync", False), (1, "backup", False), (2, "bounded", False), (2, "sync", True), (4, "backup", False),
    ],
)  # fmt: skip
def test_one_rank_is_asked_to_end(who, policy, apart, tmp_path):
    """Two servers, three workers; 0 and 1 are servers."""
    body = f"train(3)\nif me == 0: threading.Timer(0.3, os.kill, (pid({who}), signal.SIGTERM)).start()\n" + DRAIN
    result = job(tmp_path, body, 3, 2, apart, checkpoint_dir=tmp_path / "drained", **POLICIES[policy])
    found = check_drained(result, tmp_path, 3)
    if policy == "sync":  # a step is complete or not at all
        assert len(set(found.params["w"])) == 1, found.params["w"]


@pytest.mark.parametrize("mpi", MPIS)
def test_all_ranks_are_asked_at_once(mpi, tmp_path):
    body = "train(3)\nif me == 0: threading.Timer(0.3, lambda: [os.kill(pid(r), 15) for r in range(5)]).start()" + DRAIN
    result = job(tmp_path, body, 3, 2, mpi=mpi, checkpoint_dir=tmp_path / "drained", consistency="sync")
    check_drained(result, tmp_path, 3, mpi)


def test_those_that_wait_for_a_worker_which_computes_do_not_wait_for_it_any_more(tmp_path):
    body = "train(3)\nif me == 1: os.kill(pid(0), signal.SIGTERM); time.sleep(4)\n" + DRAIN
    body = body.replace('print("shutdown"', 'print(round(time.monotonic()), "\\nshutdown"')
    result = job(tmp_path, body, 3, 1, checkpoint_dir=tmp_path / "drained", consistency="sync")
    times = [int(t) for t in re.findall(r"^(\d+) $", result.out, re.M)]
    assert max(times) - min(times) >= 3, result.text


def test_nobody_catches_it(tmp_path):
    """It is an exception like others: the job fails. The checkpoint is complete before."""
    body = "if me == 0: os.kill(pid(0), signal.SIGTERM)\ntrain(100_000)"
    result = job(tmp_path, body, 3, 2, elements=5_000_000, checkpoint_dir=tmp_path / "drained")
    check_end(result, 1)
    assert (
        "allred.errors.ShutdownError: opt.step(): the job was asked to end (SIGTERM); the checkpoint is" in result.err
    )
    assert result.err.count("Traceback (most recent call last)") == 1, result.text
    assert checkpoint.newest(tmp_path / "drained") is not None, result.text
    assert len(list((tmp_path / "drained").iterdir())) == 1


def test_without_a_directory_nothing_is_saved(tmp_path):
    result = job(tmp_path, "if me == 0: os.kill(pid(0), signal.SIGTERM)\n" + DRAIN)
    check_end(result, 0)
    assert result.out.count("no checkpoint_dir is set, so nothing was saved") == 3, result.text


def test_a_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    body = "if me == 0: os.kill(pid(0), signal.SIGTERM)\n" + DRAIN
    result = job(tmp_path, body, checkpoint_dir=tmp_path / "file" / "below")
    check_end(result, 0)
    assert result.out.count("no checkpoint was written: ") == 3, result.text


@pytest.mark.parametrize("mpi", MPIS)
def test_mpirun_is_asked_to_end(mpi, tmp_path):
    """It passes the signal on, and kills after a while what has not ended."""
    launcher = "int(open(f'/proc/{os.getppid()}/stat').read().rpartition(')')[2].split()[1])" if mpi == "mpich" else ""
    body = f"train(3)\nif me == 0: os.kill({launcher or 'os.getppid()'}, signal.SIGTERM)\n" + DRAIN
    result = job(tmp_path, body, 3, 2, mpi=mpi, checkpoint_dir=tmp_path / "drained", consistency="sync")
    assert not result.left, result.text
    assert checkpoint.newest(tmp_path / "drained") is not None, result.text


# ---- forks


def test_a_fork_is_no_worker(tmp_path):
    """It may not call the servers, it ends by SIGTERM, and its end is not the worker's."""
    body = """
train(3)
if me == 1:
    child = os.fork()
    if not child:
        try: train(1)
        except allred.AllredError as e: print("child:", e, flush=True)
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    child = os.fork()
    if not child:
        time.sleep(30)
        os._exit(0)
    time.sleep(0.3)
    os.kill(child, signal.SIGTERM)
    print("child ended by", os.waitpid(child, 0)[1], flush=True)
train(3)
opt.pull(params)
allred.barrier()
opt.pull(params)
done(params["w"][0])
"""
    result = job(tmp_path, body, consistency="sync")
    check_end(result, 0)
    assert result.out.count("-6.0") == 3, result.text
    assert "child: this process was forked from a rank after allred.init()" in result.out, result.text
    assert "child ended by 15" in result.out, result.text


# ---- what is left behind


@pytest.mark.parametrize("end", ["", "raise ValueError('boom')", "os.kill(pid(0), signal.SIGKILL); time.sleep(9)"])
def test_nothing_is_left_in_shared_memory(end, tmp_path):
    before = set(os.listdir("/dev/shm"))
    result = job(tmp_path, f"train(3)\nif me == 1:\n    {end or 'pass'}\ntrain(3)", 3, 2)
    assert (result.code == 0) == (not end), result.text
    left = {name for name in set(os.listdir("/dev/shm")) - before if "allred" in name or "psm" in name}
    assert not left
    assert not result.left, result.text


def test_without_the_extension(tmp_path):
    hide = "sys.modules['allred.native._kernels'] = None"
    result = job(tmp_path, "train(5)\nopt.pull(params)\ndone()", before=hide, consistency="sync")
    check_end(result, 0)
    assert done(result) == {0, 1, 2}, result.text


def test_with_the_extension_on_some_ranks_only(tmp_path):
    hide = "if os.environ.get('PMI_RANK') in '02': sys.modules['allred.native._kernels'] = None"
    result = job(tmp_path, "train(5)\ndone()", before=hide, consistency="sync")
    check_end(result, 0)
    assert done(result) == {0, 1, 2}, result.text


@pytest.mark.parametrize("policy", POLICIES)
def test_more_ranks_than_cores(policy, tmp_path):
    result = job(tmp_path, "train(5 + me)\ndone()", 6, 2, **POLICIES[policy])
    check_end(result, 0)
    assert done(result) == set(range(6)), result.text


# ---- checkpoints

STATE = """
def digests(opt):
    state = opt.state_dict()
    flat = {str(key): value for key, value in state.items()}
    return allred.digest(params), allred.digest(flat)
def optimizer():
    if sys.argv[2] == "adam": return allred.optim.AdamW(lr=0.01)
    if sys.argv[2] == "momentum": return allred.optim.SGD(lr=0.01, momentum=0.9)
    return Own()
class Own:
    def __init__(self): self.sums = {}
    def step(self, params, grads):
        for name, p in params.items():
            s = self.sums.setdefault(name, np.zeros_like(p))
            s += grads[name] ** 2
            p -= 0.1 * grads[name] / (1 + np.sqrt(s))
    def state_dict(self): return {k: v.copy() for k, v in self.sums.items()}
    def load_state_dict(self, state): self.sums = {k: v.copy() for k, v in state.items()}
params["w"][:] = np.random.default_rng(0).normal(size=params["w"].shape)
opt = allred.distributed(optimizer())
step = opt.restore(here / "saved", params)
if me == 0: print("restored", step, *digests(opt), flush=True)
allred.barrier()
rng = np.random.default_rng(step or 0)
for _ in range(3):
    opt.step(params, {name: rng.normal(size=p.shape).astype(p.dtype) for name, p in params.items()})
opt.pull(params)
allred.barrier()
if me == 0: print("saved", *digests(opt), opt.save(here / "saved", params), flush=True)
allred.barrier()
"""


def restored_and_saved(result):
    check_end(result, 0)
    [before] = re.findall(r"^restored (\S+) (\S+ \S+)$", result.out, re.M)
    [after] = re.findall(r"^saved (\S+ \S+) \S+$", result.out, re.M)
    return before, after


@pytest.mark.parametrize("optimizer", ["adam", "momentum", "own"])
def test_parameters_and_state_pass_between_any_number_of_servers_and_mode_sync(optimizer, tmp_path):
    ways = [(1, 2), (3, 1), (0, 2), (2, 1), (0, 1)] if optimizer != "own" else [(1, 2), (0, 2), (1, 1)]
    saved, steps, alone = None, None, None
    for servers, workers in ways:  # 0 servers: mode sync
        settings = {"consistency": "sync"} if servers else {"mode": "sync"}
        result = job(tmp_path, "", workers, servers, make=STATE, words=[optimizer], elements=70_000, **settings)
        (step, before), after = restored_and_saved(result)
        if saved is not None:
            assert before == saved, (servers, result.text)
            assert int(step) == steps, (servers, result.text)
        saved, steps = after, (steps or 0) + 3
        alone = alone or saved
    assert saved != alone
