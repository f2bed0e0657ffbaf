"""A model of jobs for test_membership.py: the real coordinator and members, with channels, steps, and faults.

`explore` visits all states that a job can reach, by breadth-first search. An event is: a message arrives, a rank does
the next thing of its program, a fault occurs, or the user requests something. The numbers of faults, requests and steps
are limited, so the number of states is finite.

The model knows what the machine only hears about. `state` of a node is the truth about the parameters of its process:
the tuple of its committed steps, each as the world that computed it, (generation, members); None: no parameters, or
parameters that are partly overwritten. `part` is the last step of which it has published its part in its world. A rank
may complete a step when all ranks of its world have published their parts. A dead process keeps these values, because
its memory or its packets outlive it.
"""

import collections
import copy
import dataclasses
import functools

from allred.membership.agreement import Form, Restart, Stop, WorldCoordinator
from allred.membership.member import Member


@dataclasses.dataclass(frozen=True)
class Job:
    """What may happen in a job. joined: names that have joined at the start; joins: names that may join later; steps:
    after them the program calls the barrier at its end, if `ends`, or waits. The others: how often each may occur;
    resizes: the targets."""

    target: int
    minimum: int
    joined: str
    joins: str = ""
    steps: int = 2
    kills: int = 0
    leaves: int = 0
    interrupts: int = 0
    resizes: tuple[int, ...] = ()
    ends: bool = False
    starts_running: bool = False  # the first world has formed


class Node:
    """A process, with its channels. inbox: messages to it; outbox: (input of the coordinator, arguments)."""

    __slots__ = ("machine", "state", "part", "sent", "alive", "inbox", "outbox")  # noqa: RUF023

    def __init__(self, machine, state=None, part=0, sent=False, alive=True, inbox=(), outbox=()):
        self.machine, self.state, self.part, self.sent = machine, state, part, sent
        self.alive, self.inbox, self.outbox = alive, inbox, outbox

    def values(self):
        return self.machine, self.state, self.part, self.sent, self.alive, self.inbox, self.outbox


