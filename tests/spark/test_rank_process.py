"""Ranks and their supervisors as processes, without Spark: ends of ranks, and a driver that cannot be reached."""

import os
import secrets
import signal
import socket
import subprocess
import sys
import time

import cloudpickle
import pytest
from ports import reserved_ports

import allred
from allred.spark import rank_process
from allred.spark.barrier_job import pickle_function
from allred.spark.rank_process import RankProcess, RankSpec, rank_name

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the ranks cannot import it


def start(function, size=1, supervised=False, **spec):
    """Start ranks of a function, and let them join."""
    function = pickle_function(function, ())
    processes = [RankProcess(RankSpec(function, rank, size, 0, False, {}, **spec), supervised) for rank in range(size)]
    addresses = {rank_name(process.rank): process.address()[0] for process in processes}
    secret = secrets.token_hex(32)
    for process in processes:
        process.join(addresses, secret)
    return processes


def test_a_rank_that_has_returned_waits_for_the_others(monkeypatch):
    monkeypatch.setattr(rank_process, "RANK_EXIT_S", 0.2)  # for a rank that has failed

    def end():
        allred.init()
        time.sleep(1.5 * allred.rank())
        return allred.rank()

    found = [process.outcome() for process in start(end, 2)]
    assert [(each["code"], cloudpickle.loads(each["result"])) for each in found] == [(0, 0), (0, 1)]


def test_a_child_of_a_killed_rank_does_not_hide_its_end():
    def fork_and_die():
        if os.fork() == 0:
            time.sleep(600)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)

    [process] = start(fork_and_die)
    assert process.outcome()["text"].endswith("was killed by signal 9 (SIGKILL)")  # before the limit of the test


def test_children_of_a_rank_end_with_it(tmp_path):
    def leave_a_child():
        child = subprocess.Popen(["sleep", "600"])
        (tmp_path / "pid").write_text(str(child.pid))

    [process] = start(leave_a_child)
    assert process.outcome()["code"] == 0
    until = time.monotonic() + 10
    while os.path.exists(f"/proc/{(tmp_path / 'pid').read_text()}"):
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_child_that_exits_is_not_the_end_of_the_rank():
    def fork():
        if os.fork() == 0:
            sys.exit(0)
        os.wait()
        return "parent"

    [process] = start(fork)
    assert cloudpickle.loads(process.outcome()["result"]) == "parent"


@pytest.mark.parametrize(("code", "text"), [(3, "ended with exit code 3"), (0, "ended with exit code 0")])
def test_os_exit(code, text):
    [process] = start(lambda: os._exit(code))
    found = process.outcome()
    assert f"rank 0 on {socket.gethostname()} {text} (" in found["text"]
    assert found["code"] == (code or 1)


def test_a_supervisor_that_cannot_reach_the_driver():
    [port] = reserved_ports(1)
    [process] = start(lambda: None, supervised=True, driver=("127.0.0.1", port, "secret"))
    failure = process.connected()
    assert f"cannot reach the driver at 127.0.0.1:{port}" in failure["text"]
    assert process.process.wait(30) == 0
