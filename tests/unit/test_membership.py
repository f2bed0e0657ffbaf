"""The agreement of processes on worlds: all orders and faults of small jobs, random faults of larger ones, examples."""

import dataclasses
import random

import pytest
from membership_model import Job, Model, explore

from allred.membership.agreement import (
    Change,
    Finished,
    Form,
    Poison,
    Ready,
    Restart,
    Running,
    Stop,
    WorldCoordinator,
)
from allred.membership.member import Member

# Jobs: (job, the final states that it can reach).
JOBS = {
    "first world": (Job(2, 1, "AB", steps=1, kills=1, interrupts=1), "training waiting Restart"),
    "first world, joiner": (Job(2, 1, "AB", "C", steps=1, kills=1), "training waiting"),
    "spare": (Job(2, 2, "ABC", steps=1, kills=2, starts_running=True), "training waiting Restart"),
    "joiner, 2 deaths": (Job(2, 1, "AB", "C", steps=1, kills=2, starts_running=True), "training Restart"),
    "3 ranks, 2 deaths": (Job(3, 2, "ABC", steps=1, kills=2, starts_running=True), "training waiting Restart"),
    "3 ranks, joiner": (Job(3, 2, "ABC", "D", steps=1, kills=1, starts_running=True), "training"),
    "4 ranks": (Job(4, 2, "ABCD", steps=1, kills=1, starts_running=True), "training"),
    "end": (Job(3, 2, "ABC", steps=1, kills=1, ends=True, starts_running=True), "Stop"),
    "leave": (Job(2, 1, "AB", steps=1, kills=1, leaves=2, starts_running=True), "training Stop Restart"),
    "last rank leaves": (Job(1, 1, "A", "B", steps=1, kills=1, leaves=1), "training waiting Stop Restart"),
    "resize": (Job(2, 1, "AB", "C", steps=1, resizes=(1, 3), starts_running=True), "training"),
    "resize, death": (Job(3, 1, "ABC", steps=1, kills=1, resizes=(1,), starts_running=True), "training Restart"),
}


@pytest.mark.parametrize("name", JOBS)
def test_all_orders_and_faults(name):
    job, ends = JOBS[name]
    states, finals = explore(Model(job))
    print(f"{states} states, final: {dict(finals)}")
    assert set(finals) == set(ends.split())


@pytest.mark.parametrize("seed", range(20))
def test_random_faults_of_larger_jobs(seed):
    """8 processes, of which at most 5 train at once; 6 deaths, and requests."""
    rng = random.Random(seed)
    job = Job(5, 2, "ABCDE", "FGH", steps=6, kills=6, leaves=1, interrupts=1, resizes=(3, 5), ends=seed % 2 == 1)
    model, share = Model(job), rng.choice([0.02, 0.05, 0.2])  # of faults and requests
    state = model.start()
    while True:
        model.check(state)
        events = [*model.events(state)]
        progress = [after for _, is_progress, after in events if is_progress]
        others = [after for _, is_progress, after in events if not is_progress]
        if not progress:
            model.check_final(state)
        if not progress and not others:
            break
        state = rng.choice(others if others and (not progress or rng.random() < share) else progress)


# Each of these mistakes in a machine is found.


class FormsAgainAndAgain(WorldCoordinator):
    def receive(self, member, message):
        return [*super().receive(member, message), *(self.interrupt() if self.phase == "training" else [])]


class SourceIsFirst(WorldCoordinator):
    def _form_of(self, chosen):
        out = super()._form_of(chosen)
        return [(name, dataclasses.replace(form, source=form.members[0])) for name, form in out]


class DoesNotWaitForAll(WorldCoordinator):
    def _form(self):
        if self._steps:
            self._steps = {name: self._steps.get(name, max(self._steps.values())) for name in self.members}
        return super()._form()


class ContinuesToFormAfterADeath(WorldCoordinator):
    def lost(self, member):
        if self.phase == "forming":
            self._remove(member)
            return []
        return super().lost(member)


class BeginsAgainWithoutState(WorldCoordinator):
    def _form(self):
        self._has_begun = False
        return super()._form()


class LosesTheStateOfALeaver(WorldCoordinator):
    def _form(self):
        ready = self._leaving & set(self._steps)
        for name in ready:
            self._remove(name)
        return [(name, Stop("it has left")) for name in ready] + super()._form()


