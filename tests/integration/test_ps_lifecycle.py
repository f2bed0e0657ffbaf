"""Mode ps from the first rank that ends to the last: ends of workers, programs that are not meant for it, forks."""

import os
import re

import pytest
from harness import MPICH_BY_DEFAULT, MPIS, full, mpirun
from ps_jobs import MAKE, POLICIES, Case, check_end, check_failure, done, job, run_cases

# ---- a good end


@pytest.mark.parametrize("mpi", MPICH_BY_DEFAULT)
@pytest.mark.parametrize(
    ("policy", "apart", "servers"),
    [
        ("async", False, 1),
        pytest.param("sync", True, 2, marks=full),
        pytest.param("bounded", False, 2, marks=full),
        pytest.param("async", True, 2, marks=full),
        pytest.param("sync", False, 1, marks=full),
    ],
)
def test_workers_may_end_at_different_steps_in_different_ways_and_the_chief_reports_all_steps(
    policy, apart, servers, mpi, tmp_path
):
    """The chief ends first. Nothing is left in shared memory."""
    ends = "if me == 0: sys.exit(0)\nif me == 1: sys.exit()\nif me == 2: raise SystemExit\n"
    before = set(os.listdir("/dev/shm"))
    result = job(
        tmp_path, f"train(2 + 4 * me)\ndone()\n{ends}", 4, servers, apart, mpi=mpi, banner=1, **POLICIES[policy]
    )
    check_end(result, 0)
    assert done(result) == {0, 1, 2, 3}, result.text
    updates = 14 if policy == "sync" else 32
    assert f"32 gradients, {updates} updates" in result.err, result.text
    assert all(line.startswith(("allred: ", "  ")) for line in result.err.splitlines()), result.text
    left = {name for name in set(os.listdir("/dev/shm")) - before if "allred" in name or "psm" in name}
    assert not left


ONE_IS_LEFT = """
opt = allred.distributed(allred.optim.SGD(lr=1.0))
opt.broadcast(params)
for _ in range(3 if me < 2 else 12):
    opt.step(params, ones)
    time.sleep(0.01)
opt.finish()
say("done")
"""


@pytest.mark.parametrize("mpi", MPIS)
def test_the_last_worker_trains_on_alone_with_each_policy(mpi, tmp_path):
    """It is not the chief. With policy backup it gives several gradients a step."""
    env = {
        policy: {f"ALLRED_{name.upper()}": str(value) for name, value in settings.items()}
        for policy, settings in POLICIES.items()
    }
    cases = {policy: Case(ONE_IS_LEFT, servers=2, env=env[policy]) for policy in POLICIES}
    _, said = run_cases(tmp_path, cases, 5, mpi, watcher=0)
    for policy in POLICIES:
        assert said[policy] == dict.fromkeys(range(3), "done\n"), policy


@full  # by default without a look at the numbers in test_init_and_shutdown_three_times
def test_shutdown_ends_it_too(tmp_path):
    """tests/integration/test_server.py: init after it is an error."""
    result = job(tmp_path, "train(3)\nallred.shutdown()\ndone(allred.is_initialized())", 2, banner=1)
    check_end(result, 0)
    assert result.out.count("False") == 2, result.text
    assert "6 gradients, 6 updates" in result.err, result.text


# ---- scripts that are not meant for mode ps


@pytest.mark.parametrize("mpi", MPICH_BY_DEFAULT)
@pytest.mark.parametrize("who", [0, 1])
def test_a_worker_that_never_makes_an_optimizer(who, mpi, tmp_path):
    """Without the chief's parameters nobody can start; without another's everybody can."""
    body = f"if me == {who}: sys.exit(0)\n" + MAKE.replace("opt.broadcast(params)", "") + "train(3)\ndone()"
    result = job(tmp_path, body, 2, make="", mpi=mpi, consistency="sync")
    if who == 1:
        check_end(result, 0)
        assert done(result) == {0}, result.text
    else:
        check_end(result, 1, mpi)
        assert "worker 0 ended before it sent the initial parameters" in result.err, result.text


def test_the_server_ends_without_an_optimizer(tmp_path):
    result = job(tmp_path, "if me < workers:\n    opt = allred.distributed(allred.optim.SGD(lr=1.0))\n"
                 "    opt.broadcast(params)", 1, make="")  # fmt: skip
    check_end(result, 1)
    assert "rank 0 (parameter server 0)" in result.err, result.text
    assert "has ended, and will never" in result.err, result.text


def test_collectives_are_not_for_servers(tmp_path):
    result = job(tmp_path, "allred.barrier()", 1, make="")
    check_failure(result, 1, "barrier was called by a parameter server")


@pytest.mark.parametrize("mpi", MPICH_BY_DEFAULT)
def test_too_few_ranks(mpi, tmp_path):
    result = job(tmp_path, "", 1, 1, num_ps=2, make="", mpi=mpi)
    assert result.code == 1, result.text
    assert "mode ps with 2 parameter servers and no worker: 2 ranks in all; start at least 3" in result.err


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
    result = job(tmp_path, body, 2, consistency="sync")
    check_end(result, 0)
    assert result.out.count("-6.0") == 2, result.text
    assert "child: this process was forked from a rank after allred.init()" in result.out, result.text
    assert "child ended by 15" in result.out, result.text


