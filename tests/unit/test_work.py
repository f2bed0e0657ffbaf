"""The queue of started operations, with something to wait for that the test controls."""

import os
import threading
import time

import pytest

from allred.comm.work import WorkQueue, spin_wait
from allred.errors import AllredError, CollectiveTimeout, InputError


class Gate:
    """Opens when told, or after some tests."""

    progress_count = 0

    def __init__(self, tests=None, waits_for_peers=False):
        self.tests, self.waits_for_peers, self.open = tests, waits_for_peers, False

    def done(self):
        if self.tests is not None:
            self.tests -= 1
        return self.open or (self.tests is not None and self.tests < 0)

    def spin_wait(self):
        return spin_wait(self.done)


def operation(log, name, *gates):
    for gate in gates:
        log.append(f"{name} waits")
        yield gate
    log.append(f"{name} ends")
    return name


@pytest.fixture
def queue():
    return WorkQueue(timeout_s=30.0)


def test_operations_complete_in_the_order_they_were_started(queue):
    log, gate = [], Gate()
    first = queue.start("a", operation(log, "a", gate))
    second = queue.start("b", operation(log, "b"))
    assert not second.done()
    assert log == ["a waits"]  # b does not begin before a is complete
    gate.open = True
    assert second.wait() == "b"
    assert first.done()
    assert first.wait() == "a"
    assert log == ["a waits", "a ends", "b ends"]


def test_wait_runs_earlier_operations(queue):
    log = []
    queue.start("a", operation(log, "a", Gate(tests=100), Gate(tests=100)))
    assert queue.start("b", operation(log, "b", Gate(tests=100))).wait() == "b"


def test_an_error_is_raised_by_its_own_wait_and_the_next_operation_runs(queue):
    def fails():
        yield Gate(tests=3)
        raise InputError("all ranks know")

    bad, good = queue.start("bad", fails()), queue.start("good", operation([], "good"))
    assert good.wait() == "good"
    for _ in range(2):
        with pytest.raises(InputError, match="all ranks know"):
            bad.wait()


def test_any_other_error_poisons(queue):
    def breaks():
        yield Gate(tests=3)
        raise ZeroDivisionError("by nothing\nat all")

    with pytest.raises(ZeroDivisionError):
        queue.start("x", breaks()).wait()
    with pytest.raises(AllredError, match="any more: x was cut short by ZeroDivisionError: by nothing; end the job"):
        queue.start("y", operation([], "y"))


@pytest.mark.parametrize("limit", [0.001, 0.05])
def test_a_time_limit_names_the_operation_and_poisons(queue, limit):
    work = queue.start("allreduce 'w'", operation([], "w", Gate()))
    with pytest.raises(CollectiveTimeout, match=rf"allreduce 'w': not complete after {limit:g} s"):
        work.wait(timeout_s=limit)
    with pytest.raises(AllredError, match="cannot be used any more: allreduce 'w' timed out"):
        queue.start("next", operation([], "next"))


def test_waits_for_peers_and_for_bytes_are_distinguished(queue):
    queue.start("a", operation([], "a", Gate(tests=20, waits_for_peers=True))).wait()
    assert 0 < queue.waited_for_peers_s <= queue.waited_s
    before = queue.waited_for_peers_s
    queue.start("b", operation([], "b", Gate(tests=20))).wait()
    assert queue.waited_for_peers_s == before


def test_a_long_wait_does_not_burn_the_core(queue, monkeypatch):
    monkeypatch.setattr("allred.comm.work._AWAKE_S", 0.01)
    work = queue.start("a", operation([], "a", Gate()))
    cpu = time.process_time()
    with pytest.raises(CollectiveTimeout):
        work.wait(timeout_s=0.5)
    assert time.process_time() - cpu < 0.25  # spinning would take 0.5


def test_a_forked_process_is_no_rank(queue):
    child = os.fork()
    if child == 0:
        try:
            queue.start("x", operation([], "x"))
        except AllredError as error:
            os._exit(7 if "forked from a rank after allred.init()" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_two_threads_at_once_are_an_error_and_the_first_continues(queue):
    inside, go = threading.Event(), threading.Event()

    def slow():
        inside.set()
        go.wait()
        yield from ()

    thread = threading.Thread(target=lambda: queue.start("slow", slow()))
    thread.start()
    inside.wait()
    with pytest.raises(AllredError, match="two threads use allred at once"):
        queue.start("mine", operation([], "mine"))
    go.set()
    thread.join()
    assert queue.start("mine", operation([], "mine")).wait() == "mine"


def test_an_operation_inside_of_another_one_of_this_thread_is_an_error_that_says_so(queue):
    """As a signal handler, or `__reduce__` of an object that is sent."""

    def calls_another():
        queue.start("inner", operation([], "inner"))
        yield from ()

    work = queue.start("outer", calls_another())
    with pytest.raises(AllredError, match="called while another one of the same thread waits"):
        work.wait()
    assert queue.start("mine", operation([], "mine")).wait() == "mine"


def test_a_thread_that_moves_this_queue_while_it_waits_for_another_is_waited_for(queue):
    inside, go = threading.Event(), threading.Event()

    class Slow(Gate):
        def done(self):
            if self.open:
                inside.set()
                go.wait()
            return self.open

    gate = Slow()
    queue.start("early", operation([], "early", gate))
    gate.open = True
    thread = threading.Thread(target=queue._run_for_others)
    thread.start()
    inside.wait()
    other = threading.Thread(target=queue._run_for_others)  # which finds it moved already
    other.start()
    other.join()
    threading.Timer(0.05, go.set).start()
    assert queue.start("mine", operation([], "mine")).wait() == "mine"
    thread.join()
