"""Mode ps with real processes: what comes out of training is what the policies promise, over shared memory and MPI."""

import json
import pathlib

import pytest
from harness import mpirun

PROGRAM = pathlib.Path(__file__).with_name("ps_program.py")
MPIS = ["mpich", "openmpi"]


def run(case, workers, servers=1, mpi="mpich", apart=False, policy="async", **arguments):
    """The result of a case. apart: every rank on a (pretended) node of its own, so that all goes by MPI."""
    env = {"ALLRED_MODE": "ps", "ALLRED_NUM_PS": str(servers), "ALLRED_CONSISTENCY": policy}
    env |= {f"ALLRED_{key.upper()}": str(arguments.pop(key)) for key in list(arguments) if key in SETTINGS}
    if apart:
        env["ALLRED_PRETEND_NODES"] = ",".join("1" * (workers + servers))
    result = mpirun(workers + servers, PROGRAM, case, json.dumps(arguments), mpi=mpi, env=env, timeout_s=60)
    assert result.code == 0, result.text
    return json.loads(result.out.splitlines()[-1])


SETTINGS = ("staleness", "replicas_to_aggregate", "use_locking", "placement")


# ---- the same as without servers


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("apart", [False, True], ids=["shm", "mpi"])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "adagrad", "normed"])
def test_one_worker_gives_what_the_optimizer_alone_gives(optimizer, apart, servers):
    found = run("serial", 1, servers, apart=apart, optimizer=optimizer)
    assert found == {"same": True, "same_state": True, "moved": True}


@pytest.mark.parametrize("policy", ["bounded", "sync"])
def test_so_it_does_with_the_other_policies(policy):
    found = run("serial", 1, 2, policy=policy, optimizer="adam")
    assert found == {"same": True, "same_state": True, "moved": True}


def test_a_users_own_optimizer_serves_as_it_is():
    assert run("serial", 1, 1, optimizer="own")["same"]


@pytest.mark.parametrize("apart", [False, True], ids=["shm", "mpi"])
@pytest.mark.parametrize("optimizer", ["own", "normed", "adam"])
@pytest.mark.parametrize("policy", ["async", "sync"])
def test_more_servers_than_tensors(tmp_path, policy, optimizer, apart):
    found = run("spare", 1, 3, apart=apart, policy=policy, optimizer=optimizer, directory=str(tmp_path))
    assert found == {"same": True, "updates": [6, 6, 6]}


def test_open_mpi_gives_the_same():
    assert run("serial", 1, 2, mpi="openmpi", optimizer="momentum")["same"]
    assert run("serial", 1, 2, mpi="openmpi", apart=True, optimizer="momentum")["same"]


@pytest.mark.parametrize(("workers", "servers"), [(2, 1), (3, 2)])
@pytest.mark.parametrize("apart", [False, True], ids=["shm", "mpi"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "normed"])
def test_sync_is_the_serial_optimizer_on_the_mean_gradient(optimizer, apart, workers, servers):
    found = run("mean", workers, servers, apart=apart, policy="sync", optimizer=optimizer)
    assert found["worst"] < 2e-5, found
    assert found["equal"], found
    assert f"{5 * workers} gradients, 5 updates; dropped 0" in found["text"]


@pytest.mark.parametrize("apart", [False, True], ids=["shm", "mpi"])
@pytest.mark.parametrize("optimizer", ["sgd", "normed"])
def test_so_it_is_without_locking(optimizer, apart):
    found = run("mean", 3, 1, apart=apart, policy="sync", optimizer=optimizer, use_locking=0)
    assert found["worst"] < 2e-5, found


@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("mpi", MPIS)
def test_no_step_mixes_when_workers_end(mpi, servers):
    found = run("leave", 3, servers, mpi=mpi, policy="sync", first=5)
    assert found["updates"] == [9] * servers
    assert run("leave", 3, servers, mpi=mpi, apart=True, policy="sync", first=5) == found


