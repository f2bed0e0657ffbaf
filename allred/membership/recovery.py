"""`Recovery`: how this process leaves a world whose ranks change, and forms the next one with the others.

1  the coordinator poisons the world: each wait raises RanksChanged (`error`), and `opt.step` makes no update
2  the next batch of a loop over `allred.data` calls `form`: the process leaves its world, reports its committed step,
   waits until all others have, and builds the next world with them
3  if a process has another state, or is new, all take part in `_transfer`: it receives parameters, the state of the
   optimizer and the position in the data from the source
4  the loop continues after the committed step: the samples of a lost step are dealt again over the new ranks

A step is committed when its update is complete. agreement.py has the protocol, and why it is right.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

from allred import native, world
from allred.comm import functions
from allred.errors import InputError, RanksChanged
from allred.membership.agent_connection import AgentConnection


class RecoverableOptimizer(Protocol):
    """The methods of a distributed optimizer that `Recovery` calls."""

    name: str

    @property
    def global_step(self) -> int: ...

    def refusal(self) -> str:
        """Why it cannot recover; "" if it can."""

    def copy_state(self, params: Any, root: int) -> None:
        """Copy parameters and state from rank `root` to all. Collective."""

    def begin_world(self) -> None:
        """Forget what belongs to the last world, and the steps that were begun and not committed."""


@dataclasses.dataclass
class FollowedLoop:
    """A running iteration over batches. position: after the latest batch. committed: after the last batch that a
    committed step used; None: the iteration has ended at the source of the state."""

    index: int
    position: Any
    committed: Any


@dataclasses.dataclass(frozen=True)
class _LoopState:
    """begun: the number of iterations that were begun. running: the committed position of each running one, by its
    index."""

    begun: int
    running: dict[int, Any]


class Recovery:
    """The recovery of this process. create: makes the world of `connection.member.form`, and installs it. leave: leaves
    the installed world, if there is one; not collective."""

    def __init__(self, connection: AgentConnection, create: Callable[[], None], leave: Callable[[], None]) -> None:
        self._connection, self._create, self._leave = connection, create, leave
        self._member = connection.member
        self._optimizer: RecoverableOptimizer | None = None
        self._params: Any = None
        self._begun, self._loops = 0, dict[int, FollowedLoop]()  # running ones, by index
        self._received: _LoopState | None = None  # of the source, if this process has joined later

    def join(self) -> None:
        """Join the next world, and build it. For init()."""
        while True:
            self._connection.await_form()
            native.arena_thaw()  # all processes have left their worlds: none writes into arrays of another one
            try:
                self._create()
            except RanksChanged:
                pass
            else:
                if not self._connection.is_poisoned():
                    return self._connection.send(self._member.built())
            self._halt()

    def form(self) -> None:
        """Leave this world, and form the next one. Returns when it is complete, with the same state on all ranks."""
        while True:
            self._halt()
            self.join()
            if self._optimizer is not None:
                self._optimizer.begin_world()
            try:
                return self._transfer()
            except RanksChanged:
                pass

    def _halt(self) -> None:
        self._leave()
        self._connection.send(self._member.halted())

    @property
    def is_due(self) -> bool:
        """Whether the ranks change, so that `form` has to be called."""
        return self._connection.is_poisoned()

    def error(self) -> RanksChanged | None:
        """Return the error of a wait; None if the ranks do not change."""
        return self._connection.error()

    def serve_watcher(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Let the agent be the watcher of this node, for the world that is created. Return its name and port."""
        return self._connection.serve_watcher(settings)

    # State.

    def _transfer(self) -> None:
        """Copy the state from the source to all others, if one of them lacks it. Collective."""
        form = self._member.form
        assert form is not None
        if not form.receivers:
            return
        assert self._optimizer is not None
        source = form.members.index(form.source)
        self._optimizer.copy_state(self._params, source)
        mine = _LoopState(self._begun, {index: loop.committed for index, loop in self._loops.items()})
        given = functions.broadcast_object(mine, source, "state of the loops")
        if self._member.phase == "receiving":
            self._received = given
            for index, loop in self._loops.items():
                loop.committed = given.running.get(index)
            self._connection.send(self._member.received(form.step))

    @property
    def has_joined_later(self) -> bool:
        """Whether this process has joined a running training, and has not received its state."""
        form = self._member.form
        return self._member.phase == "receiving" and form is not None and form.step >= 0

    def use(self, optimizer: RecoverableOptimizer, params: Any) -> None:
        """Note the optimizer and the parameters of the training. Raises InputError if they cannot be recovered."""
        if self._optimizer is not optimizer:
            if self._optimizer is not None:
                raise InputError(
                    f"`allred run --elastic` recovers one optimizer, but there are {self._optimizer.name} and "
                    f"{optimizer.name}"
                )
            if problem := optimizer.refusal():
                raise InputError(f"{optimizer.name}: {problem} cannot be used with `allred run --elastic`")
        self._optimizer, self._params = optimizer, params

    def broadcast(self, optimizer: RecoverableOptimizer, params: Any, root: int) -> None:
        """As `copy_state`, until it is complete. A process that has joined later receives the state of the others."""
        self.use(optimizer, params)
        while True:
            try:
                if self.has_joined_later:
                    return self._transfer()
                optimizer.copy_state(params, root)
                if self._member.phase == "receiving":
                    self._connection.send(self._member.received(optimizer.global_step))
                return
            except RanksChanged:
                self.form()
                if self._member.phase != "receiving":
                    return

    # Steps.

    def begin_step(self, optimizer: RecoverableOptimizer, params: Any) -> None:
        """A step of the optimizer begins."""
        self.use(optimizer, params)
        if self.has_joined_later:
            raise InputError(
                f"{optimizer.name}.step(): this process has joined a running training; call "
                f"{optimizer.name}.broadcast(params) before the first step, so that it receives the parameters"
            )

    def absorbs(self) -> bool:
        """Whether a lost step needs no error: a loop over batches will form the next world."""
        return bool(self._loops)

    def commit(self, step: int) -> None:
        """A step is complete, with its update. step: the global step before it."""
        if self._member.phase == "receiving":
            self._connection.send(self._member.received(step))
        self._member.committed()
        for loop in self._loops.values():
            loop.committed = loop.position

    # Loops over batches.

    def begin_loop(self, start: Any) -> FollowedLoop:
        """An iteration begins at this position. Its `committed` is where to begin."""
        index, self._begun = self._begun, self._begun + 1
        if self._received is not None and index < self._received.begun:
            start = self._received.running.get(index)
        loop = FollowedLoop(index, start, start)
        self._loops[index] = loop
        return loop

    def end_loop(self, loop: FollowedLoop) -> None:
        self._loops.pop(loop.index, None)


def current() -> Recovery | None:
    """Return the recovery of this process; None if its job is not elastic."""
    here = world.current_or_none()
    return None if here is None else here.recovery
