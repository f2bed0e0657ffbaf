"""What ends a kernel that would spin for ever. The kernel, and NCCL's communicator, are stand-ins."""

import threading
import time
from unittest.mock import Mock

import pytest
import worlds

from allred.comm.backends import nccl_guard
from allred.comm.backends.nccl_guard import Guard
from allred.comm.backends.staged import StagedBackend
from allred.comm.work import WorkQueue
from allred.errors import AllredError, CollectiveTimeout, RemoteRankError


class End:
    over = False
    ordered = synchronized = 0

    def order_callers(self):
        self.ordered += 1

    def done(self):
        return self.over

    def synchronize(self):
        self.synchronized += 1


class Communicator:
    error = None
    aborted = 0

    def check_async_error(self):
        if self.error:
            raise self.error

    def abort(self):
        self.aborted += 1


@pytest.fixture
def guard():
    guard = Guard(WorkQueue(timeout_s=10.0))
    guard._communicator = Communicator()
    return guard


def test_completed_operations_are_released(guard):
    work = guard.watch(End(), "allreduce 'w'")
    work._end.over = True
    guard.check_running(time.monotonic() + 1000)
    assert not guard._running
    work.order_callers()
    assert work.done()
    assert (work._end.ordered, guard.failure) == (1, None)


def test_beyond_the_limit_nccl_is_aborted_and_everything_raises(guard):
    work = guard.watch(End(), "allreduce 'w'")
    guard.check_running(time.monotonic() + 9)
    assert not guard._communicator.aborted
    guard.check_running(time.monotonic() + 11)
    assert guard._communicator.aborted == 1
    for call in (work.order_callers, work.done, work.synchronize, guard.check):
        with pytest.raises(CollectiveTimeout, match=r"allreduce 'w': not complete on the GPU after 10 s.*NCCL_DEBUG"):
            call()
    assert work._end.ordered == 0
    with pytest.raises(AllredError, match="cannot be used any more: allreduce 'w': not complete on the GPU"):
        guard._queue.start("next", iter(()))


def test_an_error_of_nccl_is_raised_with_its_text(guard):
    guard._communicator.error = RuntimeError("NCCL_ERROR_REMOTE_ERROR: remote process exited")
    work = guard.watch(End(), "broadcast")
    guard.check_running(time.monotonic())
    assert guard._communicator.aborted == 1
    with pytest.raises(AllredError, match=r"broadcast: NCCL: NCCL_ERROR_REMOTE_ERROR: remote.*NCCL_DEBUG=WARN"):
        work.order_callers()


class Line:
    """Of a rank whose watcher has a verdict, or none. late: how often it is read before it has it."""

    warn_s, waits = 30.0, False

    def __init__(self, verdict=None, late=0):
        self.verdict, self.told = None if late else verdict, []
        self._coming, self._late = verdict, late

    def is_alive(self):
        return True

    def read(self):
        self._late -= 1
        if self._late < 0:
            self.verdict = self._coming

    def error(self):
        return RemoteRankError(self.verdict.text, 1, "nodeB", 137, "")

    def send(self, event, **what):
        self.told.append((event, what.get("what")))


class Verdict:
    text = "rank 1 on nodeB was killed by signal 9"


def test_the_end_of_another_rank_aborts_nccl(guard):
    with worlds.installed(watcher=Line(Verdict())):
        guard.watch(End(), "allreduce")
        guard.check_running(time.monotonic())
    assert guard._communicator.aborted == 1
    assert "rank 1 on nodeB was killed" in str(guard.failure)


@pytest.mark.parametrize("late", [0, 3])
def test_the_end_of_another_rank_comes_before_the_closed_connection(guard, late):
    """NCCL may know it first."""
    guard._communicator.error = RuntimeError("NCCL_ERROR_REMOTE_ERROR: connection closed")
    with worlds.installed(watcher=Line(Verdict(), late)):
        guard.watch(End(), "allreduce")
        guard.check_running(time.monotonic())
    assert str(guard.failure) == "allreduce was cut short: rank 1 on nodeB was killed by signal 9"


def test_a_call_of_nccl_that_fails_waits_for_the_verdict(guard):
    with worlds.installed(watcher=Line(Verdict(), 3)):
        guard.fail("NCCL's allReduce: connection closed")
        with pytest.raises(RemoteRankError, match="was killed by signal 9"):
            guard.check()


