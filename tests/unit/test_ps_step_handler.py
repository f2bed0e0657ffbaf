"""Steps at a server, without MPI and without processes: a StepHandler and its Shard, with ports that hold lists."""

from collections import deque

import numpy as np
import pytest

from allred import optim
from allred.embeddings.row_store import RowStore
from allred.embeddings.table_form import TableForm
from allred.errors import AllredError
from allred.fusion import Tensor
from allred.ps.consistency import Async, Bounded, Sync
from allred.ps.placement import place
from allred.ps.protocol import (
    ABSENT,
    BEGIN,
    DONE,
    DRAINING,
    DROPPED,
    INIT,
    PULL,
    PUSH,
    TABLES,
    StepRequest,
    unpack_reply,
)
from allred.ps.shard import Shard, lay_out, locks
from allred.ps.shm_transport import MailboxPort
from allred.ps.step_handler import StepHandler
from allred.ps.table_cells import TableGradient, push_parts

NAN = float("nan")
TENSORS = [Tensor("a", (3,), np.dtype("float32")), Tensor("b", (2, 2), np.dtype("float64"))]
ALL = PUSH | PULL  # of a step of async
SYNC = BEGIN | PUSH | DONE | PULL  # of a step of sync with one server


class Port:
    """A server's end of one worker's traffic. `room_for`: how many more cells the worker takes."""

    waits_for_peers, progress_count = False, 0

    def __init__(self):
        self.cells, self.given, self.answers, self.room_for, self.dead = deque(), [], [], 10**9, False

    def open(self, sizes):
        self.sizes = list(sizes)

    def cell(self):
        if self.dead:
            raise ConnectionResetError
        return self.cells[0] if self.cells else None

    def take(self):
        assert len(self.cells.popleft()) == self.sizes.pop(0)

    def done(self):
        return self.cell() is not None

    def give(self, cell):
        if len(self.given) >= self.room_for:
            return False
        self.given.append(bytes(cell))
        return True

    @property
    def room(self):
        return self

    def answer(self, record):
        self.answers.append(unpack_reply(record))

    def has_read(self, number):
        return True


class Own:
    """A user's own optimizer: its calls, and plain steps."""

    def __init__(self):
        self.calls = []

    def step(self, params, grads):
        self.calls.append((params, grads))
        for name in params:
            if grads[name] is not None:
                params[name] -= grads[name]


class Whole(optim.Optimizer):
    """One of ours that needs whole tensors."""

    def slots(self, param):
        return {"count": np.zeros(())}

    def update(self, param, grad, slots, lr, step):
        slots["count"] += 1
        param -= lr * grad


class Served:
    """One server of several."""

    def __init__(self, policy, workers, optimizer=None, locking=True, server=0, servers=1, how="round_robin"):
        placement = place(TENSORS, servers, how, split=False)
        layout = lay_out(TENSORS, placement.of(server))
        self.optimizer = optim.SGD(lr=1.0) if optimizer is None else optimizer
        self.handler = StepHandler(server, policy, workers, locking)
        self.shard = Shard(layout, bytearray(layout.nbytes), self.optimizer, {"a": 0, "b": 1})
        self.handler.shard = self.shard
        self.ports = [Port() for _ in range(workers)]

    @property
    def statistics(self):
        return self.handler.statistics

    def cells(self, value):
        """A gradient of equal elements, as received."""
        groups = self.shard.layout.groups
        return [np.full(g.elements, value, g.gradient).tobytes() for g in groups]

    def ask(self, worker, flags, value=None, step=0, version=0, lr=NAN, absent=None, weight=1.0):
        """Begin a request; `value` None: its cells do not come yet."""
        port = self.ports[worker]
        if absent is not None:
            flags |= ABSENT
            marks = [piece.tensor in absent for piece in self.shard.layout.pieces]
            port.cells.append(np.array(marks, np.uint8).tobytes())
        if value is not None:
            port.cells.extend(self.cells(value))
        return self.handler.step(worker, port, StepRequest(flags, step, version, lr, weight))

    def do(self, *arguments, **keywords):
        """A request to its end, and what comes of it; the worker's answer, if it has one."""
        self.finish(self.ask(*arguments, **keywords))
        answers = self.ports[arguments[0]].answers
        return answers.pop() if answers else None

    def finish(self, steps):
        for _ in steps:
            raise AssertionError("it waits for something")
        while self.handler.turns:
            for _ in self.handler.turns.popleft().steps:
                raise AssertionError("it waits for something")

    def leave(self, worker):
        self.finish(self.handler.leave(worker))

    def values(self):
        """The elements of each tensor that lies here; each tensor's have to be equal."""
        found = {}
        for index, piece in enumerate(self.shard.layout.pieces):
            (value,) = set(self.shard.parameter(index).tolist())
            found[TENSORS[piece.tensor].name] = value
        return found


