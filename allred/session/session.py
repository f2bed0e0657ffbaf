"""Session: a training loop that can be resumed. The user writes the step; what is around it is here.

    1  track: the chief restores the newest checkpoint, if there is one; the others wait for it and receive the state
    2  each step ends with one small allreduce (values.py), in which the ranks also agree on whether to stop
    3  a checkpoint of parameters, optimizer, position in the data, random states and hooks: copied after a step, then
       written in the background (saver.py)
    4  the last one is written when the loop ends, in whatever way (last.py). When a rank is killed, the newest stands

Mode ps: workers run at their own pace, so they do not meet at the end of a step. What is logged is each worker's own,
the global step is the servers', the position in the data is the chief's, and the servers write checkpoints.
"""

import os
import secrets
import sys
import time
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self, TypeVar

from allred import world
from allred.cluster import report, topology
from allred.comm import functions, join
from allred.errors import InputError, ShutdownError
from allred.modes.optimizer import DistributedOptimizer
from allred.session import checks, ending, last, together
from allred.session.asked import Asked
from allred.session.hooks import Hook
from allred.session.keeping import check_directories
from allred.session.rates import Rates
from allred.session.saver import Saver
from allred.session.state import State
from allred.session.telling import with_own
from allred.session.values import ANOTHER, Log
from allred.watch import exit_callbacks

T = TypeVar("T")


