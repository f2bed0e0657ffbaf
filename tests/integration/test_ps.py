"""Mode ps with real processes: what comes out of training is what the policies promise, over shared memory and MPI."""

import itertools
import json
import pathlib

import pytest
from harness import mpirun

PROGRAM = pathlib.Path(__file__).with_name("ps_program.py")
MPIS = ["mpich", "openmpi"]
POLICIES = {
    "async": {"consistency": ["Async", {}]},
    "bounded": {"consistency": ["Bounded", {"staleness": 1}]},
    "bounded by 0": {"consistency": ["Bounded", {"staleness": 0}]},
    "bounded by 100": {"consistency": ["Bounded", {"staleness": 100}]},
    "sync": {"consistency": ["Sync", {}]},
}


def sync_of(gradients):
    return {"consistency": ["Sync", {"replicas_to_aggregate": gradients}]}


def run(cases, workers, servers=1, mpi="mpich", apart=False):
    """The results of cases, [name, arguments, options] (see ps_program.py), that run in one job.

    apart: every rank is on a (pretended) node of its own, so all messages are sent by MPI.
    """
    env = {"ALLRED_BANNER": "0", "ALLRED_WATCHER": "0"}  # without watchers a case starts in 10 ms, not in 90 ms
    if apart:
        env["ALLRED_PRETEND_NODES"] = ",".join("1" * (workers + servers))
    result = mpirun(workers + servers, PROGRAM, servers, json.dumps(cases), mpi=mpi, env=env, timeout_s=60)
    assert result.code == 0, result.text
    lines = result.out.splitlines()
    assert len(lines) == len(cases), result.text
    return list(map(json.loads, lines))


# ---- one worker: the same as without servers


@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("apart", [False, True], ids=["shm", "mpi"])
def test_one_worker_gives_what_the_optimizer_alone_gives(apart, servers, mpi, tmp_path):
    """Own: an optimizer of the user, whose state only one server can give. 3 servers: more than tensors in `spare`."""
    optimizers = ["sgd", "momentum", "adam", "adagrad", "normed", *["own"] * (servers == 1)]
    cases = [["serial", {"optimizer": name}, POLICIES["async"]] for name in optimizers]
    cases += [["serial", {"optimizer": "adam"}, POLICIES[policy]] for policy in ("bounded", "sync")]
    if servers == 3:
        products = itertools.product(("own", "normed", "adam"), ("async", "sync"))
        cases += [["spare", {"optimizer": name, "directory": str(tmp_path / name / policy)}, POLICIES[policy]]
                  for name, policy in products]  # fmt: skip
    for case, found in zip(cases, run(cases, 1, servers, mpi, apart), strict=True):
        if case[0] == "spare":
            assert found == {"same": True, "updates": [6, 6, 6]}, case
        else:
            assert found == {"same": True, "same_state": True, "moved": True}, case


# ---- several workers


@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize("apart", [False, True], ids=["shm", "mpi"])
@pytest.mark.parametrize(("workers", "servers"), [(2, 1), (3, 2), pytest.param(3, 3, marks=pytest.mark.full)])
def test_sync_is_the_serial_optimizer_on_the_mean_gradient(workers, servers, apart, mpi):
    cases = [["mean", {"optimizer": name}, POLICIES["sync"]] for name in ("sgd", "adam", "normed")]
    cases += [["mean", {"optimizer": name}, POLICIES["sync"] | {"use_locking": False}] for name in ("sgd", "normed")]
    cases += [["leave", {"first": 5}, POLICIES["sync"]]]  # no step mixes when workers end
    *means, leave = run(cases, workers, servers, mpi, apart)
    for case, found in zip(cases, means, strict=False):
        assert found["worst"] < 2e-5, (case, found)
        assert found["equal"], (case, found)
        assert f"{5 * workers} gradients, 5 updates; dropped 0" in found["text"], case
    assert leave["updates"] == [5 + 2 * (workers - 1)] * servers


@pytest.mark.parametrize(("apart", "servers"), [(False, 1), (True, 2)], ids=["memory", "messages"])
def test_a_broadcast_moves_the_parameters_once_for_each_worker(apart, servers):
    [found] = run([["start", {}, {}]], 3, servers, apart=apart)
    assert (found["up"], found["down"], found["pulls"]) == (16000, 2 * 16000, [2] * servers)
    assert found["equal"]
    assert found["staleness"] == {"0": 4 * servers}  # worker 0's step after the second broadcast too
    assert found["values"] == [0.0, 0.0]


# ---- nothing is lost, nothing comes twice