# ---- surroundings


@full  # by default in the next test
def test_without_the_extension(tmp_path):
    hide = "sys.modules['allred.native._kernels'] = None"
    result = job(tmp_path, "train(5)\nopt.pull(params)\ndone(params['w'][0])", 2, before=hide, consistency="sync")
    check_end(result, 0)
    assert done(result) == {0, 1}, result.text
    assert result.out.count("-5.0") == 2, result.text


def test_with_the_extension_on_some_ranks_only(tmp_path):
    hide = "if os.environ.get('PMI_RANK') in '02': sys.modules['allred.native._kernels'] = None"
    result = job(tmp_path, "train(5)\nopt.pull(params)\ndone(params['w'][0])", 2, before=hide, consistency="sync")
    check_end(result, 0)
    assert done(result) == {0, 1}, result.text
    assert result.out.count("-5.0") == 2, result.text


@pytest.mark.full
@pytest.mark.parametrize("policy", POLICIES)
def test_more_ranks_than_cores(policy, tmp_path):
    result = job(tmp_path, "train(5 + me)\ndone()", 6, 2, **POLICIES[policy])
    check_end(result, 0)
    assert done(result) == set(range(6)), result.text


@pytest.mark.parametrize("mpi", MPICH_BY_DEFAULT)
def test_a_worker_that_fails_ends_the_job_without_a_watcher(mpi, tmp_path):
    """The jobs of test_ps.py end well without watchers."""
    body = "train(5)\nif me == 1: raise ValueError('boom')\ntrain(10_000)"
    result = job(tmp_path, body, 2, 1, mpi=mpi, watcher=0)
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

class Odd(allred.optim.Optimizer):  # slots named like parts of the format of checkpoints
    elementwise = True
    def slots(self, param): return {name: np.zeros(param.shape) for name in ("", "extra", "state", "m")}
    def update(self, param, grad, slots, lr, step):
        for number, slot in enumerate(slots.values()):
            slot += number * grad
        param -= lr * slots["m"]

def optimizer(name):
    if name == "odd": return Odd(lr=0.01)
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
    def train_step():
        opt.step(params, {name: rng.normal(size=p.shape).astype(p.dtype) for name, p in params.items()})
        return int(allred.world.current().counters._values[0])  # what `allred top` shows
    end = (step or 0) + 3
    assert [train_step() for _ in range(3)] == [*range(end - 2, end + 1)]
    opt.pull(params)
    allred.barrier()
    if allred.rank() == 0:
        print("saved", name, *digests(opt, params), flush=True)
        opt.save(saved, params)
    allred.barrier()
    train_step()
    assert opt.global_step == end + 1
    allred.barrier()
    assert (opt.restore(saved, params), opt.global_step) == (end, end)
    allred.barrier()
    assert train_step() == opt.global_step == end + 1

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
def test_parameters_and_state_pass_between_any_number_of_servers_and_mode_sync(mpi, tmp_path, request):
    """Four ranks, of which so many are servers; 0: mode sync. The state of a user's own optimizer is on one server."""
    ways = {"adam": (1, 3, 0, 2), "own": (1, 0, 1), "odd": (2, 0)}
    if request.config.getoption("--full"):
        ways |= {"adam": (1, 3, 0, 2, 0), "momentum": (3, 0)}
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


THREE_TIMES = """
import gc, os, time
import numpy as np
import allred
from allred.watch import start

stop, open_files = start.stop, []
for _ in range(3):
    server = allred.Server({"ps": 1, "worker": 2})
    role = allred.job_name()
    if role == "ps":
        server.join()
    else:  # the server on the chief's node leaves first
        params = [np.zeros(3)]
        opt = allred.distributed(allred.optim.SGD(lr=0.1))
        opt.broadcast(params)
        opt.step(params, params)
        start.stop = lambda: (time.sleep(0.3), stop())
    allred.shutdown()
    gc.collect()
    open_files.append(len(os.listdir("/proc/self/fd")))
assert open_files[1] == open_files[2], (role, open_files)
"""


@pytest.mark.parametrize("nodes", ["1,1,1", pytest.param("3", marks=full)])
def test_init_and_shutdown_three_times(nodes):
    """Regressions. 1,1,1: the chief's watcher ended before the watchers of other nodes, which reported that they had
    lost it. 3: the descriptors of shared memory stayed open."""
    result = mpirun(3, "-c", THREE_TIMES, env={"ALLRED_BANNER": "0", "ALLRED_PRETEND_NODES": nodes})
    check_end(result, 0)
    lines = [line for line in result.err.splitlines() if "mode ps" not in line]
    assert not [line for line in lines if "watcher" in line or "Error" in line], result.text
