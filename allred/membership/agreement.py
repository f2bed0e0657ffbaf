"""The agreement of the members of a job on its worlds. It has no clock, socket, process or thread.

A member is one process; its name is never used again. A world is an ordered list of members, their ranks. Its number is
the generation (allred/world.py). One `WorldCoordinator` forms all worlds of a job, one after the other; each process
has a `Member` (member.py). Messages between the coordinator and a member arrive in order. When a process dies, its last
messages may be lost, or arrive after the report of its death. Deaths, joins, leaves and resizes lead through the same
phases:

1  gathering  The coordinator sends Poison(g) to the members of world g. Each completes or leaves the operation in which
              it waits, starts no other one, halts its queue, and sends Ready(g, s): s is its committed step, or -1 if
              it has no state. It has none until its first world, and from the start of receiving state to its end.
2  forming    All living members are ready: the coordinator sends Form(g + 1, ...). Each member builds its communicators
              with the others. Those without the newest step receive the state from the source. Each sends
              Running(g + 1) when it has both. After a death, back to 1. Joins, leaves and resizes wait until 3.
3  training   All members are running.
4  ended      After Stop to all, because the training has finished or all members have left; or after Restart.

    input of the coordinator  sender  effect
    join(member, place)       caller  admitted at the next formation, or a spare while the world has `target` members
    lost(member)              caller  the process is dead; this is certain. Forms a world without it
    leave(member)             caller  forms a world without it, then sends Stop to it
    resize(target)            caller  admits spares, or sends Stop to the last ranks
    interrupt()               caller  poisons the world and forms it again, for example after a time limit
    restart(reason)           caller  sends Restart to all, for example after a long wait below the minimum
    Ready(g, s)               member  see 1. A member may send it without Poison, after an error in its connections
    Running(g)                member  see 2
    Finished(g)               member  its training is complete. The last operation of a training is a barrier, so all
                                      others have completed it, too: no other world is formed

The world that is formed:

- The members that stay, in the order of their ranks, then spares, by place and arrival; the first `target` of these.
  Other members get Stop, other spares wait. If only the former have state, the one with the newest step is a member of
  one more world, in which the others receive it.
- The first world needs `target` members. A later one needs `minimum`; with less, the coordinator waits for joins.
- step: the largest s. source: the first rank with it. receivers: those with another s. In the first world nobody has
  state: step is -1, and the source makes the initial state. This is repeated until a member may have completed a step.
- If nobody has state later, all get Restart: the job starts again from its newest checkpoint.

Why this is right. A rank completes a step only if all ranks have published their part of it, and all that complete it
compute the same bits. So the steps of members with state differ by at most 1, and equal steps mean equal state. Either
a member has the newer step, and the others receive it; or none has it, and it is computed again: no step is lost or
counted twice. After all are ready, nobody computes or writes in the old world. Messages of a generation that is not the
current one are ignored, as are messages of members that are lost or stopped. tests/unit/test_membership.py explores
these claims.
"""

import bisect
import dataclasses

# Messages to members.


@dataclasses.dataclass(frozen=True)
class Poison:
    """Leave the world `generation`."""

    generation: int


@dataclasses.dataclass(frozen=True)
class Form:
    """Build the world `generation`. members: in rank order. step, source, receivers: see the module."""

    generation: int
    members: tuple[str, ...]
    step: int
    source: str
    receivers: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Stop:
    """End without an error."""

    reason: str


@dataclasses.dataclass(frozen=True)
class Restart:
    """End; the job starts again from its newest checkpoint."""

    reason: str


# Messages from members.


@dataclasses.dataclass(frozen=True)
class Ready:
    """The sender has left the world `generation`. step: its committed step; -1: it has no state."""

    generation: int
    step: int


@dataclasses.dataclass(frozen=True)
class Running:
    """The sender has built the world `generation`, and has the state."""

    generation: int


@dataclasses.dataclass(frozen=True)
class Finished:
    """The sender has completed the training, in the world `generation`."""

    generation: int


Order = Poison | Form | Stop | Restart
Report = Ready | Running | Finished
Orders = list[tuple[str, Order]]  # (member, message)


