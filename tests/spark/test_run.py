"""allred.spark.run: results, failures, wrong arguments. One Spark with four slots; a job takes about 3 s."""

import os
import signal
import sys
import threading
import time

import cloudpickle
import numpy as np
import pytest

import allred.spark
from allred import RemoteRankError
from allred.errors import InputError
from allred.spark.barrier_job import reason_of

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the executors cannot import it


def train(steps, lr=1.0):
    """The rank, and a parameter after steps with the mean of the ranks as gradient."""
    allred.init()
    params = {"w": np.zeros(1000)}
    opt = allred.distributed(allred.optim.SGD(lr=lr))
    opt.broadcast(params)
    for _ in range(steps):
        opt.step(params, {"w": np.full(1000, float(allred.rank()))})
    return allred.rank(), float(params["w"][0]), os.environ.get("MARK")


def test_the_results_come_in_rank_order_and_env_reaches_the_ranks(sc):
    found = allred.spark.run(train, (5,), num_proc=3, env={"MARK": "x"})
    assert found == [(0, -5.0, "x"), (1, -5.0, "x"), (2, -5.0, "x")]


def test_a_parameter_server_and_two_workers(sc):
    def pull(steps):
        train(steps)  # a server serves in there, and its program ends
        return allred.job_name(), allred.rank(), allred.size()

    assert allred.spark.run(pull, (5,), num_proc=3, num_ps=1) == [None, ("worker", 0, 2), ("worker", 1, 2)]


def test_one_rank_and_all_slots(sc):
    assert allred.spark.run(train, (2,), num_proc=1) == [(0, 0.0, None)]
    sizes = allred.spark.run(lambda: allred.init() or allred.size())
    assert sizes == [4] * 4


def test_the_first_rank_that_raises_is_named_with_its_traceback(sc):
    def fail():
        allred.init()
        if allred.rank() == 1:
            raise OSError("disk full")
        while True:
            allred.allreduce(np.ones(3))

    with pytest.raises(RemoteRankError) as caught:
        allred.spark.run(fail, num_proc=3)
    assert str(caught.value).startswith("rank 1 on ")
    assert "raised OSError: disk full\nTraceback" in str(caught.value)
    assert "in fail\n" in caught.value.traceback
    assert (caught.value.rank, caught.value.code) == (1, 1)


@pytest.mark.parametrize(
    ("fail", "text"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by signal 9 (SIGKILL)"),
        (lambda: sys.exit(3), "called sys.exit(3)"),
    ],
)
def test_a_rank_that_is_killed_or_exits_is_named(sc, fail, text):
    def program():
        allred.init()
        if allred.rank() == 2:
            fail()
        while True:
            allred.allreduce(np.ones(3))

    with pytest.raises(RemoteRankError, match=r"^rank 2 on ") as caught:
        allred.spark.run(program, num_proc=3)
    assert text in str(caught.value)


def test_a_failed_attempt_starts_again_but_not_after_the_same_exception_twice(sc, tmp_path, capfd):
    def fails_once():
        allred.init()
        if allred.rank() == 1 and not (tmp_path / "failed").exists():
            (tmp_path / "failed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        allred.barrier()
        return allred.rank()

    assert allred.spark.run(fails_once, num_proc=2, max_attempts=3) == [0, 1]
    assert "allred.spark: attempt 1 failed: rank 1 on " in capfd.readouterr().err

    def fails_always():
        allred.init()
        raise ValueError("wrong")

    with pytest.raises(RemoteRankError, match="ValueError: wrong") as caught:
        allred.spark.run(fails_always, num_proc=2, max_attempts=9)
    assert caught.value.__notes__ == ["allred.spark: no further attempt: the same exception occurred twice"]


def test_too_few_slots_are_an_error(sc):
    with pytest.raises(InputError, match=r"5 ranks need 5 slots, and the cluster \(local\[4\]\) has 4"):
        allred.spark.run(train, (1,), num_proc=5)


def test_wrong_arguments(sc):
    with pytest.raises(InputError, match="num_proc must be an integer >= 1"):
        allred.spark.run(train, (1,), num_proc=0)
    with pytest.raises(InputError, match="2 parameter servers of 2 ranks leave no worker"):
        allred.spark.run(train, (1,), num_proc=2, num_ps=2)
    with pytest.raises(InputError, match="expected a function, got 5"):
        allred.spark.run(5)
    with pytest.raises(InputError, match="args must be a list or a tuple, got 5"):
        allred.spark.run(train, 5)
    for env in ({"A": 1}, {"A=B": "1"}, {"A": "\0"}, ["a"]):
        with pytest.raises(InputError, match=r"env (needs|must be a dict of) strings"):
            allred.spark.run(train, (1,), num_proc=1, env=env)
    lock = threading.Lock()
    with pytest.raises(InputError, match="cannot be sent to the executors"):
        allred.spark.run(lambda: lock)


def test_a_result_that_cannot_be_pickled(sc):
    with pytest.raises(RemoteRankError, match="its result, a generator, cannot be sent"):
        allred.spark.run(lambda: (each for each in ()), num_proc=1)


def test_a_rank_without_init_and_a_setting_that_is_wrong(sc):
    assert allred.spark.run(lambda: 7, num_proc=2) == [7, 7]
    with pytest.raises(RemoteRankError, match="ALLRED_BACKEND"):
        allred.spark.run(train, (1,), num_proc=2, env={"ALLRED_BACKEND": "x"})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Py4J\n: org.apache.spark.SparkException: Aborted. Most recent failure reason: lost it\n\tat x", "lost it"),
        (
            "Most recent failure reason: a task failed.\nExecutorLostFailure (1) Reason: x\n\tat x",
            "ExecutorLostFailure (1) Reason: x",
        ),
        ("Py4J\n: org.apache.spark.SparkException: Job 3 cancelled\n\tat x", "Job 3 cancelled"),
        ("thrown:\nTraceback (most recent call last):\n  File x\n    1 // 0\nKeyError: 'a'\n\tat x", "KeyError: 'a'"),
        ("simple\nmore", "simple"),
    ],
)
def test_the_reason_in_an_exception_of_spark(text, reason):
    assert reason_of(Exception(text)) == reason


def test_an_interrupted_driver_leaves_no_ranks(sc, tmp_path):
    """Spark cancels the tasks; the kernel kills the ranks, and their watchers end."""
    files = [tmp_path / str(rank) for rank in range(2)]

    def sleep():
        allred.init()
        files[allred.rank()].write_text(str(os.getpid()))
        time.sleep(600)

    def interrupt():
        until = time.monotonic() + 60
        while not all(file.exists() and file.read_text() for file in files) and time.monotonic() < until:
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        allred.spark.run(sleep, num_proc=2)
    thread.join()
    until = time.monotonic() + 30  # Spark takes 2 to 4 s
    while any(os.path.exists(f"/proc/{file.read_text()}") for file in files):
        assert time.monotonic() < until
        time.sleep(0.1)
