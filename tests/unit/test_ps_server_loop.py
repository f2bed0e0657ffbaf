"""Order of requests at a server, and its control requests: with fakes of both transports, without MPI."""
# ruff: noqa: E402

from types import SimpleNamespace

import mpi4py
import numpy as np
import pytest

mpi4py.rc.initialize = False  # only its constants are needed


from allred import optim
from allred.errors import CollectiveTimeout, InputError
from allred.fusion import Tensor
from allred.ps import server_loop as module
from allred.ps.compiled_steps import Served
from allred.ps.consistency import Async, Sync
from allred.ps.context import Context
from allred.ps.mpi_transport import CALL, REPLY, STEP
from allred.ps.placement import place
from allred.ps.protocol import (
    PULL,
    PUSH,
    RECORD_BYTES,
    AwaitFinish,
    BeginDrain,
    EndDrain,
    GetStatistics,
    LeaveAndWait,
    Register,
    ShareFailure,
    StepRequest,
    pack_request,
)
from allred.ps.run_steps import AllPending
from allred.ps.server_loop import ServerLoop
from allred.ps.shard import locks
from allred.ps.step_handler import Turn

TENSORS = [Tensor("a", (3,), np.dtype("float32")), Tensor("b", (2,), np.dtype("float64"))]
PULL_RECORD = pack_request(PULL, 0, 0, 1.0, 1.0, 0, 0)


class Transport:
    """Messages that have arrived, and those that were sent."""

    def __init__(self, comm):
        self.waiting = {STEP: [], CALL: []}  # (rank, what it is)
        self.sent = []

    def arrived(self, tag):
        return self.waiting[tag][0][0] if self.waiting[tag] else None

    def receive_record(self, source, tag):
        record = self.waiting[tag].pop(0)[1]
        assert len(record) == RECORD_BYTES
        return record

    def receive(self, source, tag, waits_for_peers=False):
        yield from ()
        return self.waiting[tag].pop(0)[1]

    def send(self, to, tag, value):
        assert tag == REPLY
        self.sent.append((to, value))

    def progress(self):
        return True


class Mailboxes:
    """All of them always have a request."""

    @staticmethod
    def wait_any(boxes, timeout_us, first):
        return first


class Port:
    """A worker's; its cells are there at once, but not more than `cells`."""

    waits_for_peers, progress_count = False, 0

    def __init__(self, cells=0):
        self.cells, self.given = cells, 0

    def open(self, sizes):
        self.sizes = list(sizes)

    def cell(self):
        return bytes(self.sizes[0]) if self.cells else None

    def take(self):
        self.cells -= 1
        self.sizes.pop(0)

    def give(self, cell):
        return True

    def answer(self, record):
        pass

    def has_read(self, number):
        return True

    def done(self):
        return self.cell() is not None

    def spin_wait(self):
        return self.done()

    forget = poll = lambda self: PULL_RECORD


def registration(agreement="as it is"):
    return Register(place(TENSORS, 1, "bytes", split=True), {"a": 0, "b": 1}, agreement)


def make(monkeypatch, workers=3, policy=None, locking=True, optimizer=None, registered=True):
    """Server 0, which has parameters; its requests come by `_transport` or by `control.boxes`."""
    monkeypatch.setattr(module, "MpiTransport", Transport)
    monkeypatch.setattr(module, "MpiPort", lambda transport, source: Port())
    monkeypatch.setattr(module.native, "Mailbox", Mailboxes)
    context = Context(None, 0, 1, (0, *range(1, workers + 1)), SimpleNamespace(timeout_s=10.0))
    optimizer, policy = optimizer or optim.SGD(lr=1.0), policy or Async()
    served = ServerLoop(context, optimizer, policy, locks(locking, policy, optimizer), "as it is")
    if registered:
        request(served, 0, registration())
        served._transport.sent.clear()
    return served


def kinds(served, looks, wait=False):
    """What a server takes when it looks so often."""
    found = []
    for _ in range(looks):
        sizes = [len(served._transport.waiting[tag]) for tag in (STEP, CALL)]
        served._receive(wait=wait)
        (turn,) = served._turns
        served._turns.clear()
        for _ in turn.steps:
            pass
        after = [len(served._transport.waiting[tag]) for tag in (STEP, CALL)]
        found.append("step" if after[0] < sizes[0] else "call" if after[1] < sizes[1] else "box")
    return found


def request(served, worker, what):
    """Send a control request to a server, and retry those that wait. Returns the new replies, (rank, reply)."""
    before = len(served._transport.sent)
    for _ in served.control.handle(worker + 1, what):
        raise AssertionError("it waits")
    served.control.retry()
    return served._transport.sent[before:]


DEAD_WRITER = "worker 1 ended before it wrote the checkpoint"

# ---- whose turn it is