def test_bounded_by_0_is_sync_with_the_learning_rate_shared_out():
    bounded = run("together", 3, 1, policy="bounded", staleness=0, divide=True, steps=20)
    in_sync = run("together", 3, 1, policy="sync", divide=False, steps=20)
    assert bounded["w"] == pytest.approx(in_sync["w"], rel=1e-9)
    assert abs(in_sync["w"][0]) > 0.01


# ---- the parameters to start from


@pytest.mark.parametrize(("apart", "servers"), [(False, 1), (True, 2)], ids=["memory", "messages"])
def test_a_broadcast_moves_the_parameters_once_for_each_worker(apart, servers):
    found = run("start", 3, servers, apart=apart)
    assert (found["up"], found["down"], found["pulls"]) == (16000, 2 * 16000, [2] * servers)
    assert found["equal"]
    assert found["staleness"] == {"0": 4 * servers}  # worker 0's step after the second broadcast too
    assert found["values"] == [0.0, 0.0]


# ---- nothing is lost, nothing comes twice


@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("policy", ["async", "bounded", "sync"])
def test_no_gradient_is_lost_or_applied_twice(policy, workers, servers):
    found = run("sums", workers, servers, policy=policy, staleness=1, steps=30, seed=workers + 10 * servers,
                consistent=servers == 1)  # fmt: skip
    expected = found["expected"] / (workers if policy == "sync" else 1)
    assert found["a"] == found["b"] == [pytest.approx(expected, rel=1e-12)]
    assert found["gradients"] == [30 * workers] * servers
    assert found["updates"] == [30 * (1 if policy == "sync" else workers)] * servers
    assert found["dropped"] == [0] * workers
    bound = {"async": 1000, "bounded": (workers - 1) * 3, "sync": 0}[policy]
    assert found["stalest"] <= bound


@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize("policy", ["async", "sync"])
def test_so_it_is_by_mpi(policy, mpi):
    found = run("sums", 3, 2, mpi=mpi, apart=True, policy=policy, steps=20, seed=3, consistent=False)
    assert found["a"] == found["b"] == [pytest.approx(found["expected"] / (3 if policy == "sync" else 1), rel=1e-12)]
    assert found["gradients"] == [60, 60]


def test_without_locking_nothing_is_lost_either():
    found = run("sums", 3, 1, use_locking=0, steps=40, seed=1, consistent=False)
    assert found["a"] == found["b"] == [found["expected"]]


def test_backup_workers_are_dropped_counted_and_told():
    found = run("sums", 3, 2, policy="sync", replicas_to_aggregate=2, steps=30, seed=2, consistent=False)
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


def test_more_gradients_than_workers():
    found = run("sums", 2, 1, policy="sync", replicas_to_aggregate=4, steps=20, seed=2, consistent=False)
    assert found["a"] == found["b"] == [pytest.approx(found["expected"] / 4, rel=1e-12)]
    assert found["updates"] == [10]


@pytest.mark.parametrize("policy", ["async", "bounded"])
def test_the_same_order_of_steps_gives_the_same_twice(policy):
    first, second = (run("schedule", 3, 1, policy=policy, staleness=100, seed=4) for _ in range(2))
    assert first == second
    assert len(first["staleness"]) > 1
    assert run("schedule", 3, 1, policy=policy, staleness=100, seed=5)["hash"] != first["hash"]


# ---- who waits for whom


def test_async_does_not_wait_for_a_slow_worker_and_bounded_does():
    steps = run("slow", 3, 1, policy="async", seconds=1.5)["steps"]
    assert steps[0] > 3 * steps[2]
    steps = run("slow", 3, 1, policy="bounded", staleness=3, seconds=1.5)["steps"]
    assert max(steps) <= min(steps) + 3 + 1


def test_sync_with_a_backup_worker_does_not_wait_for_the_slow_one():
    found = run("slow", 3, 1, policy="sync", replicas_to_aggregate=2, seconds=1.5)
    assert found["steps"][0] > 3 * found["steps"][2]
    assert found["dropped"][2] > 0
    assert "worker 2: " in found["text"]


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
