"""Consistency policies: one contract for all coordinators under random schedules and leaves, then async and bounded.

The rules of sync: test_consistency_sync.py.
"""

import dataclasses
import random

import numpy as np
import pytest

from allred.errors import InputError
from allred.ps.consistency import Async, Bounded, Sync

POLICIES = [
    (Async(), 1),
    (Async(), 4),
    (Bounded(0), 1),
    (Bounded(0), 4),
    (Bounded(1), 3),
    (Bounded(4), 5),
    (Sync(), 1),
    (Sync(), 2),
    (Sync(), 5),
    (Sync(1), 4),
    (Sync(2), 3),
    (Sync(4), 5),
    (Sync(4), 4),
    (Sync(3), 1),
    (Sync(3), 2),
    (Sync(7), 3),
    (Sync(1, grace_s=1.0), 1),
    (Sync(1, grace_s=1.0), 4),
    (Sync(3, grace_s=0.0), 4),
    (Sync(4, grace_s=1.0), 3),
]
contract = pytest.mark.parametrize(("policy", "workers"), POLICIES, ids=lambda value: str(value))


class Job:
    """Workers, and server 0 as it drives a coordinator, in a random order. Has a book of its own of who may do what."""

    def __init__(self, policy, workers, seed):
        self.random = random.Random(seed)
        self.policy = policy
        self.machine = policy.coordinator(workers)
        self.weights = [self.random.choice([0.1, 1, 1, 10]) for _ in range(workers)]  # slow and fast ones
        self.phase = dict.fromkeys(range(workers), "computing")
        self.local_step = [0] * workers
        self.waiting = []
        self.given = []  # done in the current step of sync, by whom
        self.applied = 0
        self.steps = 0
        self.let_go = [0] * workers
        self.closed = False  # the current step, after its grace time
        self.in_ended = 0  # gradients in the steps of sync that have ended

    def move(self):
        """One thing happens. False if nobody can do anything."""
        if self.machine.in_grace and self.random.random() < 0.3:
            assert self.policy.grace_s is not None
            assert len(self.given) >= self.policy.replicas_to_aggregate
            self.closed = True
            self.machine.close()
            self.notice()
        if self.random.random() < 0.8:  # several events may come before server 0 asks who is ready
            self.collect()
        able = self.able() or self.collect() or self.able()
        if not able:
            return False
        worker = self.random.choices(able, [self.weights[w] for w in able])[0]
        if self.phase[worker] == "computing" and self.machine.asks:
            self.begin(worker)
        else:
            self.done(worker)
        return True

    def able(self):
        return [worker for worker, phase in self.phase.items() if phase != "waiting"]

    def begin(self, worker):
        in_step = len(self.given) + list(self.phase.values()).count("sending")
        fresh = self.local_step[worker] == self.machine.global_step and in_step < self.machine.needed
        counts = (self.machine.accepted, self.machine.dropped)
        before = [list(count) for count in counts]
        assert self.machine.begin(worker) is fresh
        before[0 if fresh else 1][worker] += 1
        assert before == [list(count) for count in counts]
        if fresh:
            self.phase[worker] = "sending"
        else:
            self.wait(worker)

    def done(self, worker):
        self.count(worker)
        self.machine.done(worker)
        self.wait(worker)
        self.notice()

    def count(self, worker):
        self.applied += 1
        self.given.append(worker)

    def wait(self, worker):
        self.phase[worker] = "waiting"
        self.waiting.append(worker)

    def leave(self, worker):
        carries = "sending" if self.machine.asks else "computing"
        sent = self.phase[worker] == carries and self.random.random() < 0.5
        accepted = list(self.machine.accepted)
        accepted[worker] += sent - (self.phase[worker] == "sending")  # withdrawn if not known to have arrived
        if sent:
            self.count(worker)
        self.machine.leave(worker, sent=sent)
        assert self.machine.accepted == accepted
        del self.phase[worker]
        if worker in self.waiting:
            self.waiting.remove(worker)
        assert self.machine.live == set(self.phase)
        self.notice()

    def notice(self):
        """Whether the step has ended, and when it should have."""
        before, self.steps = self.steps, self.machine.global_step
        if not isinstance(self.policy, Sync):
            assert self.steps == self.applied
            return
        of_all = len(set(self.phase).union(self.given))
        needed = self.policy.replicas_to_aggregate or of_all
        if self.policy.grace_s is not None:
            assert len(set(self.given)) == len(self.given)  # no worker gives two
            needed = len(self.given) + list(self.phase.values()).count("sending") if self.closed else of_all
        complete = len(self.given) == needed > 0
        assert self.steps == before + complete
        if complete:
            self.in_ended += len(self.given)
            self.given, self.closed = [], False
        else:
            assert self.machine.needed == needed

    def collect(self):
        """Those who may go on, do."""
        go = self.machine.ready()
        assert self.machine.ready() == []
        names = [worker for worker, _ in go]
        assert names == [worker for worker in self.waiting if worker in names]  # once each, longest wait first
        if isinstance(self.policy, Sync):
            able = [each for each in self.waiting if self.policy.grace_s is None or each not in self.given]
            assert names == able[: len(names)]
        for worker, step in go:
            assert step == (self.machine.global_step if self.machine.asks else self.machine.accepted[worker])
            self.local_step[worker] = step
            self.phase[worker] = "computing"
            self.waiting.remove(worker)
            self.let_go[worker] += 1

    def play(self, moves, leave=0.0):
        for _ in range(moves):
            if self.phase and self.random.random() < leave:
                self.leave(self.random.choice(sorted(self.phase)))
            assert self.move() or not self.phase, "deadlock"