# ---- gradients in, parameters out


def test_a_step_of_async_applies_the_gradient_and_returns_the_parameters():
    served = Served(Async(), 2)
    assert served.do(0, PUSH | INIT, 5.0) == (0, 1, 0, 0)
    assert served.do(0, ALL, 1.0) == (0, 1, 1, 0)
    assert served.do(1, ALL, 2.0) == (0, 1, 2, 1)  # its parameters lacked one update
    assert served.values() == {"a": 2.0, "b": 2.0}
    assert served.ports[1].given == served.cells(2.0)
    assert (served.statistics.gradients, served.statistics.updates, served.statistics.pulls) == (2, 2, 2)
    assert served.statistics.staleness == {0: 1, 1: 1}
    assert served.statistics.bytes_in == 3 * (3 * 4 + 4 * 8)


class NoCompiledSteps:
    """Steps in C, which take the cells from a mailbox."""

    def apply(self, *arguments):
        raise ValueError("no request is being served: it came by MPI")


def test_a_step_by_mpi_of_a_worker_with_a_mailbox_that_it_could_not_open():
    served = Served(Async(), 1)
    served.handler.compiled, served.handler.boxes = NoCompiledSteps(), {0: 0}
    served.do(0, PUSH | INIT, 5.0)
    assert served.do(0, ALL, 1.0) == (0, 1, 1, 0)
    assert served.values() == {"a": 4.0, "b": 4.0}


def test_sync_answers_when_the_step_is_complete():
    served = Served(Sync(), 2)
    assert served.do(0, SYNC, 1.0) is None
    assert served.handler.describe_waits() == "worker 0 waits for worker 1"
    assert served.do(1, SYNC, 3.0) == (0, 1, 1, 0)
    assert served.ports[0].answers == [(0, 1, 1, 0)]
    assert served.values() == {"a": -2.0, "b": -2.0}
    assert served.ports[0].given == served.cells(-2.0)


def test_a_late_gradient_is_dropped_and_counted():
    served = Served(Sync(replicas_to_aggregate=1), 2)
    assert served.do(0, SYNC, 1.0) == (0, 1, 1, 0)
    assert served.do(1, SYNC, 100.0) == (DROPPED, 1, 1, 1)
    assert served.values() == {"a": -1.0, "b": -1.0}
    assert served.statistics.dropped == {1: 1}
    assert served.statistics.gradients == 1


def test_a_step_waits_for_its_grace_time_and_weights_the_gradients():
    served = Served(Sync(replicas_to_aggregate=2, grace_s=3.0), 5)
    served.handler.end_grace(1.0)
    served.do(0, SYNC, 1.0, weight=3.0)
    served.handler.end_grace(2.0)  # too few
    served.do(1, SYNC, 9.0)
    for now in (2.5, 5.4):  # begins, and lasts
        served.handler.end_grace(now)
        assert served.shard.version == len(served.handler.turns) == 0
    served.do(2, SYNC, 9.0, weight=0.0)
    next(last := served.ask(3, SYNC))  # its cells do not come yet
    served.handler.end_grace(5.5)  # the step takes this one, and no other
    served.finish(())
    assert served.shard.version == 0
    served.ports[3].cells.extend(served.cells(8.0))
    served.finish(last)
    assert served.values() == {"a": -4.0, "b": -4.0}
    assert [port.answers for port in served.ports] == [*[[(0, 1, 1, 0)]] * 4, []]
    served.do(0, SYNC, 1.0, step=1)
    served.do(1, SYNC, 1.0, step=1)
    served.handler.end_grace(6.0)  # of the next step
    assert served.shard.version == 1
    served.handler.end_grace(9.0)
    served.finish(())
    assert served.shard.version == 2
    assert served.do(2, SYNC, 100.0, step=1, version=1) == (DROPPED, 2, 2, 1)


