"""Mode ps with real processes: what comes out of training is what the policies promise, over shared memory and MPI."""

import itertools
import json
import pathlib

import pytest
from harness import MPICH_BY_DEFAULT, MPIS, full, mpirun

PROGRAM = pathlib.Path(__file__).with_name("ps_program.py")
POLICIES = {
    "async": {"consistency": ["Async", {}]},
    "bounded": {"consistency": ["Bounded", {"staleness": 1}]},
    "bounded by 0": {"consistency": ["Bounded", {"staleness": 0}]},
    "bounded by 100": {"consistency": ["Bounded", {"staleness": 100}]},
    "sync": {"consistency": ["Sync", {}]},
}


STEPS = 16  # of each worker in a case `sums`; even, for two gradients in a step


def sync_of(gradients):
    return {"consistency": ["Sync", {"replicas_to_aggregate": gradients}]}


def run(cases, workers, servers=1, mpi="mpich", apart=False, banner=0, program=PROGRAM):
    """Return the results of cases, [name, arguments, options] (see ps_program.py), that run in one job, and its stderr.

    apart: every rank is on a (pretended) node of its own, so all messages are sent by MPI.
    """
    env = {"ALLRED_BANNER": str(banner), "ALLRED_WATCHER": "0"}  # without watchers a case starts in 10 ms, not in 90 ms
    if apart:
        env["ALLRED_PRETEND_NODES"] = ",".join("1" * (workers + servers))
    result = mpirun(workers + servers, program, servers, json.dumps(cases), mpi=mpi, env=env, timeout_s=100)
    assert result.code == 0, result.text
    lines = result.out.splitlines()
    assert len(lines) == len(cases), result.text
    return list(map(json.loads, lines)), result.err


def test_the_path_of_a_steady_push_and_pull_is_short():
    result = mpirun(2, PROGRAM.with_name("ps_call_path_program.py"), timeout_s=60)
    assert sorted(result.out.split()[::3]) == ["server:", "worker:"], result.text


def sums_cases(workers, servers, apart):
    """Return {policy: case}. Each checks at each step that no pull mixes two versions, where that is promised."""
    arguments = {"steps": STEPS, "seed": workers + 10 * servers, "consistent": servers == 1 and not apart}
    cases = {policy: ["sums", arguments, POLICIES[policy]] for policy in ("async", "bounded", "sync")}
    cases["unlocked"] = ["sums", arguments | {"consistent": False}, {"use_locking": False}]
    cases["more gradients"] = ["sums", arguments | {"consistent": False}, sync_of(2 * workers)]  # two of each worker
    return cases