@contract
@pytest.mark.parametrize("seed", range(5))
def test_every_worker_continues_once(policy, workers, seed):
    job = Job(policy, workers, seed)
    job.play(3000)
    assert min(job.let_go) > 0
    assert job.machine.global_step > 100
    assert sum(job.machine.accepted) >= job.applied


@contract
@pytest.mark.parametrize("seed", range(20))
def test_nothing_stops_while_workers_leave_at_random(policy, workers, seed):
    job = Job(policy, workers, seed)
    job.play(60 * workers, leave=0.02)
    for worker in sorted(job.phase)[1:]:
        job.leave(worker)
    before = job.machine.global_step
    if job.phase:
        job.play(12 * job.machine.needed)
        assert job.machine.global_step > before + 4
        job.leave(*job.phase)
    assert job.machine.live == set()
    assert job.machine.ready() == []


@contract
def test_the_gradients_of_a_long_run_are_all_accounted_for(policy, workers):
    """What was accepted is in the parameters, in the step under way, or with a worker that sends."""
    job = Job(policy, workers, seed=1)
    for _ in range(40):
        job.play(25)
        machine, sending = job.machine, list(job.phase.values()).count("sending")
        in_steps = job.in_ended + len(job.given) if machine.asks else machine.global_step
        if machine.asks and policy.grace_s is None:
            assert job.in_ended == machine.global_step * machine.needed
        assert sum(machine.accepted) == in_steps + sending
        assert machine.asks or machine.dropped == [0] * workers


@contract
def test_misuse_is_an_assertion_error_and_changes_nothing(policy, workers):
    machine = policy.coordinator(workers)

    def refused(words, call, *args, **kwargs):
        before = {key: str(value) for key, value in vars(machine).items()}
        with pytest.raises(AssertionError, match=words):
            call(*args, **kwargs)
        assert before == {key: str(value) for key, value in vars(machine).items()}

    for unknown in (-1, workers):
        calls = (machine.begin, machine.done, machine.leave) if machine.asks else (machine.done, machine.leave)
        for call in calls:
            refused(rf"worker {unknown} is not one of the live workers \[0", call, unknown)
    if machine.asks:
        refused("done: worker 0 is computing, but has to be sending", machine.done, 0)
        refused("leave: worker 0 is computing, but has to be sending", machine.leave, 0, sent=True)
        assert machine.begin(0)
        refused("begin: worker 0 is sending, but has to be computing", machine.begin, 0)
    else:
        refused("begin: worker 0 has asked, but in this policy", machine.begin, 0)
    machine.done(0)
    if machine.waits:
        now = "waiting, but has to be " + ("sending" if machine.asks else "computing")
        refused(f"done: worker 0 is {now}", machine.done, 0)
        refused(f"leave: worker 0 is {now}", machine.leave, 0, sent=True)
    if machine.asks:
        refused("begin: worker 0 is waiting, but has to be computing", machine.begin, 0)
    machine.leave(0)
    refused("leave: worker 0 is not one of the live", machine.leave, 0)
    refused("done: worker 0 is not one of the live", machine.done, 0)