@dataclasses.dataclass(frozen=True)
class Change:
    """Describes a formation, for messages to users.

    lost, left, joined: names of members, since the formation before. size: of the new world. step: its committed step;
    -1: the first world. repeated: the step after it was interrupted on all survivors, and its batch is computed again;
    else a survivor had completed the interrupted step, or nobody had state.
    """

    lost: tuple[str, ...]
    left: tuple[str, ...]
    joined: tuple[str, ...]
    size: int
    step: int
    repeated: bool


class WorldCoordinator:
    """Forms the worlds of a job. Each input returns the messages to send: (member, message).

    target: the number of members that the user wants; minimum: with less, nobody trains.
    phase: "gathering", "forming", "training" or "ended". generation: of the last world that was formed; 0: none yet.
    members: the living members of this world, in rank order. end: in phase "ended", the message to all members.
    change: the last formation.

    Attributes are replaced, never modified.
    """

    def __init__(self, target: int, minimum: int = 1) -> None:
        assert 1 <= minimum <= target, f"minimum {minimum} and target {target}"
        self.target, self.minimum = target, minimum
        self.phase = "gathering"
        self.generation = 0
        self.members: tuple[str, ...] = ()
        self.end: Stop | Restart | None = None
        self.change: Change | None = None
        self._spares: tuple[tuple[int, str], ...] = ()  # (place, name)
        self._leaving: frozenset[str] = frozenset()
        self._steps: dict[str, int] = {}  # while gathering: of the members that are ready
        self._running: frozenset[str] = frozenset()  # while forming
        self._is_first = False  # nobody had state when the last world was formed
        self._has_begun = False  # a member may have completed a step
        self._dead: frozenset[str] = frozenset()  # all that were lost
        self._lost: tuple[str, ...] = ()  # members that were lost since the last formation
        self._left: tuple[str, ...] = ()

    @property
    def spares(self) -> tuple[str, ...]:
        """Members that wait to be admitted, in the order in which they will be."""
        return tuple(name for _, name in self._spares)

    # Inputs.

    def join(self, member: str, place: int = 0) -> Orders:
        """Add a process. place: joiners with a lower one get lower ranks. Ignored if the process was lost before."""
        is_new = member not in self.members and (place, member) not in self._spares
        assert is_new, f"join: {member} has joined already"
        if self.end is not None:
            return [(member, self.end)]
        if member in self._dead:
            return []
        at = bisect.bisect(self._spares, place, key=lambda each: each[0])
        self._spares = (*self._spares[:at], (place, member), *self._spares[at:])
        return self._advance()

    def lost(self, member: str) -> Orders:
        """Remove a process that is dead."""
        was_member = member in self.members
        self._dead |= {member}
        self._remove(member)
        if was_member:
            self._lost = (*self._lost, member)
            if self.phase != "gathering":
                return self._poison()
        return self._advance()

    def leave(self, member: str) -> Orders:
        """Let a member leave. It continues until it receives Stop."""
        if member in self.spares:
            self._remove(member)
            return [(member, Stop("it has left"))]
        if member in self.members:
            self._leaving |= {member}
        return self._advance()

    def resize(self, target: int) -> Orders:
        """Change the number of members that the user wants."""
        assert target >= self.minimum, f"resize: target {target}, but the minimum is {self.minimum}"
        self.target = target
        return self._advance()

    def interrupt(self) -> Orders:
        """Form the world again. A member that hangs is then the one that does not become ready."""
        return self._poison() if self.phase in ("forming", "training") else []

    def restart(self, reason: str) -> Orders:
        """End the job; it starts again from its newest checkpoint."""
        return [] if self.phase == "ended" else self._end(Restart(reason))

    def receive(self, member: str, message: Report) -> Orders:
        """Handle a message of a member."""
        if member not in self.members or message.generation != self.generation:
            return []
        if isinstance(message, Finished):
            self._remove(member)
            return self._end(Stop("the training has finished"))
        if isinstance(message, Running):
            if self.phase == "forming":
                self._running |= {member}
                if len(self._running) == len(self.members):
                    self.phase = "training"
            return self._advance()
        others = [] if self.phase == "gathering" else [each for each in self._poison() if each[0] != member]
        self._steps = {**self._steps, member: message.step}
        return others + self._advance()

    # Queries.

    def waits_for(self) -> dict[str, str]:
        """Return the members that a formation waits for, and for what.

        While gathering, a member that does not answer hangs: after a time limit, the caller kills it and reports it as
        lost. While forming, all may wait for one: after a time limit, the caller calls `interrupt`.
        """
        if self.phase == "gathering":
            return {each: "has to leave its operation" for each in self.members if each not in self._steps}
        if self.phase == "forming":
            what = "has to build its communicators and to have the state"
            return {each: what for each in self.members if each not in self._running}
        return {}

    def missing(self) -> int:
        """Return how many processes have to join before a world can be formed."""
        present = len(self.members) - len(self._leaving) + len(self._spares)
        return max(0, self._needed - present) if self.phase == "gathering" else 0

    # The machine.

    @property
    def _needed(self) -> int:
        return self.minimum if self.generation else self.target

    def _remove(self, member: str) -> None:
        self.members = tuple(each for each in self.members if each != member)
        self._spares = tuple(each for each in self._spares if each[1] != member)
        self._leaving -= {member}
        self._steps = {each: step for each, step in self._steps.items() if each != member}

    def _advance(self) -> Orders:
        if self.phase == "gathering":
            return self._form()
        size = len(self.members)
        is_wrong = self._leaving or size > self.target or (size < self.target and self._spares)
        return self._poison() if self.phase == "training" and is_wrong else []

    def _poison(self) -> Orders:
        self.phase, self._running = "gathering", frozenset()
        return [(each, Poison(self.generation)) for each in self.members] + self._form()

    def _form(self) -> Orders:
        """Form the next world, if all members are ready and enough of them are left."""
        steps = self._steps
        if len(steps) < len(self.members) or (not self.generation and len(self._spares) < self.target):
            return []  # the second condition is for speed: each process of a start comes here
        if self._is_first and -1 in steps.values():  # without this member nobody has completed a step
            self._has_begun = False
        newest = max(steps.values(), default=-1)
        if self._has_begun and newest < 0:
            return self._end(Restart("no process that is left has the state of the training"))
        staying = [each for each in self.members if each not in self._leaving]
        chosen = [*staying, *self.spares][: self.target]
        if chosen and newest >= 0 and all(steps.get(each, -1) < 0 for each in chosen):
            chosen.insert(0, max(self.members, key=steps.__getitem__))  # it gives its state away before it stops
        stopped = [each for each in self.members if each not in chosen]
        out: Orders = [(each, Stop("it has left" if each in self._leaving else "fewer ranks")) for each in stopped]
        for each in stopped:
            self._remove(each)
        self._left = (*self._left, *stopped)
        if stopped and not chosen:
            return out + self._end(Stop("all members have left"))
        return out if len(chosen) < self._needed else out + self._form_of(chosen)

    def _form_of(self, chosen: list[str]) -> Orders:
        steps = {each: self._steps.get(each, -1) for each in chosen}
        step = max(steps.values())
        source = next(each for each in chosen if steps[each] == step)
        receivers = tuple(each for each in chosen if each != source and steps[each] < max(step, 0))
        joined = tuple(each for each in chosen if each in self.spares)
        survivors = {steps[each] for each in chosen if each not in joined}
        self.change = Change(self._lost, self._left, joined, len(chosen), step, survivors == {step} != {-1})
        self.phase, self.generation, self.members = "forming", self.generation + 1, tuple(chosen)
        self._spares = tuple(each for each in self._spares if each[1] not in joined)
        self._steps, self._lost, self._left = {}, (), ()
        self._is_first, self._has_begun = step < 0, True
        form = Form(self.generation, self.members, step, source, receivers)
        return [(each, form) for each in chosen]

    def _end(self, message: Stop | Restart) -> Orders:
        out: Orders = [(each, message) for each in (*self.members, *self.spares)]
        self.phase, self.end, self.members, self._spares = "ended", message, (), ()
        return out
