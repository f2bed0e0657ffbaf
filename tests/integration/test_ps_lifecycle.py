"""Mode ps from the first rank that ends to the last: who may leave when, whom it is not for, what is left behind."""

import os
import re

import pytest
from harness import mpirun
from ps_jobs import MAKE, MPIS, POLICIES, check_end, check_failure, done, job

FULL = pytest.mark.full  # runs with --full only

# ---- a good end


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("apart", [False, True], ids=["shared", "messages"])
@pytest.mark.parametrize("policy", ["async", pytest.param("bounded", marks=FULL), "sync"])
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
def test_sys_exit_is_a_good_end(mpi, tmp_path):
    ends = "if me == 1: sys.exit(0)\nif me == 2: sys.exit()\nif me == 3: raise SystemExit\n"
    result = job(tmp_path, f"train(3)\n{ends}train(5)\ndone()", 4, mpi=mpi)
    check_end(result, 0)
    assert done(result) == {0}, result.text


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
    result = job(tmp_path, f"{change}\nopt.broadcast(params)", 2, 1 + ("placement" in change), make="")
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


@pytest.mark.parametrize(
    "policy", ["sync", *(pytest.param(name, marks=FULL) for name in ("async", "bounded", "backup"))]
)
def test_more_ranks_than_cores(policy, tmp_path):
    result = job(tmp_path, "train(5 + me)\ndone()", 6, 2, **POLICIES[policy])
    check_end(result, 0)
    assert done(result) == set(range(6)), result.text


@pytest.mark.parametrize("mpi", MPIS)
def test_without_a_watcher(mpi, tmp_path):
    result = job(tmp_path, "train(5 + me)\ndone()", 3, 2, mpi=mpi, watcher=0)
    check_end(result, 0)
    assert done(result) == {0, 1, 2}, result.text
    result = job(tmp_path, "train(5)\nif me == 1: raise ValueError('boom')\ntrain(10_000)", 3, 2, mpi=mpi, watcher=0)
    check_end(result, 1, mpi)
    assert "ValueError: boom" in result.err, result.text


# ---- checkpoints

STATE = """
import pathlib, sys
import numpy as np
import allred

class Own:
    def __init__(self): self.sums = {}
    def step(self, params, grads):
        for name, p in params.items():
            s = self.sums.setdefault(name, np.zeros_like(p))
            s += grads[name] ** 2
            p -= 0.1 * grads[name] / (1 + np.sqrt(s))
    def state_dict(self): return {k: v.copy() for k, v in self.sums.items()}
    def load_state_dict(self, state): self.sums = {k: v.copy() for k, v in state.items()}

def optimizer(name):
    if name == "adam": return allred.optim.AdamW(lr=0.01)
    if name == "momentum": return allred.optim.SGD(lr=0.01, momentum=0.9)
    return Own()

def digests(opt, params):
    return allred.digest(params), allred.digest({str(key): value for key, value in opt.state_dict().items()})

def train(name, saved):
    params = {"w": np.random.default_rng(0).normal(size=70_000), "b": np.zeros(3, np.float32)}
    opt = allred.distributed(optimizer(name))
    step = opt.restore(saved, params)
    if allred.rank() == 0: print("restored", name, step, *digests(opt, params), flush=True)
    allred.barrier()
    rng = np.random.default_rng(step or 0)
    for _ in range(3):
        opt.step(params, {name: rng.normal(size=p.shape).astype(p.dtype) for name, p in params.items()})
    opt.pull(params)
    allred.barrier()
    if allred.rank() == 0:
        print("saved", name, *digests(opt, params), flush=True)
        opt.save(saved, params)
    allred.barrier()

here, ranks, *jobs = sys.argv[1:]
for job in jobs:
    name, servers = job.split(":")
    if int(servers):
        server = allred.Server({"ps": int(servers), "worker": int(ranks) - int(servers)})
    else:
        allred.init()  # mode sync
    if allred.job_name() == "ps":
        server.join()
    else:
        train(name, pathlib.Path(here, name))
    allred.shutdown()
"""


@pytest.mark.parametrize("mpi", MPIS)
def test_parameters_and_state_pass_between_any_number_of_servers_and_mode_sync(mpi, tmp_path):
    """Four ranks, of which so many are servers; 0: mode sync. The state of a user's own optimizer is on one server."""
    ways = {"adam": (1, 3, 0, 2, 0), "momentum": (1, 3, 0, 2, 0), "own": (1, 0, 1)}
    jobs = [f"{name}:{servers}" for name, numbers in ways.items() for servers in numbers]
    result = mpirun(
        4,
        "-c",
        STATE,
        tmp_path,
        4,
        *jobs,
        mpi=mpi,
        env={"ALLRED_BANNER": "0", "ALLRED_WATCHER": "0", "ALLRED_CONSISTENCY": "sync"},
    )
    check_end(result, 0)
    for name, numbers in ways.items():
        restored = re.findall(rf"^restored {name} (\S+) (\S+ \S+)$", result.out, re.M)
        saved = re.findall(rf"^saved {name} (\S+ \S+)$", result.out, re.M)
        assert [step for step, _ in restored] == ["None", *(str(3 * n) for n in range(1, len(numbers)))], result.text
        assert [digests for _, digests in restored[1:]] == saved[:-1], (name, result.text)
        assert len(set(saved)) == len(numbers), (name, result.text)


SLOW_TO_LEAVE = """
import time
import allred
from allred.watch import start

stop = start.stop
server = allred.Server({"ps": 1, "worker": 2})
if allred.job_name() == "ps":
    server.join()
else:  # the server on the chief's node leaves first
    start.stop = lambda: (time.sleep(0.5), stop())
allred.shutdown()
"""


def test_ranks_that_leave_after_the_chiefs_node_print_nothing():
    """Regression: the chief's watcher ended before the watchers of other nodes, which reported that they had lost it."""
    result = mpirun(3, "-c", SLOW_TO_LEAVE, env={"ALLRED_BANNER": "0", "ALLRED_PRETEND_NODES": "1,1,1"})
    check_end(result, 0)
    assert result.err == "", result.text