class Model:
    """The states of a job. A state is (coordinator, budget, node, ...). budget: what may still happen, and whether a
    step was ever completed. Equal parts of states are the same object, so states are compared by identity."""

    def __init__(self, job, coordinator=WorldCoordinator, member=Member):
        self.job, self.coordinator, self.member = job, coordinator, member
        self.names = job.joined + job.joins
        faults = job.kills + job.leaves + job.interrupts + len(job.resizes) + len(job.joins)
        self.most_worlds = 1 + 2 * faults
        self.known = {}
        self.coordinate = functools.cache(self._coordinate)
        self.act = functools.cache(self._act)

    def intern(self, key, one):
        return self.known.setdefault(key, one)

    def node(self, **values):
        one = Node(**values)
        return self.intern(one.values(), one)

    # The machines, each input of which is computed once.

    def _coordinate(self, machine, call, args):
        """Return the coordinator after an input, and the messages."""
        after = copy.copy(machine)
        out = getattr(after, call)(*args)
        values = {name: value for name, value in vars(after).items() if name not in ("change", "_lost", "_left")}
        values["_steps"] = tuple(values["_steps"].items())
        return self.intern(("coordinator", *values.values()), after), tuple(out)

    def _act(self, machine, call, args):
        """Return a member after a call, and its answer."""
        after = copy.copy(machine)
        answer = getattr(after, call)(*args)
        return self.intern(("member", *vars(after).values()), after), answer

    # States.

    def start(self):
        budget = (self.job.kills, self.job.leaves, self.job.interrupts, self.job.resizes, False)
        nodes = []
        for name in self.names:
            machine = self.intern(name, self.member(name))
            call = (("join", (name, self.names.index(name))),) if name in self.job.joined else ()
            nodes.append(self.node(machine=machine, outbox=call))
        state = (self.intern("first", self.coordinator(self.job.target, self.job.minimum)), budget, *nodes)
        while self.job.starts_running and not self.trains(state):
            state = next(after for _, is_progress, after in self.events(state) if is_progress)
        return state

    def trains(self, state):
        running = [node for node in state[2:] if node.machine.phase == "running" and not node.inbox + node.outbox]
        return state[0].phase == "training" and len(running) == self.job.target

    def replace(self, state, number, /, **changes):
        values = dict(zip(Node.__slots__, state[2 + number].values(), strict=True))
        return (*state[: 2 + number], self.node(**(values | changes)), *state[3 + number :])

    def tell(self, state, call, args):
        """The coordinator handles an input."""
        machine, out = self.coordinate(state[0], call, args)
        if out:
            self.check_orders(state, machine, out)
        state = (machine, *state[1:])
        for name, message in out:
            number = self.names.index(name)
            if state[2 + number].alive:
                state = self.replace(state, number, inbox=(*state[2 + number].inbox, message))
        return state

    def call(self, state, number, call, /, *args, **changes):
        """The process calls its machine, and sends the answer."""
        node = state[2 + number]
        machine, answer = self.act(node.machine, call, args)
        if answer is not None:
            changes["outbox"] = (*node.outbox, ("receive", (machine.name, answer)))
        return self.replace(state, number, machine=machine, **changes)

    # Events: (label, whether it is progress, the state after it).

    def events(self, state):
        coordinator, budget, *nodes = state
        kills, leaves, interrupts, resizes, _ = budget

        def spend(position, value):
            return (coordinator, (*budget[:position], value, *budget[position + 1 :]), *nodes)

        for number, node in enumerate(nodes):
            name = self.names[number]
            if node.outbox:
                (call, args), *rest = node.outbox
                yield f"{call}{args}", True, self.tell(self.replace(state, number, outbox=tuple(rest)), call, args)
            if not node.alive:
                continue
            machine = node.machine
            if machine.phase == "joining" and name in self.job.joins and not self.has_joined(state, number):
                yield f"{name} joins", False, self.replace(state, number, outbox=(("join", (name, number)),))
                continue
            if node.inbox:
                message, *rest = node.inbox
                changes = {"part": 0, "sent": False} if isinstance(message, Form) else {}
                after = self.call(state, number, "receive", message, inbox=tuple(rest), **changes)
                yield f"{name} receives {message}", True, after
            for label, is_progress, after in self.program(state, number):
                yield f"{name} {label}", is_progress, after
            if machine.phase == "ended":
                continue
            if kills:
                # The coordinator learns of the death after the messages of the process, or before them.
                rest, lost = spend(0, kills - 1), ("lost", (name,))
                killed = self.replace(rest, number, alive=False, inbox=(), outbox=(*node.outbox, lost))
                yield f"{name} dies", False, killed
                if node.outbox:
                    killed = self.replace(rest, number, alive=False, inbox=(), outbox=(lost, *node.outbox))
                    yield f"{name} dies, known before its messages", False, killed
            if leaves:
                outbox = (*node.outbox, ("leave", (name,)))
                yield f"{name} leaves", False, self.replace(spend(1, leaves - 1), number, outbox=outbox)
        if interrupts:
            yield "interrupt", False, self.tell(spend(2, interrupts - 1), "interrupt", ())
        for position, target in enumerate(resizes):
            after = spend(3, resizes[:position] + resizes[position + 1 :])
            yield f"resize {target}", False, self.tell(after, "resize", (target,))

    def has_joined(self, state, number):
        name, node = self.names[number], state[2 + number]
        return bool(node.outbox) or name in state[0].spares or bool(node.inbox) or node.machine.generation > 0

    def program(self, state, number):
        """The next things that the program of a process may do, as in `events`."""
        node = state[2 + number]
        machine, form = node.machine, node.machine.form
        if machine.phase not in ("building", "receiving", "running"):
            return
        peers = [state[2 + self.names.index(name)] for name in form.members]
        source = state[2 + self.names.index(form.source)]
        is_lost = any(not peer.alive for peer in peers)
        if machine.is_poisoned or is_lost:
            # Without Poison, by an error in a connection, which no one may count on.
            yield "halts", machine.is_poisoned, self.call(state, number, "halted")
        if machine.phase == "building" and not machine.is_poisoned:
            # All of the world have begun to build it: an allgather.
            if all(peer.machine.generation == machine.generation for peer in peers):
                receives = machine.name in form.receivers or form.step < 0
                if receives and node is not source:
                    self.check_extends(node.state, source.state)
                yield "has built", True, self.call(state, number, "built", state=None if receives else node.state)
        elif machine.phase == "receiving":
            if node is source:
                self.check_writer(state, number)
                yield "makes the initial state", True, self.call(state, number, "received", 0, state=())
            elif source.sent and source.machine.generation == machine.generation:
                self.check_writer(state, number)
                after = self.call(state, number, "received", len(source.state), state=source.state)
                yield "has received", True, after
        elif machine.phase == "running":
            step = len(node.state) + 1
            last = self.job.steps + self.job.ends
            if machine.may_start and node is source and form.members != (machine.name,) and not node.sent:
                self.check_writer(state, number)
                yield "sends its state", True, self.replace(state, number, sent=True)
            elif machine.may_start and node.part < step <= last:
                self.check_writer(state, number)
                yield f"publishes step {step}", True, self.replace(state, number, part=step)
            are_published = all(peer.part >= step and peer.machine.generation == machine.generation for peer in peers)
            if are_published and step <= self.job.steps:
                self.check_writer(state, number)
                history = (*node.state, (machine.generation, form.members))
                after = self.call(state, number, "committed", state=history)
                yield f"commits step {step}", True, (after[0], (*after[1][:4], True), *after[2:])
            elif are_published and step == last:
                yield "finishes", True, self.call(state, number, "finished")

    # Invariants.

    def check_orders(self, state, after, out):
        """The messages of the coordinator, against the truth."""
        nodes = dict(zip(self.names, state[2:], strict=True))
        stopped = {name for name, node in nodes.items() if any(isinstance(each, Stop) for each in node.inbox)}
        staying = {
            name: node for name, node in nodes.items()
            if node.alive and node.machine.phase != "ended" and name not in stopped
        }  # fmt: skip
        has_state = any(node.state is not None for node in staying.values())
        for message in {message for _, message in out}:
            names = [name for name, each in out if each == message]
            if isinstance(message, Form):
                assert names == [*message.members] == [*after.members]
                assert message.generation == after.generation == state[0].generation + 1
                assert after.generation <= self.most_worlds, "worlds are formed without a reason"
                self.check_form(message, nodes)
                if message.step < 0:
                    assert not has_state, "state is thrown away"
                    assert not state[1][4], "a step was completed before"
                assert {node.machine.phase for node in staying.values()} <= {"joining", "ready"}, (
                    "the old world goes on"
                )
            elif isinstance(message, Restart):
                assert not has_state, "the state was not lost"
            elif isinstance(message, Stop) and message.reason == "the training has finished":
                ranks = [nodes[name] for name in names if nodes[name].machine.phase != "joining"]
                assert all(len(node.state) == self.job.steps for node in ranks), "a rank has not finished"
            elif isinstance(message, Stop):
                assert {nodes[name].machine.phase for name in names if nodes[name].alive} <= {"joining", "ready"}

    def check_form(self, form, nodes):
        assert len({*form.members}) == len(form.members), "a member has two ranks"
        steps = {name: -1 if nodes[name].state is None else len(nodes[name].state) for name in form.members}
        assert form.step == max(steps.values()), "not the newest step"
        assert steps[form.source] == form.step, "the source lacks the newest step"
        lack = {name for name, step in steps.items() if step < form.step or step < 0}
        assert {*form.receivers} == lack - {form.source}
        assert min([step for step in steps.values() if step >= 0], default=form.step) >= form.step - 1

    def check_writer(self, state, number):
        """Only members of the newest world complete or publish anything."""
        coordinator, node = state[0], state[2 + number]
        assert node.machine.generation == coordinator.generation, "an operation of an older world"

    def check_extends(self, old, new):
        assert old is None or old == new[: len(old)], "a committed step was lost or replaced"

    def check(self, state):
        """The members, against each other and against the truth."""
        running = []
        for node in state[2:]:
            machine = node.machine
            assert machine.step == (-1 if node.state is None else len(node.state)), "a wrong step"
            if machine.phase == "running":
                assert node.state is not None
                running.append(node)
        for position, one in enumerate(running):
            for other in running[position + 1 :]:
                if one.machine.generation == other.machine.generation:
                    assert one.machine.form == other.machine.form
                    shorter, longer = sorted((one.state, other.state), key=len)
                    assert longer[: len(shorter)] == shorter, "ranks of a world have different parameters"
                    assert len(longer) - len(shorter) <= 1

    def check_final(self, state):
        """The state after which nothing happens by itself: a good end."""
        coordinator, _, *nodes = state
        living = {name: node.machine for name, node in zip(self.names, nodes, strict=True) if node.alive}
        present = {name: machine for name, machine in living.items() if machine.phase != "ended"}
        joined = {name for name in present if name in {*coordinator.members, *coordinator.spares}}
        assert all(machine.phase == "joining" for name, machine in present.items() if name not in joined)
        if coordinator.phase == "training":
            assert {present[name].phase for name in coordinator.members} == {"running"}
            assert {(present[name].generation, present[name].step) for name in coordinator.members} == {
                (coordinator.generation, self.job.steps)
            }
            assert not coordinator.spares or len(coordinator.members) == coordinator.target
            assert not coordinator._leaving
            return "training"
        if coordinator.phase == "gathering":
            assert coordinator.waits_for() == {}, "it waits for members"
            assert coordinator.missing() > 0, "it does not form a world"
            assert {present[name].phase for name in coordinator.members} <= {"ready"}
            return "waiting"
        assert coordinator.phase == "ended", "it waits for members"
        assert not joined
        return type(coordinator.end).__name__