def test_gradients_of_weight_0_only_change_nothing():
    served = Served(Sync(), 2, optimizer=optim.SGD(lr=1.0, momentum=0.5))
    for step, weight in enumerate([1.0, 0.0, 0.0]):
        for worker in (0, 1):
            served.do(worker, SYNC, 2.0, step=step, absent=[] if weight else [0, 1], weight=weight)
    assert served.values() == {"a": -2.0, "b": -2.0}
    assert served.shard.version == 3


def test_bounded_holds_the_fast_worker_back():
    served = Served(Bounded(staleness=0), 2)
    assert served.do(0, PUSH | DONE | PULL, 1.0) is None
    assert served.do(1, PUSH | DONE | PULL, 1.0) == (0, 1, 2, 1)
    assert served.ports[0].answers == [(0, 1, 2, 0)]


def test_a_leave_completes_the_step_of_waiting_workers():
    served = Served(Sync(), 3)
    served.do(0, SYNC, 1.0)
    served.do(1, SYNC, 3.0)
    served.leave(2)
    assert served.values() == {"a": -2.0, "b": -2.0}
    assert [port.answers for port in served.ports] == [[(0, 1, 1, 0)], [(0, 1, 1, 0)], []]


def test_a_leave_in_the_middle_of_a_gradient_of_sync_is_an_error():
    served = Served(Sync(), 2)
    next(served.ask(1, SYNC))
    with pytest.raises(AllredError, match="worker 1 failed while it sent its gradient"):
        served.leave(1)


def test_so_it_is_at_servers_that_do_not_coordinate_once_a_part_is_in_the_sum():
    for cells, is_torn in ((0, False), (1, True)):
        served = Served(Sync(), 3)
        served.do(0, PUSH, 1.0)
        push = served.ask(1, PUSH)
        next(push)
        if cells:
            served.ports[1].cells.append(served.cells(100.0)[0])
            next(push)
        push.close()
        if is_torn:
            with pytest.raises(AllredError, match="worker 1 failed while it sent its gradient"):
                served.leave(1)
        else:
            served.leave(1)
            served.do(2, PUSH, 3.0)
            assert served.values() == {"a": -2.0, "b": -2.0}


def test_a_piece_without_any_gradient_is_unchanged():
    served = Served(Sync(), 2, optimizer=optim.SGD(lr=1.0, weight_decay=0.5))
    served.do(0, PUSH | INIT, 4.0)
    served.do(0, SYNC, 0.0, absent=[0, 1])
    served.do(1, SYNC, 0.0, absent=[1])
    assert served.values() == {"a": 2.0, "b": 4.0}


# ---- who locks


@pytest.mark.parametrize("policy", [Async(), Bounded(2)])
def test_no_locking_where_it_was_not_asked_for(policy):
    assert not locks(False, policy, optim.SGD(lr=1.0))
    assert locks(True, policy, optim.SGD(lr=1.0))


def test_locking_where_gradients_are_gathered_first():
    assert locks(False, Sync(), optim.SGD(lr=1.0))
    assert locks(False, Async(), Own())
    assert locks(False, Async(), Whole(lr=1.0))


# ---- pushes of several workers under way at once: Async without locking


def test_each_push_has_its_own_absent_pieces():
    served = Served(Async(), 2, locking=False)
    one, other = served.ask(0, ALL), served.ask(1, ALL, absent=[0, 1])
    next(one)
    for port, value in zip(served.ports, (1.0, 0.0), strict=True):
        port.cells.extend(served.cells(value))
    served.finish(other)
    served.finish(one)
    assert served.values() == {"a": -1.0, "b": -1.0}  # all of worker 0's gradient has come


def test_pieces_that_are_absent_stay_while_another_push_begins():
    served = Served(Async(), 2, optimizer=optim.SGD(lr=1.0, weight_decay=0.5), locking=False)
    served.do(0, PUSH | INIT, 4.0)
    one, other = served.ask(0, ALL, absent=[0, 1]), served.ask(1, ALL)
    next(one)
    next(other)
    served.ports[0].cells.extend(served.cells(0.0))
    served.finish(one)
    assert served.values() == {"a": 4.0, "b": 4.0}


