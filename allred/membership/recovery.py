"""`Recovery`: how this process leaves a world whose ranks change, and forms the next one with the others.

1  the coordinator poisons the world: each wait raises RanksChanged (`error`), and `opt.step` makes no update
2  the next batch of a loop over `allred.data`, or `recover`, calls `form`: the process leaves its world, reports its
   committed step, waits until all others have, and builds the next world with them
3  if a process has another state, or is new, all take part in `_transfer`: it receives parameters, the state of the
   optimizer and the position in the data from the source
4  the loop continues after the committed step: the samples of a lost step are dealt again over the new ranks

A step is committed when its update is complete. agreement.py has the protocol, and why it is right.

In mode local `Member.step` counts exchanges of rounds instead of steps. Between two rounds each rank makes its own
steps, which are not lost: the rank notices the change at the next round, and completes it in the next world with the
others.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

from allred import native, world
from allred.comm import functions
from allred.errors import InputError, RanksChanged
from allred.membership.agent_connection import AgentConnection

T = TypeVar("T")
_NOBODY = -1  # not a rank


class Follower(Protocol):
    """An object that has to know when a new world begins."""

    def begin_world(self) -> None:
        """Forget what belongs to the last world."""


class RecoverableOptimizer(Follower, Protocol):
    """The methods of a distributed optimizer that `Recovery` calls. checks_operations: see `may_lose_operations`."""

    name: str
    interrupted: bool
    checks_operations: bool

    trains_in_rounds: bool

    @property
    def defers_changes(self) -> bool:
        """Whether no world is to be formed now, because the ranks are between two rounds: mode local."""

    steps_made: int  # mode local: of this rank

    @property
    def global_step(self) -> int: ...

    def refusal(self) -> str:
        """Why it cannot recover; "" if it can."""

    def copy_state(self, params: Any, root: int) -> None:
        """Copy parameters and state from rank `root` to all. Collective."""

    def complete_round(self, params: Any, has_state: bool) -> int | None:
        """Mode local: complete the round that the end of the last world has interrupted, if there is one. Collective.
        has_state: whether the parameters of this rank count. Return the rank that has made most steps; None in other
        modes, where all have made the same."""

    def keep_settings(self) -> None:
        """Keep the settings that the program may change after a step: it does not know that this one is lost."""

    def begin_world(self) -> None:
        """Forget what belongs to the last world, and the steps that were begun and not committed. Return to the
        settings of `keep_settings`."""


class RecoverableSession(Protocol):
    """The methods of a session that `Recovery` calls."""

    def keep_state(self) -> None:
        """Keep the state of what the program may change after a step, such as a scheduler: this step is lost."""

    def return_to_kept(self) -> None:
        """Return to the state of `keep_state`, if there is one."""

    def send_state(self) -> Any:
        """Return the state for processes that lack it."""

    def receive_state(self, state: Any) -> None:
        """Take the state of `send_state`."""

    def begin_world(self) -> None:
        """Agree with the others in a new world on how to go on. Collective."""


@dataclasses.dataclass
class FollowedLoop:
    """A running iteration over batches. position: after the latest batch. committed: after the last batch that a
    committed step used; None: the iteration has ended at the source of the state. steps: that were begun since
    the latest batch."""

    index: int
    position: Any
    committed: Any
    steps: int = 0


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
        self._joined_at = 0  # the number of the first world of this process
        self._optimizer: RecoverableOptimizer | None = None
        self._params: Any = None
        self._lost: RanksChanged | None = None  # a connection of this world has failed
        self._session: RecoverableSession | None = None
        self._is_set_up_together = False  # inside of `set_up`
        self._commits: RecoverableOptimizer | None = None  # see `begin_commits`
        self._followers = WeakSet[Follower]()  # what begins each world, beside `_optimizer`
        self._torn: Exception | None = None  # the error of an operation of this world that has completed without result
        self._is_noticed = False  # a wait has raised RanksChanged of this world to the program
        self._is_step_lost = False  # an operation of a backward pass of this world has completed without result
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
                    self._joined_at = self._joined_at or self._member.generation
                    return self._connection.send(self._member.built())
            self._halt()

    def form(self) -> None:
        """Leave this world, and form the next one. Returns when it is complete, with the same state on all ranks."""
        while True:
            self._rejoin()
            try:
                return self._complete()
            except RanksChanged:
                pass

    def _rejoin(self) -> None:
        self._halt()
        self.join()
        for each in filter(None, (self._optimizer, *self._followers)):
            each.begin_world()
        if self._session is not None:
            self._session.return_to_kept()

    def _halt(self) -> None:
        self._leave()
        self._lost = self._torn = None
        self._is_noticed = self._is_step_lost = False
        self._connection.send(self._member.halted())

    @property
    def generation(self) -> int:
        """The number of the world."""
        return self._member.generation

    @property
    def is_due(self) -> bool:
        """Whether the ranks change, so that `form` has to be called."""
        if self._lost is None and not self._connection.is_poisoned():
            return False
        optimizer = self._optimizer
        return optimizer is None or not optimizer.defers_changes or optimizer.interrupted or self._is_noticed

    def error(self) -> RanksChanged | None:
        """Return the error of a wait; None if the ranks do not change."""
        found = self._lost or self._connection.error()
        self._is_noticed = self._is_noticed or found is not None
        return found

    def lose_connection(self, error: Exception) -> RanksChanged:
        """A connection to another rank has failed. Return the error of the wait: this process leaves its world."""
        self._lost = RanksChanged(str(error), getattr(error, "rank", -1), getattr(error, "host", ""), 1)
        self._is_noticed = True
        return self._lost

    def serve_watcher(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Let the agent be the watcher of this node, for the world that is created. Return its name and port."""
        return self._connection.serve_watcher(settings)

    def finish(self) -> None:
        """This process has left its world together with the others: no other one is formed."""
        if self._member.phase == "running":
            self._connection.send(self._member.finished())

    def report_failure(self, code: int, words: str) -> None:
        """Report that this process is about to end with this exit code. words: the last line of the traceback."""
        self._connection.report_failure(code, words)

    def check_state(self) -> None:
        """Raise InputError unless the state of the training is known."""
        if self._optimizer is None:
            raise InputError(
                "recover(): call broadcast(params) of the optimizer, or session.track, before the training"
            )

    def follow(self, follower: Follower) -> None:
        """Let an object begin each new world. It is not kept alive."""
        self._followers.add(follower)

    # State.

    def _complete(self) -> None:
        """Complete a new world: copy the state from the source to all others, if one of them lacks it. Collective."""
        form = self._member.form
        assert form is not None
        newest, source = None, form.members.index(form.source)
        if form.step >= 0 and self._optimizer is not None:
            newest = self._optimizer.complete_round(self._params, self._member.phase == "running")
        if form.receivers:
            assert self._optimizer is not None
            self._optimizer.copy_state(self._params, source)
        if newest is not None:
            self._copy_position(newest, everywhere=True)
        elif form.receivers:
            self._copy_position(source, everywhere=False)
        if self._session is not None:
            self._session.begin_world()

    def _copy_position(self, source: int, everywhere: bool) -> None:
        """Copy the positions of the loops, and the state of the session, from rank `source` to the ranks that receive
        the state. Collective. everywhere: copy the positions to all ranks."""
        member, form = self._member, self._member.form
        assert form is not None
        assert self._optimizer is not None
        mine: Any = None
        if functions.current().rank == source:
            loops_here = _LoopState(self._begun, {index: loop.committed for index, loop in self._loops.items()})
            of_session = None if self._session is None else self._session.send_state()
            mine = loops_here, of_session, member.step, self._optimizer.steps_made
        loops_there, of_session, step, steps_made = functions.broadcast_object(mine, source, "state of the loops")
        receives = member.phase == "receiving"
        if receives:
            self._received = loops_there
        if receives or everywhere:
            self._optimizer.steps_made = steps_made
            for index, loop in self._loops.items():
                loop.committed = loops_there.running.get(index)
        if receives and self._session is not None:
            self._session.receive_state(of_session)
        if receives:
            self._connection.send(member.received(form.step))
            member.step = step  # mode local: with the exchanges of `complete_round`

    @property
    def joins_alone(self) -> bool:
        """Whether this process has joined later, and has not called `broadcast` or `track`: the others do not make the
        calls that its program makes until then."""
        return self._joined_at > 1 and self._optimizer is None

    @property
    def has_joined_later(self) -> bool:
        """Whether this process has joined a running training, and has not received its state."""
        form = self._member.form
        return self._member.phase == "receiving" and form is not None and form.step >= 0

    def begin_commits(self, state: RecoverableOptimizer, first: Callable[[], None]) -> None:
        """Begin a training whose program commits its state itself, after several steps (hvd.elastic). Returns when this
        process has the state. state: what is committed; its global_step is the number of commits. first: in the first
        world, collective."""
        self._optimizer = self._commits = state
        self._until_complete(first)

    def commit_state(self) -> None:
        """The program has committed its state."""
        self._member.committed()

    def use(self, optimizer: RecoverableOptimizer, params: Any) -> None:
        """Note the optimizer and the parameters of the training. Raises InputError if they cannot be recovered."""
        if self._commits is not None:
            if optimizer.trains_in_rounds:
                raise InputError(f"{optimizer.name}: hvd.elastic cannot be used in mode local; use mode sync")
            self.follow(optimizer)
            return
        if self._optimizer is not optimizer:
            if self._optimizer is not None:
                raise InputError(
                    f"`allred run --elastic` recovers one optimizer, but {optimizer.name} is a second one after "
                    f"{self._optimizer.name}"
                )
            if problem := optimizer.refusal():
                raise InputError(f"{optimizer.name}: {problem} cannot be used with `allred run --elastic`")
        self._optimizer = optimizer
        self._params = params if self._params is None else self._params

    def broadcast(self, optimizer: RecoverableOptimizer, params: Any, root: int) -> None:
        """As `copy_state`, until it is complete. A process that has joined later receives the state of the others."""
        if self._is_set_up_together or self._commits is not None:
            return optimizer.copy_state(params, root)
        self.use(optimizer, params)
        self._params = params  # a joiner passes the same nest
        self._until_complete(lambda: optimizer.copy_state(params, root), root=root)

    def set_up(self, session: RecoverableSession, first: Callable[[], T], later: Callable[[], T]) -> T:
        """Set up a session, until it is complete. first: in the first world, collective. later: on a process that has
        joined later or was interrupted, before it receives the state of the others. Both call `use`."""

        def together() -> T:
            self._is_set_up_together, self._session = True, None
            try:
                return first()
            finally:
                self._is_set_up_together = False

        def receive() -> None:
            result.append(later())
            self._session = session

        result: list[T] = []
        self._until_complete(lambda: result.append(together()), receive, root=_NOBODY)
        self._session = session
        return result[-1]

    def _until_complete(
        self, first: Callable[[], None], later: Callable[[], None] | None = None, root: int | None = None
    ) -> None:
        """Call `first` in a world without state, until it is complete, or receive the state, after `later`. root: the
        rank whose state `first` copies, if the others lose theirs meanwhile; None: nobody loses it."""
        is_again, gives_state = False, root is None or functions.current().rank == root
        while True:
            try:
                if self.has_joined_later and later is not None:
                    later()
                if self.has_joined_later or (is_again and self._member.phase == "running"):
                    return self._complete()
                first()
                if self._member.phase == "receiving":
                    assert self._optimizer is not None
                    self._connection.send(self._member.received(self._optimizer.global_step))
                return
            except RanksChanged:
                if not gives_state and self._member.phase == "running":
                    self._member.step = -1  # the parameters are partly overwritten
                self._rejoin()
                is_again = True

    # Steps.

    def begin_step(self, optimizer: RecoverableOptimizer, params: Any) -> None:
        """A step of the optimizer begins. params: None if they are known."""
        if optimizer is not self._optimizer or self._member.phase != "running":
            self.use(optimizer, params)
            if self.has_joined_later:
                raise InputError(
                    f"{optimizer.name}: this process has joined a running training; call broadcast(params) of the "
                    "optimizer before the first step, so that it receives the parameters"
                )
        optimizer.interrupted = self._is_step_lost
        for loop in self._loops.values():
            loop.steps += 1

    @property
    def may_lose_operations(self) -> bool:
        """Whether the optimizer calls `check_operations` in each step."""
        return self._optimizer is not None and self._optimizer.checks_operations

    def lose_operation(self, error: Exception, in_backward: bool) -> None:
        """An operation of the step completes without its result: the step must be lost, by `check_operations`.
        in_backward: of a backward pass, whose step may not follow (a GradScaler skips steps)."""
        self._torn, self._is_noticed = self._torn or error, False
        if in_backward:
            self._is_step_lost = True
            self._keep_state()

    def check_operations(self) -> None:
        """Raise RanksChanged if an operation of this world has completed without its result."""
        if self._torn is not None:
            raise self._torn

    def absorbs(self) -> bool:
        """Whether RanksChanged needs not be raised to the program: a loop over batches will form the next world, and
        repeat the lost step with its whole batch. Not if a batch has several steps, or the loop is not continued."""
        return bool(self._loops) and all(loop.steps <= 1 for loop in self._loops.values())

    def lose_step(self, optimizer: RecoverableOptimizer) -> None:
        """Call it in the handler of RanksChanged: the step makes no update. Raises it if no loop over batches will form
        the next world."""
        if not self.absorbs():
            raise
        self._is_noticed = False  # the program does not get the error
        self._keep_state()

    def _keep_state(self) -> None:
        """Keep what the program may change after a step that is lost."""
        optimizer = self._optimizer
        if optimizer is not None and not optimizer.interrupted:
            optimizer.interrupted = True
            optimizer.keep_settings()
            if self._session is not None:
                self._session.keep_state()

    def keep_position(self) -> None:
        """A step was made with the latest batches, which are not dealt again; in mode local a step of this rank."""
        for loop in self._loops.values():
            loop.committed = loop.position

    def commit(self, step: int) -> None:
        """A step is complete, with its update. step: the global step before it."""
        if self._commits is None:
            self.commit_exchange(step)
            self.keep_position()

    def commit_exchange(self, step: int) -> None:
        """Mode local: an exchange is complete, with its update. step: as of `commit`."""
        member = self._member
        if member.phase == "receiving":
            self._connection.send(member.received(step))
        member.step += 1  # as `Member.committed`, which is slower

    # Loops over batches.

    def begin_loop(self, start: Any) -> FollowedLoop:
        """An iteration begins at this position. Its `committed` is where to begin."""
        index, self._begun = self._begun, self._begun + 1
        if self._received is not None and index < self._received.begun:
            start = self._received.running.get(index)
        loop = FollowedLoop(index, start, start)
        self._loops[index] = loop
        return loop

    def form_for(self, loop: FollowedLoop) -> None:
        """As `form`, before the next batch of a loop. Raises RanksChanged if its latest batch had no step, and the
        program has not caught this error: it is no loop of the training, and the results of the program would have some
        batches twice."""
        if self._optimizer is None or not (loop.steps or self._is_noticed or self._is_step_lost):
            error = self.error()
            assert error is not None
            raise error
        self.form()

    def end_loop(self, loop: FollowedLoop) -> None:
        self._loops.pop(loop.index, None)


def current() -> Recovery | None:
    """Return the recovery of this process; None if its job is not elastic."""
    here = world.current_or_none()
    return None if here is None else here.recovery


def recover() -> None:
    """Form the next world of a job of `allred run --elastic`, after `RanksChanged`. Collective: all ranks that are left
    call it, or come to the next batch of a loop over `allred.data`.

        while opt.global_step < steps:
            x, y = share_of(opt.global_step, allred.rank(), allred.size())
            try:
                opt.step(params, gradients(params, x, y))
            except allred.RanksChanged:
                allred.recover()

    Afterwards all ranks have the same parameters, state of the optimizer and `opt.global_step`; `allred.rank()` and
    `allred.size()` have new values. Loops over `allred.data` call it themselves. No effect if the ranks do not change.

    Raises InputError without `allred run --elastic`, and before `broadcast` or `session.track`.
    """
    recovery = current()
    if recovery is None:
        raise InputError("recover(): the ranks of this job cannot change; start it by `allred run --elastic`")
    if recovery.is_due:
        recovery.check_state()
        recovery.form()