@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize("apart", [False, True], ids=["shm", "mpi"])
@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_no_gradient_is_lost_or_applied_twice(workers, servers, apart, mpi):
    arguments = {"steps": 30, "seed": workers + 10 * servers, "consistent": servers == 1 and not apart}
    cases = {policy: ["sums", arguments, POLICIES[policy]] for policy in ("async", "bounded", "sync")}
    cases["unlocked"] = ["sums", arguments | {"consistent": False}, {"use_locking": False}]
    more = 2 * workers  # gradients in a step: two of each worker
    cases["more gradients"] = ["sums", arguments | {"consistent": False}, sync_of(more)]
    for policy, found in zip(cases, run(list(cases.values()), workers, servers, mpi, apart), strict=True):
        gradients = {"sync": workers, "more gradients": more}.get(policy, 1)  # of one update
        expected = found["expected"] / gradients
        assert found["a"] == found["b"] == [pytest.approx(expected, rel=1e-12)], policy
        assert found["gradients"] == [30 * workers] * servers, policy
        assert found["updates"] == [30 * workers // gradients] * servers, policy
        assert found["dropped"] == [0] * workers, policy
        if policy in ("bounded", "sync"):
            assert found["stalest"] <= {"bounded": (workers - 1) * 3, "sync": 0}[policy], policy


def test_backup_workers_are_dropped_counted_and_told():
    sums, slow = run(
        [
            ["sums", {"steps": 30, "seed": 2, "consistent": False}, sync_of(2)],
            ["slow", {"seconds": 1.5}, sync_of(2)],
        ],
        3,
        2,
    )
    check_backup(sums)
    assert slow["steps"][0] > 3 * slow["steps"][2]
    assert slow["dropped"][2] > 0
    assert "worker 2: " in slow["text"]


def check_backup(found):
    unused = found["unused"][0]  # 1 where an odd number was taken: nobody is left to give the other one
    assert unused in (0, 1)
    assert ("1 gradient of a step that was not complete was not used" in found["text"]) == unused
    assert found["a"] == found["b"]
    assert 0 <= found["a"][0] - found["expected"] / 2 <= 50 * unused
    assert sum(found["dropped"]) > 0
    assert found["told"] == found["dropped"]
    assert found["gradients"][0] + sum(found["dropped"]) == 90
    assert found["unused"] == [unused, unused]
    assert found["gradients"][0] == found["gradients"][1] == 2 * found["updates"][0] + unused


# ---- who waits for whom, in which order


def test_policies_with_three_workers():
    cases = {
        "bounded by 0": ["together", {"divide": True, "steps": 20}, POLICIES["bounded by 0"]],
        "sync": ["together", {"divide": False, "steps": 20}, POLICIES["sync"]],
        "slow, async": ["slow", {"seconds": 1.5}, POLICIES["async"]],
        "slow, bounded": ["slow", {"seconds": 1.5}, {"consistency": ["Bounded", {"staleness": 3}]}],
    }
    for policy in ("async", "bounded by 100"):
        cases |= {f"{policy} {n}": ["schedule", {"seed": seed}, POLICIES[policy]] for n, seed in enumerate((4, 4, 5))}
    found = dict(zip(cases, run(list(cases.values()), 3), strict=True))
    # Bounded by 0 is sync with the learning rate divided by the number of workers.
    assert found["bounded by 0"]["w"] == pytest.approx(found["sync"]["w"], rel=1e-9)
    assert abs(found["sync"]["w"][0]) > 0.01
    # Async does not wait for a slow worker, and bounded does.
    steps = found["slow, async"]["steps"]
    assert steps[0] > 3 * steps[2]
    steps = found["slow, bounded"]["steps"]
    assert max(steps) <= min(steps) + 3 + 1
    # The same order of steps gives the same twice, another order does not.
    for policy in ("async", "bounded by 100"):
        first, second, other = (found[f"{policy} {n}"] for n in range(3))
        assert first == second, policy
        assert len(first["staleness"]) > 1, policy
        assert other["hash"] != first["hash"], policy


# ---- what is not of this mode


def test_a_sum_is_refused():
    code = "import allred\nallred.init()\nallred.distributed(allred.optim.SGD(lr=0.1), op=allred.Sum).statistics()\n"
    result = mpirun(2, "-c", code, env={"ALLRED_MODE": "ps"}, timeout_s=30)
    assert result.code == 1, result.text
    assert "opt: op=allred.Sum is available in mode sync only; parameter servers apply" in result.err, result.text


# ---- gradients on a GPU


def test_parameters_on_a_gpu_pass_through_pinned_memory():
    """With a stand-in for the GPU."""
    result = mpirun(2, PROGRAM.with_name("ps_gpu_program.py"), env={"ALLRED_MODE": "ps"}, timeout_s=60)
    assert result.code == 0, result.text
    assert "the same" in result.out