class Compiled:
    """Finds requests that Python has to serve, such as lookups."""

    def set_boxes(self, boxes):
        pass

    def serve(self, *given):
        return Served(0, PULL_RECORD, [], [])


@pytest.mark.parametrize("compiled", [None, Compiled()])
def test_mailboxes_do_not_keep_messages_waiting(monkeypatch, compiled):
    served = make(monkeypatch)
    served.step_handler.compiled = compiled
    served.control.boxes, served.control.box_workers = [Port()], [0]
    served.control.ports = {0: Port()}
    served._transport.waiting[STEP] += [(2, PULL_RECORD)] * 3
    served._transport.waiting[CALL] += [(3, GetStatistics())] * 3
    assert (
        kinds(served, 110, wait=compiled is not None)
        == (["box"] * 16 + ["step"] + ["box"] * 16 + ["call"]) * 3 + ["box"] * 8
    )


def test_steps_by_mpi_do_not_keep_calls_waiting(monkeypatch):
    served = make(monkeypatch)
    served._transport.waiting[STEP] += [(2, PULL_RECORD)] * 10
    served._transport.waiting[CALL] += [(3, GetStatistics())] * 3
    assert kinds(served, 13) == ["step", "call"] * 3 + ["step"] * 7


@pytest.mark.parametrize(
    ("policy", "optimizer", "locks"),
    [(Async(), optim.SGD(lr=1.0), False), (Sync(), optim.SGD(lr=1.0), True), (Async(), object(), True)],
)
def test_without_locking_it_locks_where_gradients_are_gathered(monkeypatch, policy, optimizer, locks):
    served = make(monkeypatch, policy=policy, optimizer=optimizer, locking=False, registered=False)
    assert served.step_handler.locking == locks


# ---- workers that go


def begin(served, worker, port, flags):
    steps = served.step_handler.step(worker, port, StepRequest(flags, 0, 0, float("nan")))
    served._turns.append(Turn(worker, steps))
    return served._turns[-1]


@pytest.mark.parametrize("locking", [False, True])
@pytest.mark.parametrize(("flags", "cells", "torn"), [(PUSH, 1, 1), (PUSH, 0, 0)])
def test_only_a_partly_applied_gradient_is_torn(monkeypatch, flags, cells, torn, locking):
    served = make(monkeypatch, locking=locking)
    begin(served, 1, Port(cells), flags)
    gone = []
    monkeypatch.setattr(served, "_remove_dead_workers", lambda: [served.control.remove(worker) for worker in gone])
    if locking:
        gone.append(1)
        served._run(served._turns.popleft())
    else:
        served._advance_all()
        served.control.remove(1)
        served._advance_all()
    assert served.step_handler.statistics.torn == torn


def test_calls_and_leaves_are_not_torn(monkeypatch):
    served = make(monkeypatch, locking=False)

    def forever():
        while True:
            yield Port()

    served._turns.append(Turn(1, forever()))
    served._advance_all()
    served.control.remove(1)
    served._advance_all()
    assert served.step_handler.statistics.torn == 0
    assert not served._turns


def test_the_reply_to_the_last_leave_has_the_unused_gradients(monkeypatch):
    served = make(monkeypatch, workers=2, policy=Sync(replicas_to_aggregate=3))
    for worker in (0, 1):
        served.step_handler.shard.end_add()
        request(served, worker, LeaveAndWait()) if worker == 0 else served.control.remove(worker)
    assert not served._transport.sent
    while served._turns:
        served._run(served._turns.popleft())
    served.control.retry()
    ((rank, statistics),) = served._transport.sent
    assert rank == 1
    assert statistics.unused == 2


# ---- registration


class Refusing(optim.SGD):
    """Its slots cannot be made."""

    def slots(self, param):
        if param.size != 3 or self.global_step:
            raise InputError("no slots today")
        self.global_step = 1  # it was asked whether it works element by element
        return {}


def test_an_error_in_worker_0s_registration_reaches_all(monkeypatch):
    served = make(monkeypatch, optimizer=Refusing(lr=1.0), registered=False)
    assert request(served, 1, registration()) == []
    answers = request(served, 0, registration()) + request(served, 2, registration())
    assert [rank for rank, _ in answers] == [1, 2, 3]
    assert all("no slots today" in str(error) for _, error in answers)


def test_workers_that_register_before_worker_0_get_replies_after_it(monkeypatch):
    served = make(monkeypatch, registered=False)
    assert request(served, 1, registration()) == []
    assert request(served, 2, registration("otherwise")) == []
    replies = dict(request(served, 0, registration()))
    for rank in (1, 2):
        assert replies[rank] == (None, None, None, False, False)  # on another node: all traffic goes by MPI
    assert "worker 2 has otherwise, worker 0 has as it is" in str(replies[3])