def test_without_a_verdict_the_error_of_nccl_is_raised(guard, monkeypatch):
    monkeypatch.setattr(nccl_guard, "NCCL_VERDICT_S", 0.01)
    guard._communicator.error = RuntimeError("a link is down")
    with worlds.installed(watcher=Line()):
        guard.watch(End(), "allreduce")
        guard.check_running(time.monotonic())
    assert "a link is down" in str(guard.failure)


def test_an_error_of_cuda_ends_the_operation(guard, monkeypatch):
    """In the thread, and where the program asks."""
    end = End()
    work = guard.watch(end, "allreduce 'w'")
    monkeypatch.setattr(end, "done", raising)
    monkeypatch.setattr(end, "order_callers", raising)
    monkeypatch.setattr(end, "synchronize", raising)
    guard.check_running(time.monotonic())
    assert guard._communicator.aborted == 1
    assert "allreduce 'w': RuntimeError: cudaErrorIllegalAddress" in str(guard.failure)
    for call in (work.done, work.order_callers, work.synchronize):
        guard.failure = None
        with pytest.raises(AllredError, match="cudaErrorIllegalAddress"):
            call()


def raising():
    raise RuntimeError("cudaErrorIllegalAddress")


def test_a_long_kernel_and_its_end_are_reported_to_the_watcher(guard):
    mine = Line()
    guard._queue.timeout_s = 1000
    with worlds.installed(watcher=mine):
        work = guard.watch(End(), "allreduce 'w'")
        for later_s in (1, 20, 25):
            guard.check_running(time.monotonic() + later_s)
        work._end.over = True
        guard.check_running(time.monotonic() + 26)
    assert mine.told == [("waiting", "allreduce 'w', on the GPU"), ("resumed", None)]


def test_the_thread_checks_and_stops_by_itself(guard):
    guard._communicator.error = RuntimeError("a link is down")
    guard.watch(End(), "allreduce")
    guard.begin(guard._communicator)
    until = time.monotonic() + 20
    while guard.failure is None and time.monotonic() < until:
        time.sleep(0.01)
    assert "a link is down" in str(guard.failure)
    assert guard.close() is False


@pytest.mark.parametrize("depth", [1, 2])
def test_while_the_host_is_inside_nccl_the_process_ends_and_nothing_is_aborted(guard, monkeypatch, capfd, depth):
    """When it connects, NCCL waits for the other ranks on the host. A group of calls is inside NCCL as a whole."""
    ended = []
    monkeypatch.setattr(nccl_guard.exit_protocol, "end_blocked", ended.append)
    with guard.calling():
        for _ in range(1, depth):
            with guard.calling():
                pass
        guard.check_running(time.monotonic() + 9)
        assert not ended
        guard.check_running(time.monotonic() + 11)
    assert guard._communicator.aborted == 0
    assert len(ended) == 1
    assert "CollectiveTimeout: NCCL: not complete on the GPU after 10 s" in ended[0]
    assert "is blocked in a call of NCCL, which cannot be aborted, and ends" in capfd.readouterr().err
    guard.failure = None
    guard.check_running(time.monotonic() + 20)
    assert guard.failure is None


def test_the_host_does_not_enter_nccl_after_an_abort(guard):
    guard._communicator.error = RuntimeError("a link is down")
    guard.watch(End(), "allreduce")
    guard.check_running(time.monotonic())
    with pytest.raises(AllredError, match="a link is down"), guard.calling():
        raise AssertionError("it is inside")


def test_at_the_end_it_looks_until_nothing_is_on_its_way(guard):
    work, prepared = guard.watch(End(), "allreduce"), []
    guard.begin(guard._communicator, lambda: prepared.append(threading.current_thread().name))
    threading.Timer(0.3, lambda: setattr(work._end, "over", True)).start()
    assert guard.close() is True
    assert work._end.over
    assert prepared == ["allred-nccl"]
    guard.watch(End(), "allreduce")
    guard._queue.poison("the ranks no longer match")
    assert guard.close() is True


def test_without_nccl_no_operation_is_watched():
    end = End()
    assert StagedBackend(host=None, device=Mock()).watch(end, "allreduce") is end