def test_each_push_has_its_own_learning_rate_and_step():
    served = Served(Async(), 2, optimizer=optim.SGD(lr=lambda step: 1.0 / 4**step), locking=False)
    one, other = served.ask(0, ALL), served.ask(1, ALL)
    next(one)
    next(other)
    for port, value in zip(served.ports, (1.0, 1.0), strict=True):
        port.cells.extend(served.cells(value))
        served.finish(one if value and port is served.ports[0] else other)
        if port is served.ports[0]:
            assert served.values() == {"a": -1.0, "b": -1.0}
    assert served.values() == {"a": -1.25, "b": -1.25}
    assert served.optimizer.global_step == 2


# ---- a server without tensors


@pytest.mark.parametrize("policy", [Async(), Sync()])
def test_a_server_without_tensors_counts_and_makes_no_call_of_a_users_own_optimizer(policy):
    flags, own = (ALL if policy == Async() else SYNC), Own()
    served = Served(policy, 1, optimizer=own, server=2, servers=3)
    assert served.shard.layout.pieces == ()
    assert served.do(0, PUSH | INIT, 0.0) == (0, 1, 0, 0)
    for step in range(3):
        assert served.do(0, flags, 1.0, step=step, version=step) == (0, step + 1, step + 1, 0)
    assert own.calls == []
    assert served.statistics.updates == 3
    assert served.do(0, flags, 1.0, step=3, version=3, absent=[0, 1]) == (0, 4, 4, 0)


@pytest.mark.parametrize("make", [Whole, optim.SGD])
def test_a_server_without_tensors_counts_the_steps_of_ours(make):
    served = Served(Async(), 1, optimizer=make(lr=1.0), server=2, servers=3)
    for _ in range(3):
        served.do(0, ALL, 1.0)
    assert served.shard.version == served.optimizer.global_step == 3
    assert served.shard.state() == ({"global_step": 3}, {})


def test_a_users_own_optimizer_gets_the_nest_of_what_is_here():
    own = Own()
    served = Served(Async(), 1, optimizer=own, server=1, servers=2)
    served.do(0, ALL, 1.0)
    served.do(0, ALL, 0.0, absent=[1])
    assert [sorted(params) for params, _ in own.calls] == [["b"], ["b"]]
    assert own.calls[1][1] == {"b": None}
    assert served.values() == {"b": -1.0}


# ---- sync on several servers: no pull and no sum mixes steps


class Job:
    """Sync with several servers, and workers that do one thing after the other."""

    def __init__(self, workers, servers=2, policy=None):
        self.servers = [Served(policy or Sync(), workers, server=s, servers=servers) for s in range(servers)]
        self.steps = [0] * workers

    def push(self, worker, value, weight=1.0):
        """A gradient to all servers. False if it is dropped."""
        is_used = not self.servers[0].do(worker, BEGIN, step=self.steps[worker]).flags
        for served in self.servers if is_used else ():
            served.do(worker, PUSH, value, step=self.steps[worker], weight=weight)
        self.went_on(worker, self.servers[0].do(worker, DONE, step=self.steps[worker]))
        return is_used

    def end_grace(self, now):
        self.servers[0].handler.end_grace(now)
        self.servers[0].finish(())

    def went_on(self, worker, answer):
        if answer is not None:
            self.steps[worker] = answer.step

    def hear(self):
        """What server 0 has said to those that waited."""
        for worker, port in enumerate(self.servers[0].ports):
            while port.answers:
                self.went_on(worker, port.answers.pop())

    def pull(self, worker):
        """The values of all tensors, and the versions."""
        versions = [served.do(worker, PULL, step=self.steps[worker]).version for served in self.servers]
        return [value for served in self.servers for value in served.values().values()], versions


def test_a_drain_waits_until_all_servers_have_a_gradient_and_begins_no_other():
    job = Job(3)
    job.push(0, 1.0)
    job.push(1, 3.0)
    assert not job.servers[0].do(2, BEGIN).flags
    job.servers[0].do(2, PUSH, 5.0)  # its request to server 1 comes later
    assert [served.shard.version for served in job.servers] == [1, 0]
    assert job.servers[0].handler.drain() is None
    job.servers[1].do(2, PUSH, 5.0)
    job.servers[0].do(2, DONE)
    assert [served.handler.drain() for served in job.servers] == [1, 1]
    assert job.servers[0].do(0, BEGIN, step=1).flags == DROPPED | DRAINING