def test_no_worker_waits_for_a_dead_worker_0(monkeypatch):
    served = make(monkeypatch, registered=False)
    assert request(served, 1, registration()) == []
    served.control.remove(0)
    served._run(served._turns.popleft())
    replies = request(served, 2, registration())
    assert sorted(rank for rank, _ in replies) == [2, 3]
    assert all("worker 0 ended before" in str(error) for _, error in replies)


def test_a_dead_worker_does_not_wait(monkeypatch):
    served = make(monkeypatch)
    assert request(served, 1, AwaitFinish()) == []
    assert request(served, 2, EndDrain(None)) == []
    assert served.control.at_end() == {1}
    served.control.remove(1)
    served._run(served._turns.popleft())
    assert [worker for worker, _ in served.control.waiting] == [2]


def test_the_result_of_the_last_checkpoint_if_its_writer_dies(monkeypatch):
    served = make(monkeypatch)
    assert request(served, 1, BeginDrain()) == [(2, (True, 0))]
    assert request(served, 2, BeginDrain()) == [(3, (False, 0))]
    assert request(served, 2, EndDrain(None)) == []
    assert served.control.awaited() == {1}
    served.control.remove(1)
    served._run(served._turns.popleft())
    assert request(served, 0, EndDrain(None)) == [(1, DEAD_WRITER), (3, DEAD_WRITER)]


def test_a_drain_waits_for_a_worker_that_is_sending_its_gradient(monkeypatch):
    served = make(monkeypatch, policy=Sync())
    served.step_handler.sending.add(2)
    assert request(served, 1, BeginDrain()) == []
    assert served.control.awaited() == {2}
    served.step_handler.sending.clear()
    assert request(served, 0, BeginDrain()) == [(1, (False, 0)), (2, (True, 0))]


def test_the_status_of_worker_0_reaches_each_worker_once(monkeypatch):
    served = make(monkeypatch, workers=2)
    failure = InputError("disk full")
    assert request(served, 1, ShareFailure(1, False, None)) == []
    assert served.control.awaited() == {0}
    assert request(served, 0, ShareFailure(1, True, failure)) == [(1, failure), (2, failure)]
    served.control.remove(0)
    served._run(served._turns.popleft())
    assert request(served, 1, ShareFailure(1, False, None)) == [(2, failure)]
    ((rank, error),) = request(served, 1, ShareFailure(2, False, None))
    assert rank == 2
    assert "worker 0 ended before it wrote the last checkpoint" in str(error)


# ---- several things to wait for


def test_all_of_nothing_is_done():
    for nothing in (AllPending([]), AllPending([Port(1)])):
        for pending in nothing._left:
            pending.sizes = [1]
        assert nothing.done()
        assert nothing.spin_wait()
        assert nothing.done()


# ---- silent workers, without a watcher and with an explicit clock


def make_silent(workers=3, timeout_s=6.0):
    return module.SilentWorkers(Context(None, 0, 1, (0,) * (workers + 1), SimpleNamespace(timeout_s=timeout_s)), 0.0)


def test_it_looks_once_a_second_or_more_often():
    silent = make_silent()
    assert silent.due(0.0)
    silent.check((), (), True, 0.0)
    assert not silent.due(0.1)
    assert silent.due(module.SILENT_WORKER_TICK_S)


def test_the_limit_counts_from_the_last_request_of_the_awaited_worker():
    silent = make_silent()
    for now in range(100):
        silent.record_request(1, float(now))
        silent.check([1], [0, 2], True, now + 0.5)
    silent.check([1], [0, 2], True, 104.9)
    with pytest.raises(
        CollectiveTimeout, match="workers 0,2 have made their last step, and wait for worker 1: worker 1 "
    ):
        silent.check([1], [0, 2], True, 105.0)


def test_a_wait_lasts_for_the_limit_at_least():
    silent = make_silent()
    silent.check([1], [], True, 100.0)  # nobody is at the end
    silent.check([1], [0], True, 101.0)
    silent.check([1], [0], True, 106.9)
    with pytest.raises(CollectiveTimeout, match="service: worker 0 has made its last step, and waits for worker 1: "):
        silent.check([1], [0], True, 107.0)


def test_a_limit_of_less_than_a_second_names_the_worker():
    silent = make_silent(timeout_s=0.4)
    silent.check([1], [0], True, 100.0)
    with pytest.raises(CollectiveTimeout, match=r"waits for worker 1: worker 1 made no request for 0\.4 s"):
        silent.check([1], [0], True, 100.4)


def test_no_worker_is_late_if_none_is_awaited():
    silent = make_silent()
    silent.check([], [0], True, 100.0)
    silent.check([], [0], True, 200.0)


def test_another_wait_of_the_server_has_its_own_limit():
    silent = make_silent()
    silent.check([1], [0], True, 1.0)
    silent.check([1], [0], False, 100.0)