@pytest.mark.parametrize("seed", range(20))
def test_sync_with_all_live_workers_never_drops(seed):
    """Each gives one gradient a step, also those that leave after it, and whoever leaves when."""
    job = Job(Sync(), 6, seed)
    job.play(400, leave=0.01)
    assert job.machine.dropped == [0] * 6
    assert job.machine.global_step > 20


# Async.


def test_async_never_waits_and_needs_no_ready():
    machine = Async().coordinator(3)
    assert (machine.asks, machine.waits, machine.needed) == (False, False, 1)
    for _ in range(5):
        machine.done(1)
    machine.done(0)
    assert machine.ready() == [(1, 5), (0, 1)]
    assert (machine.global_step, machine.accepted, machine.dropped) == (6, [1, 5, 0], [0, 0, 0])
    machine.done(1)
    machine.leave(1)
    assert machine.ready() == []
    machine.leave(2, sent=True)
    assert (machine.global_step, machine.accepted) == (8, [1, 6, 1])


# Bounded staleness.


def test_bounded_limits_how_far_a_worker_runs_ahead():
    machine = Bounded(2).coordinator(3)
    assert (machine.asks, machine.waits, machine.needed) == (False, True, 1)
    for clock in (1, 2):
        machine.done(0)
        assert machine.ready() == [(0, clock)]
    machine.done(0)
    assert machine.ready() == []  # 3 ahead of both
    machine.done(2)
    assert machine.ready() == [(2, 1)]
    machine.done(1)
    assert machine.ready() == [(0, 3), (1, 1)]
    assert (machine.global_step, machine.accepted, machine.max_lead) == (5, [3, 1, 1], 2)


def test_gradients_that_were_served_without_the_coordinator_count():
    machine = Bounded(2).coordinator(2)
    machine.count_served(0, 2)
    machine.done(0)
    assert machine.ready() == []  # 3 ahead
    with pytest.raises(AssertionError, match="worker 0 is waiting"):
        machine.count_served(0, 1)
    machine.count_served(1, 1)
    assert machine.ready() == [(0, 3)]
    assert (machine.global_step, machine.accepted) == (4, [3, 1])


def test_bounded_0_is_bulk_synchronous():
    machine = Bounded(0).coordinator(3)
    for clock in range(1, 4):
        for worker in (2, 0):
            machine.done(worker)
            assert machine.ready() == []
        machine.done(1)
        assert machine.ready() == [(2, clock), (0, clock), (1, clock)]
    assert machine.max_lead == 0


@pytest.mark.parametrize("sent", [False, True])
def test_bounded_does_not_wait_for_workers_that_have_left(sent):
    machine = Bounded(0).coordinator(3)
    machine.done(0)
    machine.done(1)
    assert machine.ready() == []
    machine.leave(2, sent=sent)
    assert machine.ready() == [(0, 1), (1, 1)]
    assert (machine.global_step, machine.accepted) == ((3, [1, 1, 1]) if sent else (2, [1, 1, 0]))