def explore(model):
    """Visit all states. Return their number, and how many final states of each kind there are.

    Progress must not run in circles: then each state leads to a final state if nothing else happens. An AssertionError
    gets the shortest sequence of events that leads to it as a note.
    """
    first = model.start()
    numbers, origins, edges, finals = {first: 0}, [(None, "start")], [], collections.Counter()
    todo = collections.deque([first])
    while todo:
        state, onward = todo.popleft(), []
        try:
            model.check(state)
            for label, is_progress, after in model.events(state):
                number = numbers.get(after)
                if number is None:
                    number = numbers[after] = len(numbers)
                    origins.append((len(edges), label))
                    todo.append(after)
                if is_progress:
                    onward.append(number)
            if not onward:
                finals[model.check_final(state)] += 1
        except AssertionError as error:
            error.add_note("\n".join(path_to(len(edges), origins)))
            raise
        edges.append(onward)
    assert not has_cycle(edges), "progress without an end"
    return len(numbers), finals


def path_to(number, origins):
    """The events that lead to a state."""
    labels = []
    while number is not None:
        number, label = origins[number]
        labels.append(label)
    return labels[::-1]


def has_cycle(edges):
    """Whether a graph has a cycle. edges: the numbers of the nodes that follow each node."""
    incoming = [0] * len(edges)
    for onward in edges:
        for number in onward:
            incoming[number] += 1
    free = [number for number, count in enumerate(incoming) if not count]
    for number in free:
        for after in edges[number]:
            incoming[after] -= 1
            if not incoming[after]:
                free.append(after)
    return len(free) < len(edges)