def test_after_a_drain_a_leave_completes_no_step():
    job = Job(3)
    job.push(0, 1.0)
    job.push(1, 3.0)
    job.servers[0].leave(2)
    assert [served.handler.drain() for served in job.servers] == [1, 0]
    job.servers[1].leave(2)
    assert job.servers[1].shard.version == 0
    job.servers[1].do(0, 0, step=1)  # as Client.begin_drain does
    assert job.pull(0)[1] == [1, 1]


@pytest.mark.parametrize("policy", [Sync(), Sync(replicas_to_aggregate=3, grace_s=1.0)])
@pytest.mark.parametrize("seed", range(30))
def test_no_step_mixes_whatever_the_order(seed, policy):
    """Workers step and leave at random, and servers hear of leaves late and in orders of their own."""
    rng = np.random.default_rng(seed)
    servers = int(rng.integers(2, 4))
    # given: (weight, gradient) of the step under way. expected: the parameters at each step.
    job, expected, given, dropped = Job(6, servers, policy), [0.0], [], 0
    living, waiting = set(range(6)), {}  # step of the gradient that a worker has given
    unheard = [[] for _ in range(servers)]
    for number in range(200):
        computing = sorted(living - set(waiting))
        if computing and rng.random() < 0.7:
            worker, value = int(rng.choice(computing)), float(2 ** rng.integers(0, 6))
            if job.steps[worker] == len(expected) - 1:  # else its gradient will be dropped
                found, versions = job.pull(worker)
                assert found == pytest.approx([expected[job.steps[worker]]] * len(found))
                assert versions == [job.steps[worker]] * servers
            waiting[worker], weight = job.steps[worker], float(rng.integers(1, 4))
            if job.push(worker, value, weight):
                given.append((weight, value))
            else:
                dropped += 1
        elif len(living) > 1 and rng.random() < 0.1:
            gone = int(rng.choice(sorted(living)))
            living.discard(gone)
            for each in unheard:
                each.append(gone)
        if rng.random() < 0.2:
            job.end_grace(float(number))
        server = int(rng.integers(servers))
        if unheard[server] and rng.random() < 0.3:
            job.servers[server].leave(unheard[server].pop(int(rng.integers(len(unheard[server])))))
        if job.servers[0].handler.coordinator.global_step == len(expected):
            expected.append(expected[-1] - sum(w * value for w, value in given) / sum(w for w, _ in given))
            given = []
        job.hear()
        waiting = {worker: step for worker, step in waiting.items() if job.steps[worker] == step}
    assert len(expected) > 5
    assert policy.grace_s is not None or dropped == 0


def test_a_step_number_that_no_server_can_have_is_a_mistake():
    job = Job(2)
    with pytest.raises(AssertionError, match="no gradient"):
        job.servers[1].do(0, PULL, step=1)


# ---- statistics


def torn(request, *cells, policy=None, optimizer=None, room_for=10**9, die=False):
    """Return the number of torn gradients when the worker is gone after this number of cells."""
    served = Served(policy or Async(), 2, optimizer=optimizer)
    served.ports[0].room_for = room_for
    steps = served.ask(0, request)
    next(steps)
    served.ports[0].cells.extend(served.cells(1.0)[: len(cells)])
    if cells:
        next(steps)
    if die:
        served.ports[0].dead = True
        with pytest.raises(ConnectionResetError):
            next(steps)
    else:
        steps.close()
    return served.statistics.torn


def test_a_partly_applied_gradient_is_torn():
    assert torn(ALL, "a") == 1
    assert torn(ALL, "a", die=True) == 1
    assert torn(ALL, "a", "b", room_for=1) == 1