class ForgetsTheDead(WorldCoordinator):
    def join(self, member, place=0):
        self._dead = frozenset()
        return super().join(member, place)


class HasStateWhileItReceives(Member):
    def built(self):
        step = self.step
        answer = super().built()
        self.step = max(step, 0)
        return answer


class IsNotPoisonedWhileItBuilds(Member):
    def receive(self, message):
        if not isinstance(message, Poison) or self.phase == "running":
            super().receive(message)


MISTAKES = {
    FormsAgainAndAgain: (Job(2, 1, "AB", steps=1), "worlds are formed without a reason"),
    SourceIsFirst: (Job(3, 1, "ABC", steps=1, kills=1, starts_running=True), "the source lacks the newest step"),
    DoesNotWaitForAll: (Job(2, 1, "AB", steps=1, interrupts=1), "the old world goes on"),
    ContinuesToFormAfterADeath: (Job(2, 1, "AB", steps=1, kills=1), "it waits for members"),
    BeginsAgainWithoutState: (Job(2, 1, "AB", "C", steps=1, kills=2), "a step was completed before"),
    LosesTheStateOfALeaver: (Job(1, 1, "A", "B", steps=1, leaves=1), "the state was not lost"),
    ForgetsTheDead: (Job(2, 1, "AB", steps=1, kills=1), "it waits for members"),
    HasStateWhileItReceives: (Job(2, 1, "AB", steps=1), "a wrong step"),
    IsNotPoisonedWhileItBuilds: (Job(2, 1, "AB", steps=1, interrupts=1), "it waits for members"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake):
    job, words = MISTAKES[mistake]
    part = {"member" if issubclass(mistake, Member) else "coordinator": mistake}
    with pytest.raises(AssertionError) as error:
        explore(Model(job, **part))
    assert words in str(error.value)
    assert error.value.__notes__[0].startswith("start\n")


# Examples.


def formed(*names, **options):
    """A coordinator whose first world, of all names, trains."""
    machine = WorldCoordinator(options.pop("target", len(names)), **options)
    for place, name in enumerate(names):
        out = machine.join(name, place)
    return run(machine, out)


def run(machine, out):
    """The members of a world that is formed start to run."""
    generation, members = machine.generation, machine.members
    assert [name for name, message in out if isinstance(message, Form)] == [*members]
    assert [machine.receive(name, Running(generation)) for name in members[:-1]] == [[]] * (len(members) - 1)
    assert machine.waits_for() == {members[-1]: "has to build its communicators and to have the state"}
    assert machine.receive(members[-1], Running(generation)) == []
    assert machine.phase == "training"
    return machine


def ready(machine, *steps):
    """All members are ready, with these steps, the last member first. Return the messages after the last one."""
    out = []
    for name, step in [*zip(machine.members, steps, strict=True)][::-1]:
        assert out == []
        out = machine.receive(name, Ready(machine.generation, step))
    return out


def test_the_first_world_is_ordered_by_place():
    machine = WorldCoordinator(3, minimum=2)
    assert [machine.join("a", 2), machine.join("c", 0)] == [[], []]
    assert (machine.missing(), machine.generation, machine.spares) == (1, 0, ("c", "a"))
    form = Form(1, ("c", "b", "a"), -1, "c", ("b", "a"))
    assert machine.join("b", 1) == [("c", form), ("b", form), ("a", form)]
    assert machine.change == Change((), (), ("c", "b", "a"), 3, -1, repeated=False)
    assert machine.missing() == 0
    machine.lost("c")
    form = Form(2, ("b", "a"), -1, "b", ("a",))
    assert ready(machine, -1, -1) == [("b", form), ("a", form)]
    assert machine.change == Change(("c",), (), (), 2, -1, repeated=False)


def test_a_death_and_a_spare_take_one_formation():
    machine = formed("a", "b", "c", minimum=2)
    assert machine.join("d") == []
    assert machine.lost("b") == [("a", Poison(1)), ("c", Poison(1))]
    assert machine.waits_for() == dict.fromkeys("ac", "has to leave its operation")
    form = Form(2, ("a", "c", "d"), 85, "c", ("a", "d"))
    assert ready(machine, 84, 85) == [("a", form), ("c", form), ("d", form)]
    assert machine.change == Change(("b",), (), ("d",), 3, 85, repeated=False)
    run(machine, [(name, form) for name in "acd"])
    assert machine.lost("a") == [("c", Poison(2)), ("d", Poison(2))]
    form = Form(3, ("c", "d"), 90, "c", ())
    assert ready(machine, 90, 90) == [("c", form), ("d", form)]
    assert machine.change == Change(("a",), (), (), 2, 90, repeated=True)


def test_below_the_minimum_it_waits_for_joins():
    machine = formed("a", "b", minimum=2)
    machine.lost("b")
    assert ready(machine, 7) == []
    assert (machine.phase, machine.waits_for(), machine.missing()) == ("gathering", {}, 1)
    form = Form(2, ("a", "c"), 7, "a", ("c",))
    assert machine.join("c") == [("a", form), ("c", form)]
    machine.lost("a")
    why = Restart("no process that is left has the state of the training")
    assert machine.receive("c", Ready(2, -1)) == [("c", why)]
    assert (machine.phase, machine.end) == ("ended", why)
    assert machine.join("d") == [("d", why)]


def test_the_caller_may_restart_after_a_long_wait():
    machine = formed("a", "b", minimum=2)
    machine.lost("b")
    assert machine.restart("1 of 2 ranks is left") == [("a", Restart("1 of 2 ranks is left"))]
    assert machine.restart("again") == machine.lost("a") == machine.leave("a") == machine.interrupt() == []


def test_all_die():
    machine = formed("a", "b")
    assert machine.lost("a") == [("b", Poison(1))]
    assert machine.lost("b") == []
    assert isinstance(machine.end, Restart)


def test_leaves_and_resizes():
    machine = formed("a", "b", "c")
    assert machine.resize(2) == [(name, Poison(1)) for name in "abc"]
    form = Form(2, ("b", "c"), 3, "b", ())
    assert machine.leave("a") == []
    assert ready(machine, 3, 3, 3) == [("a", Stop("it has left")), ("b", form), ("c", form)]
    assert machine.change == Change((), ("a",), (), 2, 3, repeated=True)
    assert machine.resize(1) == []  # after the formation
    assert machine.receive("b", Running(2)) == []
    assert machine.receive("c", Running(2)) == [("b", Poison(2)), ("c", Poison(2))]
    form = Form(3, ("b",), 3, "b", ())
    assert ready(machine, 3, 3) == [("c", Stop("fewer ranks")), ("b", form)]
    assert machine.join("d") == []
    assert machine.leave("d") == [("d", Stop("it has left"))]
    assert machine.join("e") == machine.receive("b", Running(3)) == []
    assert machine.resize(2) == [("b", Poison(3))]


def test_the_last_leaver_gives_its_state_away():
    machine = formed("a")
    assert machine.join("b") == []
    assert machine.leave("a") == [("a", Poison(1))]
    form = Form(2, ("a", "b"), 9, "a", ("b",))
    assert ready(machine, 9) == [("a", form), ("b", form)]
    assert machine.receive("b", Running(2)) == []
    assert machine.receive("a", Running(2)) == [("a", Poison(2)), ("b", Poison(2))]
    form = Form(3, ("b",), 9, "b", ())
    assert ready(machine, 9, 9) == [("a", Stop("it has left")), ("b", form)]
    assert machine.receive("b", Running(3)) == []
    assert machine.leave("b") == [("b", Poison(3))]
    assert ready(machine, 9) == [("b", Stop("it has left"))]
    assert machine.end == Stop("all members have left")


def test_the_newest_leaver_gives_its_state_away():
    machine = formed("a", "b", minimum=2)
    machine.leave("a")
    machine.leave("b")
    assert machine.missing() == 2
    assert machine.join("c") == machine.join("d") == []
    assert machine.missing() == 0
    form = Form(2, ("a", "c", "d"), 9, "a", ("c", "d"))
    assert ready(machine, 9, 8) == [("b", Stop("it has left")), ("a", form), ("c", form), ("d", form)]


def test_a_training_that_has_finished_forms_no_other_world():
    machine = formed("a", "b", "c", target=3)
    machine.join("d")
    assert machine.lost("c") == [("a", Poison(1)), ("b", Poison(1))]
    end = Stop("the training has finished")
    assert machine.receive("a", Finished(1)) == [("b", end), ("d", end)]
    assert machine.lost("a") == machine.receive("b", Ready(1, 9)) == []


def test_a_member_that_hangs_is_the_one_that_is_not_ready():
    machine = formed("a", "b")
    assert machine.interrupt() == [("a", Poison(1)), ("b", Poison(1))]
    assert machine.interrupt() == machine.receive("a", Ready(1, 4)) == []
    assert machine.waits_for() == {"b": "has to leave its operation"}
    form = Form(2, ("a",), 4, "a", ())
    assert machine.lost("b") == [("a", form)]


def test_a_member_may_leave_its_world_before_the_poison():
    machine = formed("a", "b")
    assert machine.receive("a", Ready(1, 4)) == [("b", Poison(1))]
    assert machine.receive("b", Ready(1, 4))[0] == ("a", Form(2, ("a", "b"), 4, "a", ()))


def test_messages_of_other_generations_and_processes_are_ignored():
    machine = formed("a", "b")
    machine.interrupt()
    before = dict(vars(machine))
    for message in (Ready(0, 4), Ready(2, 4), Running(1), Finished(0)):
        assert machine.receive("a", message) == []
    assert machine.receive("c", Ready(1, 4)) == machine.leave("c") == []
    assert dict(vars(machine)) == before
    assert machine.lost("c") == machine.join("c") == []  # its death was known before its join
    assert machine.spares == ()


def test_misuse():
    machine = formed("a", "b", minimum=2)
    with pytest.raises(AssertionError, match="join: a has joined already"):
        machine.join("a")
    with pytest.raises(AssertionError, match="resize: target 1, but the minimum is 2"):
        machine.resize(1)
    with pytest.raises(AssertionError, match="minimum 3 and target 2"):
        WorldCoordinator(2, minimum=3)


# A member.


def test_the_phases_of_a_member():
    member = Member("b")
    member.receive(Poison(0))
    assert (member.phase, member.step, member.may_start) == ("joining", -1, False)
    member.receive(Form(1, ("a", "b"), -1, "a", ("b",)))
    assert (member.phase, member.generation) == ("building", 1)
    assert member.built() is None
    assert member.phase == "receiving"
    assert member.received(40) == Running(1)
    member.committed()
    assert (member.phase, member.step, member.may_start) == ("running", 41, True)
    member.receive(Poison(0))
    assert member.may_start
    member.receive(Poison(1))
    assert (member.is_poisoned, member.may_start) == (True, False)
    member.committed()  # the operation in which it waited was complete
    assert member.halted() == Ready(1, 42)
    member.receive(Poison(1))
    member.receive(form := Form(2, ("b", "c"), 42, "b", ("c",)))
    assert (member.phase, member.form, member.is_poisoned) == ("building", form, False)
    assert member.built() == Running(2)
    assert member.finished() == Finished(2)
    assert (member.phase, member.end) == ("ended", Stop("the training has finished"))
    member.receive(Restart("too late"))
    assert member.end == Stop("the training has finished")


def test_a_member_that_receives_state_has_none():
    member = Member("b")
    member.receive(Form(1, ("a", "b"), -1, "b", ("a",)))
    assert member.built() is None  # it makes the initial state
    member.received(0)
    member.committed()
    member.halted()
    member.receive(Form(2, ("a", "b"), 2, "a", ("b",)))
    member.receive(Poison(2))
    assert member.halted() == Ready(2, 1)  # the transfer has not started
    member.receive(Form(3, ("a", "b"), 2, "a", ("b",)))
    member.built()
    with pytest.raises(AssertionError, match="received: step 1, but world 3 has 2"):
        member.received(1)
    member.receive(Poison(3))
    assert member.halted() == Ready(3, -1)
    member.receive(Stop("fewer ranks"))
    assert (member.phase, member.end) == ("ended", Stop("fewer ranks"))


def test_misuse_of_a_member():
    member = Member("b")
    for call in (member.built, lambda: member.received(3), member.committed, member.halted, member.finished):
        with pytest.raises(AssertionError, match="b is joining, but has to be "):
            call()
    member.receive(Form(1, ("b",), -1, "b", ()))
    with pytest.raises(AssertionError, match="Form: b is building, but has to be joining or ready"):
        member.receive(Form(2, ("b",), -1, "b", ()))
    member.receive(Poison(1))
    with pytest.raises(AssertionError, match="built: the world 1 of b is poisoned"):
        member.built()
    assert (member.phase, member.step, member.generation) == ("building", -1, 1)
