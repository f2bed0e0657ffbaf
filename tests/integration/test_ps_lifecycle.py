"""Mode ps from the first rank that ends to the last: who may leave when, what a failure does, what is left behind."""

import re

import pytest
from harness import BIN, mpirun, run

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


def job(here, body, workers=3, servers=1, apart=False, elements=200_000, make=MAKE, before="", mpi="mpich", **settings):
    """Run a script on so many ranks. apart: all goes by MPI. `mpirun`: other words to start it by."""
    options = {key: settings.pop(key) for key in ("timeout_s", "mpirun") if key in settings}
    env = {"ALLRED_MODE": "ps", "ALLRED_NUM_PS": str(servers), "ALLRED_BANNER": "0"}
    env |= {f"ALLRED_{key.upper()}": str(value) for key, value in settings.items()}
    if apart:
        env["ALLRED_PRETEND_NODES"] = ",".join("1" * (workers + servers))
    script = HEAD.format(before=before, elements=elements) + make + body
    options.setdefault("timeout_s", 40)
    if "mpirun" in options:
        command = [*options.pop("mpirun"), "-np", workers + servers, BIN[mpi] / "python", "-c", script, here]
        return run(command, env=env, **options)
    return mpirun(workers + servers, "-c", script, here, mpi=mpi, env=env, **options)


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
