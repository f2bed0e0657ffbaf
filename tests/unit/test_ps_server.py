"""Whose turn it is at a server, and its calls: with fakes of the post and of mailboxes, without MPI."""
# ruff: noqa: E402

from types import SimpleNamespace

import mpi4py
import numpy as np
import pytest

mpi4py.rc.initialize = False  # only its constants are needed

from allred import optim
from allred.errors import InputError
from allred.fusion import Tensor
from allred.ps import server as module
from allred.ps.calls import LATER, Registration
from allred.ps.consistency import Async, Sync
from allred.ps.drive import All
from allred.ps.placement import place
from allred.ps.post import CALL, REPLY, STEP
from allred.ps.record import PULL, PUSH, RECORD_BYTES, pack_request
from allred.ps.running import Running
from allred.ps.server import Server

TENSORS = [Tensor("a", (3,), np.dtype("float32")), Tensor("b", (2,), np.dtype("float64"))]
PULL_RECORD = pack_request(PULL, 0, 0, 1.0)


class Post:
    """Messages that have come, and those that were sent."""

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

    def tend(self):
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


def registration(worker=0, settings="as it is"):
    return Registration(worker, place(TENSORS, 1, "bytes", split=True), {"a": 0, "b": 1}, settings)


def make(monkeypatch, workers=3, policy=None, locking=True, optimizer=None, registered=True):
    """Server 0, which has parameters; what it hears comes by its `post` or its `calls.boxes`."""
    monkeypatch.setattr(module, "Post", Post)
    monkeypatch.setattr(module, "MpiPort", lambda post, source: Port())
    monkeypatch.setattr(module.native, "Mailbox", Mailboxes)
    running = Running(None, 0, 1, (0, *range(1, workers + 1)), SimpleNamespace(timeout_s=10.0))
    served = Server(running, optimizer or optim.SGD(lr=1.0), policy or Async(), locking, "as it is")
    if registered:
        served._calls._register(0, registration())
    return served


def kinds(served, looks):
    """What a server takes when it looks so often."""
    found = []
    for _ in range(looks):
        sizes = [len(served._post.waiting[tag]) for tag in (STEP, CALL)]
        served._look(wait=False)
        (turn,) = served._turns
        served._turns.clear()
        for _ in turn.steps:
            pass
        after = [len(served._post.waiting[tag]) for tag in (STEP, CALL)]
        found.append("step" if after[0] < sizes[0] else "call" if after[1] < sizes[1] else "box")
    return found


# ---- whose turn it is


def test_mailboxes_do_not_keep_messages_waiting(monkeypatch):
    served = make(monkeypatch)
    served._calls.boxes, served._calls.box_workers = [Port()], [0]
    served._calls.ports = {0: Port()}
    served._post.waiting[STEP] += [(2, PULL_RECORD)] * 3
    served._post.waiting[CALL] += [(3, ("statistics", ()))] * 3
    assert kinds(served, 110) == (["box"] * 16 + ["step"] + ["box"] * 16 + ["call"]) * 3 + ["box"] * 8


def test_steps_by_mpi_do_not_keep_calls_waiting(monkeypatch):
    served = make(monkeypatch)
    served._post.waiting[STEP] += [(2, PULL_RECORD)] * 10
    served._post.waiting[CALL] += [(3, ("statistics", ()))] * 3
    assert kinds(served, 13) == ["step", "call"] * 3 + ["step"] * 7


@pytest.mark.parametrize(
    ("policy", "optimizer", "locks"),
    [(Async(), optim.SGD(lr=1.0), False), (Sync(), optim.SGD(lr=1.0), True), (Async(), object(), True)],
)
def test_without_locking_it_locks_where_gradients_are_gathered(monkeypatch, policy, optimizer, locks):
    served = make(monkeypatch, policy=policy, optimizer=optimizer, locking=False, registered=False)
    assert served._locking == served._service._locking == locks


# ---- workers that go


def begin(served, worker, port, flags):
    steps = served._service.step(worker, port, (flags, 0, 0, float("nan")))
    served._turns.append(module._Turn(worker, steps))
    return served._turns[-1]


@pytest.mark.parametrize("locking", [False, True])
@pytest.mark.parametrize(("flags", "cells", "torn"), [(PUSH, 1, 1), (PUSH, 0, 0)])
def test_only_a_gradient_of_which_something_was_applied_is_torn(monkeypatch, flags, cells, torn, locking):
    served = make(monkeypatch, locking=locking)
    begin(served, 1, Port(cells), flags)
    gone = []
    monkeypatch.setattr(served, "_mourn", lambda: [served._leave(worker) for worker in gone])
    if locking:
        gone.append(1)
        served._run(served._turns.popleft())
    else:
        served._advance_all()
        served._leave(1)
        served._advance_all()
    assert served._service.account.torn == torn


def test_calls_and_leaves_are_not_torn(monkeypatch):
    served = make(monkeypatch, locking=False)

    def forever():
        while True:
            yield Port()

    served._turns.append(module._Turn(1, forever()))
    served._advance_all()
    served._leave(1)
    served._advance_all()
    assert served._service.account.torn == 0
    assert not served._turns


def test_the_last_ones_account_tells_what_was_left_over(monkeypatch):
    served = make(monkeypatch, workers=2, policy=Sync(replicas_to_aggregate=3))
    for worker in (0, 1):
        served._service.shard.end_add()
        served._calls._part(worker) if worker == 0 else served._leave(worker)
    assert not served._post.sent
    while served._turns:
        served._run(served._turns.popleft())
    ((rank, account),) = served._post.sent
    assert rank == 1
    assert account.unused == 2


# ---- registration


class Refusing(optim.SGD):
    """Its slots cannot be made."""

    def slots(self, param):
        if param.size != 3 or self.global_step:
            raise InputError("no slots today")
        self.global_step = 1  # it was asked whether it works element by element
        return {}


def test_what_is_wrong_with_worker_0s_registration_reaches_all(monkeypatch):
    served = make(monkeypatch, optimizer=Refusing(lr=1.0), registered=False)
    calls = served._calls
    assert calls._register(1, registration(1)) is LATER
    answer = calls._register(0, registration())
    assert "no slots today" in str(answer)
    assert served._post.sent == [(2, answer)]
    assert calls._register(2, registration(2)) is answer
    assert calls._first is None


def test_workers_that_register_before_worker_0_are_answered_after_it(monkeypatch):
    served = make(monkeypatch, registered=False)
    calls = served._calls
    assert calls._register(1, registration(1)) is LATER
    assert calls._register(2, registration(2, "otherwise")) is LATER
    assert calls._register(0, registration()) == (None, None)  # on another node: all goes by MPI
    (_, offers), (_, error) = served._post.sent
    assert offers == (None, None)
    assert "worker 2 has otherwise, worker 0 has as it is" in str(error)


def test_nobody_waits_for_a_worker_0_that_is_gone(monkeypatch):
    served = make(monkeypatch, registered=False)
    assert served._calls._register(1, registration(1)) is LATER
    served._leave(0)
    served._run(served._turns.popleft())
    assert "worker 0 has ended" in str(served._post.sent[0][1])
    assert "worker 0 has ended" in str(served._calls._register(2, registration(2)))


# ---- several things to wait for


def test_all_of_nothing_is_done():
    for nothing in (All([]), All([Port(1)])):
        for pending in nothing._left:
            pending.sizes = [1]
        assert nothing.done()
        assert nothing.spin_wait()
        assert nothing.done()