def check_sums(results, workers, servers):
    """Check that no gradient was lost or applied twice."""
    for policy, found in results.items():
        gradients = {"sync": workers, "more gradients": 2 * workers}.get(policy, 1)  # of one update
        expected = found["expected"] / gradients
        assert found["a"] == found["b"] == [pytest.approx(expected, rel=1e-12)], policy
        assert found["gradients"] == [STEPS * workers] * servers, policy
        assert found["updates"] == [STEPS * workers // gradients] * servers, policy
        assert found["dropped"] == [0] * workers, policy
        if policy in ("bounded", "sync"):
            assert found["stalest"] <= {"bounded": (workers - 1) * 3, "sync": 0}[policy], policy


# ---- one worker: the same as without servers


@pytest.mark.parametrize("mpi", MPICH_BY_DEFAULT)
@pytest.mark.parametrize(
    ("apart", "servers"),
    [(False, 1), *(pytest.param(*each, marks=full) for each in [(True, 3), (True, 1), (False, 3)])],
)
def test_one_worker_gives_what_the_optimizer_alone_gives(apart, servers, mpi, tmp_path):
    """Own: an optimizer of the user, whose state only one server can give. 3 servers: more than tensors in `spare`."""
    optimizers = ["sgd", "momentum", "adam", "adagrad", "normed", *["own"] * (servers == 1)]
    cases = [["serial", {"optimizer": name}, POLICIES["async"]] for name in optimizers]
    cases += [["serial", {"optimizer": "adam"}, POLICIES[policy]] for policy in ("bounded", "sync")]
    if servers == 3:
        products = itertools.product(("own", "normed", "adam"), ("async", "sync"))
        cases += [["spare", {"optimizer": name, "directory": str(tmp_path / name / policy)}, POLICIES[policy]]
                  for name, policy in products]  # fmt: skip
    (clips, *results), err = run([["clips", {}, {}], *cases], 1, servers, mpi, apart, banner=1)
    check_clips(clips, err)
    for case, found in zip(cases, results, strict=True):
        if case[0] == "spare":
            assert found == {"same": True, "updates": [6, 6, 6]}, case
        else:
            assert found == {"same": True, "same_state": True, "moved": True}, case


def check_clips(found, err):
    """Check that the worker clips, scales and skips its own gradient."""
    assert found["params"] == [[-0.6, -0.8]] * 2
    assert (found["norm"], found["skipped"], found["scales"]) == (10.0, 1, [512.0, 512.0, 1024.0])
    assert err.count("opt: compression has no effect in mode ps: gradients are sent uncompressed") == 1, err


# ---- several workers


@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize(
    ("apart", "workers", "servers"),
    [
        (True, 2, 1),
        (False, 2, 1),
        pytest.param(False, 3, 2, marks=full),
        pytest.param(True, 3, 2, marks=full),
        pytest.param(False, 3, 3, marks=full),
        pytest.param(True, 3, 3, marks=full),
    ],
)
def test_sync_is_the_serial_optimizer_on_the_mean_and_no_policy_loses_a_gradient(
    workers, servers, apart, mpi, tmp_path
):
    cases = [["mean", {"optimizer": name}, POLICIES["sync"]] for name in ("adam", "normed")]
    cases += [["mean", {"optimizer": "sgd"}, POLICIES["sync"] | {"use_locking": False}]]
    cases += [["leave", {"first": 5}, POLICIES["sync"]]]  # no step mixes when workers end
    sums = sums_cases(workers, servers, apart)
    backup = [["sums", {"steps": STEPS, "seed": 2, "consistent": False}, sync_of(2)],
              ["late", {"directory": str(tmp_path)}, sync_of(2)]] * (workers == 3)  # fmt: skip
    results, _ = run([*backup, ["start", {}, {}], *cases, *sums.values()], workers, servers, mpi, apart)
    if backup:
        check_backup(*results[:2])
    start, *means, leave = results[len(backup) : -len(sums)]
    check_start(start, workers, servers)
    for case, found in zip(cases, means, strict=False):
        assert found["worst"] < 2e-5, (case, found)
        assert found["equal"], (case, found)
        assert f"{3 * workers} gradients, 3 updates; dropped 0" in found["text"], case
    assert leave["updates"] == [5 + 2 * (workers - 1)] * servers
    check_sums(dict(zip(sums, results[-len(sums) :], strict=True)), workers, servers)


def check_start(found, workers, servers):
    """Check that a broadcast moves the parameters once for each worker."""
    others = workers - 1
    assert (found["up"], found["down"], found["pulls"]) == (16000, others * 16000, [others] * servers)
    assert found["equal"]
    assert found["staleness"] == {"0": 4 * servers}  # worker 0's step after the second broadcast too
    assert found["values"] == [0.0, 0.0]


@full
@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize("apart", [False, True], ids=["shm", "mpi"])
@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_no_gradient_is_lost_or_applied_twice_by_any_number_of_ranks(workers, servers, apart, mpi):
    cases = sums_cases(workers, servers, apart)
    results, _ = run(list(cases.values()), workers, servers, mpi, apart)
    check_sums(dict(zip(cases, results, strict=True)), workers, servers)


def check_backup(found, late):
    """Check that late gradients of backup workers are dropped, counted and reported, and that others are not."""
    unused = found["unused"][0]  # 1 where an odd number was taken: nobody is left to give the other one
    assert unused in (0, 1)
    assert ("1 gradient of a step that was not complete was not used" in found["text"]) == unused
    assert found["a"] == found["b"]
    assert 0 <= found["a"][0] - found["expected"] / 2 <= 50 * unused
    assert sum(found["dropped"]) > 0
    assert found["told"] == found["dropped"]
    assert found["gradients"][0] + sum(found["dropped"]) == 3 * STEPS
    assert found["unused"] == [unused] * len(found["unused"])
    assert found["gradients"][0] == found["gradients"][1] == 2 * found["updates"][0] + unused
    assert late["dropped"][2] == 1
    assert "worker 2: " in late["text"]


# ---- who waits for whom, in which order


def test_async_does_not_wait_bounded_waits_and_the_same_order_of_steps_gives_the_same(tmp_path):
    """If async waits for the late worker, the job hangs. No pull mixes two versions: the cases `sums` check that."""
    late, slow = ({"directory": str(tmp_path / name)} for name in ("late", "slow"))
    for case in (late, slow):
        pathlib.Path(case["directory"]).mkdir()
    cases = {
        "late, async": ["late", late, POLICIES["async"]],
        "slow, bounded": ["slow", slow, {"consistency": ["Bounded", {"staleness": 3}]}],
        "bounded by 0": ["together", {"divide": True, "steps": 20}, POLICIES["bounded by 0"]],
        "sync": ["together", {"divide": False, "steps": 20}, POLICIES["sync"]],
    }
    seeds = {"async": (4, 4, 5), "bounded by 100": (4, 4)}
    for policy, each in seeds.items():
        cases |= {f"{policy} {n}": ["schedule", {"seed": seed}, POLICIES[policy]] for n, seed in enumerate(each)}
    sums = {policy: each for policy, each in sums_cases(3, 1, False).items() if policy in ("async", "bounded", "sync")}
    results, _ = run([*sums.values(), *cases.values()], 3)
    check_sums(dict(zip(sums, results, strict=False)), 3, 1)
    found = dict(zip(cases, results[len(sums) :], strict=True))
    # Async does not wait for a late worker.
    assert found["late, async"]["dropped"] == [0, 0, 0]
    # Bounded waits for a slow worker.
    steps = found["slow, bounded"]["steps"]
    assert max(steps) <= min(steps) + 3 + 1
    # Bounded by 0 is sync with the learning rate divided by the number of workers.
    assert found["bounded by 0"]["w"] == pytest.approx(found["sync"]["w"], rel=1e-9)
    assert abs(found["sync"]["w"][0]) > 0.01
    # The same order of steps gives the same twice, another order does not.
    for policy in seeds:
        assert found[f"{policy} 0"] == found[f"{policy} 1"], policy
        assert len(found[f"{policy} 0"]["staleness"]) > 1, policy
    assert found["async 2"]["hash"] != found["async 0"]["hash"]


# ---- gradients on a GPU


def test_parameters_on_a_gpu_pass_through_pinned_memory():
    """With a stand-in for the GPU."""
    result = mpirun(2, PROGRAM.with_name("ps_gpu_program.py"), env={"ALLRED_MODE": "ps"}, timeout_s=60)
    assert result.code == 0, result.text
    assert "the same" in result.out