class Session:
    """A training loop with checkpoints, hooks and an end that is always orderly. All ranks make one.

        with allred.Session(checkpoint_dir="ckpt", save_secs=600, max_steps=10_000) as session:
            session.track(params=params, optimizer=opt, data=batches)
            for x, y in session.steps(batches):
                loss, grads = loss_and_grads(params, x, y)
                opt.step(params, grads)
                session.log(loss=loss, examples=len(x))

    checkpoint_dir: where checkpoints are, and a restored one is looked for; None: nothing is saved. The chief's holds:
        the others give the same, or None. All have to see it, for a rank that fails writes the last one.
    save_secs: seconds between checkpoints, by the chief's clock (600 without both); save_steps: steps between them.
    keep: how many checkpoints stay; keep_every: those of every so many steps stay as well, 0 is none.
    max_steps: the global step at which the loop ends.
    hooks: see `allred.session.Hook`; called in this order.
    log_steps: a line every so many steps, on a terminal a line of progress (allred.session.Logging); None: none.
    wait_for_chief_s: how long the others wait for it to restore, in seconds.

    SIGTERM, SIGUSR1 and a first Ctrl-C end the loop after the step at hand, on all ranks, as if it was at its end; the
    program goes on behind it.

    Raises InputError for arguments that cannot be, NotInitializedError before allred.init().
    """

    def __init__(
        self,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        *,
        save_secs: float | None = None,
        save_steps: int | None = None,
        keep: int = 5,
        keep_every: int = 0,
        max_steps: int | None = None,
        hooks: Iterable[Hook] | None = (),
        log_steps: int | None = 100,
        wait_for_chief_s: float = 7200.0,
    ) -> None:
        directory = "" if checkpoint_dir is None else checks.path("Session: checkpoint_dir", checkpoint_dir)
        self._saver = Saver(directory, save_secs, save_steps, keep, keep_every)
        self._asks_to_save = (save_secs, save_steps) != (None, None)
        self.hooks = with_own(hooks, log_steps, max_steps)
        self.step, self.max_steps = 0, None if max_steps is None else int(max_steps)
        self.params: Any = None
        self.rates = Rates()
        self.watched: dict[str, Any] = {}  # by `watch`
        self._optimizer: DistributedOptimizer | None = None
        self._state: State | None = None
        self._wait_s = wait_for_chief_s
        self._asked, self._log = Asked(), Log()
        self._stops, self._requested = "", ""  # why the loop ends; why this rank would like it to
        self._in_step = self._entered = self._done = False
        self._handled: BaseException | None = None  # the exception that was being handled when the session began
        self._is_fresh = False  # mode ps: whether the parameters were pulled for the first step
        self._begun_at_step = 0  # the global step when the step at hand began
        self._begun_at, self._batches = 0, 0  # the one that training began at; batches since then
        self._start, self._waited_s = time.monotonic(), 0.0
        self._token = ""  # of this session, the same on all ranks

    # Around everything.

    def __enter__(self) -> Self:
        world.current()  # raises
        if self._entered:
            raise InputError("Session: it was used already; make a new one")
        self._entered, self._handled = True, sys.exc_info()[1]
        self._asked.listen()
        exit_callbacks.register(self._end_with_program)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> bool:
        if self._done:
            return False
        exit_callbacks.unregister(self._end_with_program)
        optimizer, path = self._optimizer, None
        asked = isinstance(error, ShutdownError) and optimizer is not None and not optimizer.in_step
        failure = None if asked else error
        try:
            if asked:
                self._end_asked()
            elif optimizer is not None:
                path = self._end_well() if failure is None else self._end_badly(failure)
        except BaseException as another:
            failure = another
            raise
        finally:
            self._asked.stop()
            join.remove_observer(self._joined)
            self._done = True
            if optimizer is not None or failure is not None:
                self._call_end(failure, path)
        return asked

    def end(self, error: BaseException | None = None) -> None:
        """End a session that was begun without a with statement, as the end of that statement does. Collective if
        `error` is None. No effect on a session that has ended.

        error: the exception that ends the session, or None. With None, raises CheckpointError if the last checkpoint
        cannot be written."""
        if error is self._handled:  # since before the session
            error = None
        if error is None and self._optimizer is not None and self._optimizer.torn:  # by a sys.exit() that Python hides
            error = SystemExit()
        self.__exit__(None if error is None else type(error), error, None)

    def _end_with_program(self, error: BaseException | None) -> None:
        with functions.patience(together.FOREVER_S):  # the other ranks' programs may end much later
            self.end(error)

    def track(self, *, params: Any, optimizer: DistributedOptimizer, data: Any = None, **more: Any) -> int | None:
        """Say what is trained; collective. Restores the newest checkpoint, else everybody starts from the chief's.

        params: a nest of arrays. optimizer: of allred.distributed. data: what gives the batches; if it has state_dict
        and load_state_dict, resuming goes on behind the last batch. more: anything else that has these two, by name:
        saved by the chief (or the rank that fails), and loaded on all ranks.

        The number of the step that was restored; None if there was no checkpoint.
        Raises InputError for what cannot be tracked, MismatchError if the ranks' sessions or the arguments of their
        data differ, CheckpointError if one cannot be read or is of another model.
        """
        if not self._entered or self._done:
            raise InputError("session.track(): use the session in a with statement, and within it")
        if self._optimizer is not None:
            raise InputError("session.track() was called already; track everything in one call")
        checks.optimizer("session.track()", optimizer)
        state = State(self.hooks, data, more)
        restored = extra = None
        with together.waiting(self._wait_s):
            self._saver.directory = together.agree(self._saver.directory, self.max_steps, sorted(more), data)
            if self._asks_to_save and not self._saves:
                raise InputError("Session: save_secs and save_steps need a checkpoint_dir")
            check_directories(self.hooks, self._saver.directory)
            if self._saves:
                restored, extra = optimizer.restore_all(self._saver.directory, params)
            else:
                optimizer.broadcast(params)
            if extra is not None:
                state.load(extra, f"{self._saver.directory}, step {restored}")
            together.hear_of(optimizer, last.unwritable(self._saver) if self.is_chief else None)
        self.params, self._optimizer, self._state = params, optimizer, state
        if restored is not None:
            report.inform(f"goes on from step {restored}, of {self._saver.directory}")
        self.step = optimizer.global_step
        self._saver.begin(self.step)
        self._token = functions.allgather_object(secrets.token_hex(4))[0]  # nobody steps before all know global_step
        if optimizer.in_step:
            join.add_observer(self._joined)
        else:
            self._asked.notify(optimizer.ask_to_end)
            if self._saves:
                optimizer.end_with(lambda: self._saving()(self._saver.directory))
        for hook in self.hooks:
            hook.begin(self)
        self._begun_at = self.step
        if self._stops == "max_steps":
            report.inform(f"max_steps={self.max_steps} is reached already, at step {self.step}: no step is made")
        return restored

    @property
    def _saves(self) -> bool:
        return bool(self._saver.directory)

    # The loop.

    def steps(self, batches: Iterable[T]) -> Iterator[T]:
        """The batches, until the loop is to end: at max_steps, at the end of the data, or when somebody asks for it.

        They are those of all epochs: the end of the data is that of the training. Raises InputError when it is called
        again after it."""
        if self._stops == ending.END_OF_DATA:
            raise InputError(
                "session.steps() was called again after the end of the data: one call is for all epochs, as in "
                "session.steps(allred.data.batches(..., epochs=10))"
            )
        if self._saves and self._state is not None:
            self._state.tell_of_missing(batches)
        iterator = iter(batches)
        while not self._ends():
            try:
                batch = next(iterator)
            except StopIteration:
                self._in_step = False
                self._batches -= 1
                self._stops = ending.END_OF_DATA
                return
            self._freshen()
            yield batch

    def should_stop(self) -> bool:
        """Whether the loop ends; else a step begins. Collective in mode sync, and the end of the step before:

        while not session.should_stop():
            ...

        With accumulate=k a step has k batches; hooks are called before the first and after the last of them.
        """
        if not (ends := self._ends()):
            self._freshen()
        return ends

    def _ends(self) -> bool:
        self._check_open()
        if self._optimizer is None:
            raise InputError("session: call session.track(params=..., optimizer=...) before the first step")
        if self._in_step:
            if self._optimizer.accumulates:
                self._log.go_on()
                return False
            self._end_step()
        if self._stops:
            return True
        self._in_step = True
        self._batches += 1
        self._begun_at_step = self.step
        for hook in self.hooks:
            hook.before_step(self)
        return False

    def _freshen(self) -> None:
        """Mode ps: pull before the first gradient, since others train while hooks begin and the first batch is read."""
        if not self._is_fresh and not self.optimizer.in_step:
            self.optimizer.pull(self.params)
            self.step = self._begun_at_step = self.optimizer.global_step
        self._is_fresh = True

    def log(self, *, examples: Any = None, **values: Any) -> None:
        """Note numbers of this step: in mode sync they are averaged over ranks, weighted by `examples`, the number of
        samples of this rank's part. All ranks have to note the same names. Raises InputError for what is no number."""
        self._check_open()
        self._log.add(values, examples)

    def watch(self, **nests: Any) -> None:
        """Nests of arrays, by name, that the Summary hook makes histograms of: watch(gradients=grads)."""
        self.watched.update(nests)

    def _check_open(self) -> None:
        if not self._entered:
            raise InputError(
                "session: it has not begun; use it in a with statement: with allred.Session(...) as session"
            )
        if self._done:
            raise InputError("session: it has ended, for its with statement was left; make a new one to train on")

    def request_stop(self, reason: str = "stopped", everywhere: bool = False) -> None:
        """Ask for the end of the loop, in mode sync on all ranks after the step at whose end all have heard of it.

        everywhere: all ranks ask for it after the same step; so it ends at once.
        """
        if everywhere and (self.optimizer.in_step or reason == "max_steps"):  # which each worker sees at the servers
            self._stops = self._stops or reason
        else:
            self._requested = self._requested or reason
            self.optimizer.ask_to_end()

    def _end_step(self) -> None:
        self._note_step()
        optimizer = self.optimizer
        due = self.is_chief and self._saves and self._saver.due(self.step)
        asks = self._asked.reason or self._requested
        told = (self._log.together if optimizer.in_step else self._log.alone)(asks, due)
        waited_s = optimizer.waited_s
        self.rates.record(self.step, int(told.examples), waited_s - self._waited_s)
        self._waited_s = waited_s
        if told.stop and optimizer.in_step:
            self._stops = self._stops or told.stop
        for hook in self.hooks:
            hook.after_step(self, told.values)
        if told.save and not self._stops:
            self._save()

    def _note_step(self) -> None:
        """The step at hand is over. A batch that made no update (skipped, accumulated, left by a break) comes again."""
        self._in_step = False
        if self.optimizer.global_step != self._begun_at_step:
            self.step = self.optimizer.global_step
            self._the_state.note_position()

    # Checkpoints.

    def _save(self) -> None:
        randoms = together.gather_random_states(self.optimizer)
        if self.is_chief:
            self.save_by(self._saver, randoms)

    def save_by(self, saver: Saver, randoms: Any = None) -> None:
        """For hooks, on the chief, after a step: have this Saver write a checkpoint of now."""
        saver.save(self.step, lambda: self._saving(randoms, copy=True), apart=self.optimizer.in_step)
        self.rates.pause()

    def _saving(self, randoms: Any = None, copy: bool = False) -> Callable[[str], str]:
        """What writes the checkpoint of now."""
        noted = self.step == self.optimizer.global_step
        return self.optimizer.saving(self.params, self._the_state.pack(randoms, noted), copy)

    def _joined(self, writer: int) -> None:
        """Write a checkpoint of rank `writer`, which joined last, after all ranks have joined."""
        if self.step != self.optimizer.global_step:  # the step at hand has made its update
            self._the_state.note_position()
        randoms = together.gather_random_states(self.optimizer)
        self.step = last.write_joined(self._saver, self.optimizer, writer, lambda: self._saving(randoms))
        self._begun_at_step = self.optimizer.global_step  # so that `_note_step` does not set the step back

    # The end.

    def _end_well(self) -> str | None:
        if self._in_step:  # the loop was left by a break
            self._note_step()
        self._meet()
        randoms = together.gather_random_states(self.optimizer, "the end of the session")
        return last.write(self._saver, self.optimizer, self.step, lambda: self._saving(randoms))

    def _end_asked(self) -> None:
        """Mode ps, the job was asked to end, and the checkpoint is written. Who was at the end of its loop before
        is in `_end_well`, and is met there."""
        self._stops = self.asked or ANOTHER
        self._meet()
        self._note_step()
        together.hear_of(self.optimizer, None)

    def _end_badly(self, error: BaseException) -> str | None:
        optimizer, path = self.optimizer, None
        if self._saves:
            path = last.write_after(error, self._in_step, self._saver, optimizer, self._token, self._saving)
        self.step = optimizer.global_step if optimizer.in_step else self.step
        return path

    def _meet(self) -> None:
        if not self.optimizer.in_step:
            together.meet(self.optimizer, self.params)
            self.step = self.optimizer.global_step

    def _call_end(self, failure: BaseException | None, path: str | None) -> None:
        seconds = time.monotonic() - self._start
        outcome = ending.outcome(failure, self.asked, self.step, seconds, self._saver, path)
        if failure is None:
            updated = self.step != self._begun_at or bool(self.optimizer.skipped)
            ending.tell(outcome, self.max_steps, self._batches, updated)
        ending.call_hooks(self, outcome)

    # For hooks.

    @property
    def optimizer(self) -> DistributedOptimizer:
        """The one that is tracked."""
        if self._optimizer is None:
            raise InputError("session: call session.track(params=..., optimizer=...) first")
        return self._optimizer

    @property
    def _the_state(self) -> State:
        assert self._state is not None
        return self._state

    @property
    def is_chief(self) -> bool:
        """Whether this is rank 0."""
        return topology.rank() == 0

    @property
    def asked(self) -> str:
        """Why the loop is to end, if it is: the name of a signal to this process, or what was requested."""
        return self._stops or self._asked.reason or self._requested