@pytest.mark.parametrize("staleness", [0, 1, 2, 5])
@pytest.mark.parametrize("seed", range(10))
def test_leads_and_ages_never_exceed_their_bounds(staleness, seed):
    """Pulls come some time after ready, and updates some time before done, as over a network."""
    rng, workers = random.Random(seed), 4
    machine = Bounded(staleness).coordinator(workers)
    pulled, gone_in = dict.fromkeys(range(workers)), dict.fromkeys(range(workers), False)
    weights = [rng.choice([0.02, 1, 5]) for _ in range(workers)]
    updates, waiting = [0] * workers, set()
    for _ in range(4000):
        able = [worker for worker in machine.live if worker not in waiting]
        assert able
        worker = rng.choices(able, [weights[w] for w in able])[0]
        if pulled[worker] is None:
            pulled[worker] = sum(updates)
        elif not gone_in[worker]:
            gone_in[worker] = True
            assert sum(updates) - pulled[worker] <= (workers - 1) * (2 * staleness + 1)
            updates[worker] += 1
        else:
            pulled[worker], gone_in[worker] = None, False
            machine.done(worker)
            waiting.add(worker)
        if len(machine.live) > 2 and rng.random() < 0.0005:
            gone = rng.choice(sorted(machine.live))
            machine.leave(gone)
            waiting.discard(gone)
        for name, clock in machine.ready():
            assert clock - min(machine.accepted[w] for w in machine.live) <= staleness
            waiting.remove(name)
    assert machine.max_lead == staleness


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_the_largest_age_is_reached(staleness):
    machine = Bounded(staleness).coordinator(4)
    for clock in range(1, staleness + 1):
        machine.done(0)
        assert machine.ready() == [(0, clock)]
    pulled, others = machine.global_step, 0
    while go := [worker for worker in (1, 2, 3) if machine._phase[worker] == "computing"]:
        for worker in go:
            machine.done(worker)
            others += 1
        machine.ready()
    machine.done(0)
    assert machine.global_step - pulled - 1 == others == 3 * (2 * staleness + 1)


# What users pass.


@pytest.mark.parametrize("bad", [-1, 1.0, "2", None, True, float("inf")])
def test_bounded_refuses(bad):
    with pytest.raises(InputError) as error:
        Bounded(staleness=bad)
    assert str(error.value) == (
        f"Bounded: staleness must be an integer >= 0, but is {bad!r}; "
        "0 keeps all workers together, and Async() has no bound"
    )


@pytest.mark.parametrize("field", ["replicas_to_aggregate", "total_num_replicas"])
@pytest.mark.parametrize("bad", [0, -1, 2.0, "2", False, True])
def test_sync_refuses(field, bad):
    with pytest.raises(InputError, match=rf"Sync: {field} must be an integer >= 1, but is '?{bad}'?; None means \w+"):
        Sync(**{field: bad})


@pytest.mark.parametrize("bad", [-1.0, True, "1"])
def test_sync_refuses_other_times(bad):
    with pytest.raises(InputError, match=f"Sync: grace_s must be a finite number >= 0, but is '?{bad}'?;"):
        Sync(2, grace_s=bad)


def test_the_number_of_workers_is_checked():
    with pytest.raises(InputError) as error:
        Sync(2, total_num_replicas=4).coordinator(3)
    assert str(error.value) == (
        "Sync: total_num_replicas is 4, but the number of workers is 3; leave it out, or start 4 workers"
    )
    assert Sync(2, total_num_replicas=3).coordinator(3).live == {0, 1, 2}
    for policy in (Async(), Bounded(), Sync()):
        with pytest.raises(InputError, match="needs at least 1 worker, but has 0; start more ranks"):
            policy.coordinator(0)


def test_policies_are_plain_records():
    assert Bounded() == Bounded(np.int64(4))
    assert type(Bounded(np.int64(2)).staleness) is int
    assert type(Sync(np.int32(2)).replicas_to_aggregate) is int
    for policy in (Async(), Bounded(), Sync()):
        with pytest.raises(dataclasses.FrozenInstanceError):
            policy.staleness = 3


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (Async(), "async: each gradient is applied when it arrives"),
        (Bounded(1), "bounded staleness: no worker runs more than 1 clock ahead of the slowest"),
        (Bounded(0), "bounded staleness: no worker runs more than 0 clocks ahead of the slowest"),
        (Sync(), "sync: a step is the mean of one gradient of every live worker"),
        (Sync(None, 4), "sync: a step is the mean of one gradient of every live worker; 4 workers"),
        (Sync(1), "sync: a step is the mean of the first 1 fresh gradient, later ones are dropped"),
        (Sync(4, 4), "sync: a step is the mean of the first 4 fresh gradients, later ones are dropped; 4 workers"),
        (
            Sync(3, 1),
            "sync: a step is the mean of the first 3 fresh gradients, later ones are dropped; "
            "1 worker, several gradients of each",
        ),
    ],
)
def test_policies_describe_themselves(policy, words):
    assert policy.describe() == words