def test_what_is_no_gradient_or_changes_nothing_is_not_torn():
    assert torn(ALL) == 0
    assert torn(ALL, die=True) == 0
    assert torn(PUSH | INIT, "a") == 0
    assert torn(PUSH, "a", optimizer=Own()) == 0  # only gathered
    assert torn(PUSH, "a", policy=Sync()) == 0  # in the sum of a step, which ends the job
    served = Served(Async(), 2)
    served.ports[0].room_for = 1
    pull = served.ask(0, PULL)
    next(pull)
    pull.close()
    assert served.statistics.torn == 0


def with_rows(served, worker, flags, ids=1):
    """Begin a push whose rows have arrived, and none of its parameters."""
    served.shard.tables = [RowStore(TableForm("rows", 2, None, 0.0, optim.SGD(1.0), np.float32, 0, 1, None, 1))]
    rows = TableGradient(np.arange(ids, dtype=np.uint64), np.ones((ids, 2), np.float32), NAN)
    parts, _ = push_parts([rows])
    served.ports[worker].cells.extend(part.reshape(-1).view(np.uint8) for part in parts)
    steps = served.ask(worker, flags | TABLES)
    next(steps)
    return steps


@pytest.mark.parametrize("absent", [0, ABSENT])
def test_so_is_one_of_which_only_rows_were_applied(absent):
    for ids in (0, 1):
        served = Served(Async(), 2, optimizer=Own())
        with_rows(served, 0, PUSH | absent, ids).close()
        assert served.statistics.torn == ids


@pytest.mark.parametrize("absent", [0, ABSENT])
def test_rows_in_the_sum_of_a_step_are_a_part_of_a_gradient(absent):
    for ids in (0, 1):
        served = Served(Sync(), 3, server=1, servers=2)
        with_rows(served, 1, PUSH | absent, ids).close()
        if ids:
            with pytest.raises(AllredError, match="worker 1 failed while it sent its gradient"):
                served.leave(1)
        else:
            served.leave(1)
        assert served.statistics.torn == 0


def test_gradients_of_a_step_that_stays_incomplete_are_counted_at_the_end():
    served = Served(Sync(replicas_to_aggregate=3), 2)
    served.do(0, SYNC, 1.0)
    served.do(1, SYNC, 1.0)
    served.leave(0)
    assert served.statistics.unused == 0
    served.leave(1)
    assert served.statistics.unused == served.statistics.gradients == 2
    assert served.statistics.updates == 0


def test_nothing_is_left_over_where_each_living_worker_gives_one():
    served = Served(Sync(), 2)
    served.do(0, SYNC, 4.0)
    served.leave(0)
    served.leave(1)
    assert (served.statistics.unused, served.statistics.updates) == (0, 1)
    assert served.values() == {"a": -4.0, "b": -4.0}


def test_a_worker_that_has_left_may_not_continue():
    served = Served(Sync(replicas_to_aggregate=1), 3)
    served.do(0, SYNC, 1.0)
    assert served.do(1, BEGIN).flags == DROPPED
    served.handler.release()  # it may go on, as soon as it has come to wait
    served.leave(1)
    assert not served.handler._may_continue


# ---- locking: a pull brings one version


class Box:
    """Of a worker that copies when it is told to."""

    def __init__(self):
        self.read = 0

    def cell(self):
        return None

    take = give = answer = lambda self, *_: None


def test_a_cell_is_not_changed_before_the_worker_has_copied_it():
    served = Served(Async(), 2)
    box = Box()
    served.finish(served.handler.step(1, MailboxPort(box), StepRequest(PULL, 0, 0, NAN)))
    push = served.ask(0, ALL, 1.0)
    next(push)
    assert served.values() == {"a": 0.0, "b": 0.0}
    box.read = 1
    next(push)
    assert served.values() == {"a": -1.0, "b": 0.0}
    box.read = 2
    served.finish(push)
    assert served.values() == {"a": -1.0, "b": -1.0}


def test_no_push_waits_for_a_dead_reader_or_without_locking():
    served = Served(Async(), 2)
    served.finish(served.handler.step(1, MailboxPort(Box()), StepRequest(PULL, 0, 0, NAN)))
    push = served.ask(0, ALL, 1.0)
    next(push)
    served.handler.forget_reader(1)
    served.finish(push)
    served = Served(Async(), 2, locking=False)
    served.finish(served.handler.step(1, MailboxPort(Box()), StepRequest(PULL, 0, 0, NAN)))
    served.do(0, ALL, 1.0)
