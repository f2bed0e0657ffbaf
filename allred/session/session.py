"""Session: a training loop that can be resumed. The user writes the step.

1  track: the chief restores the newest checkpoint, if there is one; the other ranks wait and receive the state
2  each step ends with one small allreduce (coordination.py): logged values, and requests to stop or to save
3  a periodic checkpoint holds parameters, optimizer, position in the data, random states and hooks: it is copied after
   a step and written in the background (saver.py)
4  the final checkpoint is written when the loop ends, also after an error (final_checkpoint.py). After a rank was
   killed the newest periodic checkpoint remains

Mode ps: workers do not synchronize at the end of a step. Each worker has its own logged values, the servers have the
global step and write the checkpoints, and the position in the data is that of the chief.
"""

import functools
import operator
import os
import secrets
import sys
import time
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self, TypeVar

from allred import log, world
from allred.cluster import topology
from allred.comm import functions
from allred.errors import InputError, RanksChanged, ShutdownError
from allred.modes.optimizer import DistributedOptimizer
from allred.session import coordination, final_checkpoint
from allred.session.hooks import Hook, all_hooks
from allred.session.progress import Rates
from allred.session.saver import Saver, SessionState, check_directories, check_path
from allred.watch import exit_callbacks
from allred.watch.exit_callbacks import delayed_handlers

T = TypeVar("T")


class Session:
    """A training loop with checkpoints, hooks and an orderly end on all ranks. All ranks create one.

        with allred.Session(checkpoint_dir="ckpt", save_secs=600, max_steps=10_000) as session:
            session.track(params=params, optimizer=opt, data=batches)
            for x, y in session.steps(batches):
                loss, grads = loss_and_grads(params, x, y)
                opt.step(params, grads)
                session.log(loss=loss, examples=len(x))

    checkpoint_dir: the directory of the checkpoints, from which `track` restores; None: nothing is saved. The chief's
        value counts; other ranks give the same or None. All ranks must see it: a rank that fails writes to it.
    save_secs: seconds between checkpoints by the chief's clock (default 600); or save_steps: steps between them.
    keep: number of checkpoints to keep. keep_every: checkpoints at multiples of this step are kept too; 0: none.
    max_steps: the global step at which the loop ends.
    hooks: `allred.session.Hook` objects, called in this order.
    log_steps: steps between log lines; a terminal shows a progress line (allred.session.Logging); None: no lines.
    wait_for_chief_s: time limit in seconds for the chief's restore.

    SIGTERM, SIGUSR1 and a first Ctrl-C end the loop on all ranks after the current step; the program continues after
    the session.

    Raises InputError for invalid arguments, NotInitializedError before allred.init().
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
        directory = "" if checkpoint_dir is None else check_path("Session: checkpoint_dir", checkpoint_dir)
        self._saver = Saver(directory, save_secs, save_steps, keep, keep_every)
        self._interval_given = (save_secs, save_steps) != (None, None)
        self.hooks = all_hooks(hooks, log_steps, max_steps)
        self.step, self.max_steps = 0, None if max_steps is None else int(max_steps)
        self.params: Any = None
        self.rates = Rates()
        self.watched: dict[str, Any] = {}
        self._optimizer: DistributedOptimizer | None = None
        self._given_optimizer: Any = None  # keeps a torch optimizer until the last checkpoint
        self._state: SessionState = None  # type: ignore[assignment]  # set by `track`
        self._signals, self._metrics = coordination.StopSignals(), coordination.StepMetrics()
        self._is_exhausted = False  # whether `steps` has reached the end of its data
        self._stop_reason, self._stop_request = "", ""  # why the loop ends; why this rank asks for it
        self._in_step = self._entered = self._done = False
        self._is_ending = False  # whether the end of a step has begun, and not all hooks have returned
        self._hooks_called = 0  # at the end of the current step
        # In an elastic job: step and values of the last report; the logged values of a step that ended while the ranks
        # changed; the values for its hooks.
        self._reported: tuple[int, dict[str, float]] = (-1, {})
        self._left_step: tuple[int, dict[str, float], float | None] | None = None
        self._agreed: dict[str, float] | None = None
        self._due_savers: list[Saver] = []  # savers that hooks have requested during `after_step`
        self._later_savers: list[Saver] = []  # likewise; they write after a round
        self._outer_error: BaseException | None = None  # the exception that was being handled when the session began
        self._is_fresh = False  # mode ps: whether the parameters were pulled for the first step
        self._step_begin = 0  # the global step when the current step began
        self._training_begin, self._batches = 0, 0  # the global step when training began; batches since then
        self._start, self._wait_s = time.monotonic(), wait_for_chief_s
        self._times = world.current().counters.times  # of waits and communication, until now
        self._token = ""  # identifies this session, equal on all ranks

    # Begin and end.

    def __enter__(self) -> Self:
        world.current()  # raises
        if self._entered:
            raise InputError("Session: it was used already; create a new one")
        self._entered, self._outer_error = True, sys.exc_info()[1]
        self._signals.install()
        exit_callbacks.register(self._end_with_program)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> bool:
        with delayed_handlers():
            return self._exit(error)

    def _exit(self, error: BaseException | None) -> bool:
        if self._done:
            return False
        exit_callbacks.unregister(self._end_with_program)
        optimizer, path = self._optimizer, None
        in_mode_ps = optimizer is not None and not optimizer.session_support.is_lockstep
        stopped = isinstance(error, ShutdownError) and in_mode_ps
        failure = None if stopped else error
        try:
            if stopped:
                path = self._finish_after_shutdown()
            elif optimizer is not None:
                path = self._finish_in_any_world() if failure is None else self._finish_after_error(failure)
        except BaseException as another:
            failure = another
            raise
        finally:
            self._report(None)
            functions.remove_observer(self._save_after_join)
            self._done, self._given_optimizer = True, None
            self._signals.restore()
            if optimizer is not None or failure is not None:
                self._call_end(failure, path)
        return stopped

    def _report(self, on_stop: Callable[[str], None] | None) -> None:
        if (watcher := world.watcher()) is not None:
            watcher.report_session(self.step, on_stop)

    def end(self, error: BaseException | None = None) -> None:
        """End a session that was begun without a with statement, as the end of that statement does. Collective if
        `error` is None. No effect on a session that has ended.

        error: the exception that ends the session, or None. With None, raises CheckpointError if the last checkpoint
        cannot be written."""
        if error is self._outer_error:
            error = None
        optimizer = self._optimizer
        if error is None and optimizer is not None and optimizer.session_support.update_interrupted:
            error = SystemExit()  # by a sys.exit() that Python hides
        self.__exit__(None if error is None else type(error), error, None)

    def _end_with_program(self, error: BaseException | None) -> None:
        with functions.patience(coordination.NO_LIMIT_S):  # the programs of other ranks may end much later
            self.end(error)

    def track(self, *, params: Any, optimizer: Any, data: Any = None, **more: Any) -> int | None:
        """Set the objects to train and to save. Collective. Restores the newest checkpoint; without one all ranks start
        from the chief's parameters.

        params: a nest of arrays; for a torch optimizer a torch module, whose buffers are saved too, or None. optimizer:
        the result of allred.distributed. data: the source of the batches; if it has state_dict and load_state_dict, or
        is a torch DataLoader with a DistributedBatchSampler, it resumes after the last batch. more: other objects with
        these methods: saved by the chief (or the rank that fails), loaded on all ranks. Returns the restored step.
        Raises InputError for objects that cannot be tracked, MismatchError if sessions or arguments of data differ
        between ranks, CheckpointError if no checkpoint can be read, or it is of another model.
        """
        if not self._entered or self._done:
            raise InputError("session.track(): use the session in a with statement, and within it")
        if self._optimizer is not None:
            raise InputError("session.track() was called already; track everything in one call")
        self._given_optimizer = optimizer
        given, (params, optimizer, others) = params, coordination.tracked(params, optimizer, more)
        state = SessionState(self.hooks, data, {**others, **more})
        recovery = world.current().recovery
        if recovery is None:
            restored = self._agree_and_restore(given, params, optimizer, state, data, others, more)
        else:
            recovery.use(optimizer, given)
            self.params, self._state = params, state
            arguments = given, params, optimizer, state, data, others, more
            restored = recovery.set_up(self, lambda: self._agree_and_restore(*arguments), lambda: None)
        self.params, self._optimizer, self._state = params, optimizer, state
        if restored is not None:
            log.info(f"resumes from step {restored} of {self._saver.directory}")
        self.step = optimizer.global_step
        self._report(self._signals.stop)
        self._saver.begin(self.step)
        if optimizer.session_support.is_lockstep:
            functions.add_observer(self._save_after_join)
        else:
            self._signals.notify(optimizer.session_support.request_stop)
            if self._saver.directory:
                optimizer.session_support.set_final_save(lambda: self._capture()(self._saver.directory))
        for hook in self.hooks:
            hook.begin(self)
        self._end_left_step(joins=True)
        self._training_begin = self.step
        if self._stop_reason == "max_steps":
            log.info(f"max_steps={self.max_steps} is reached already, at step {self.step}: no step is made")
        return restored

    def _agree_and_restore(
        self, given: Any, params: Any, optimizer: DistributedOptimizer, state: SessionState, data: Any,
        others: dict[str, Any], more: dict[str, Any],
    ) -> int | None:  # fmt: skip
        """Compare the arguments of `track` on all ranks, and restore the newest checkpoint. Return its step.

        given: the argument params. params, others: the result of `coordination.tracked`."""
        more = {**others, **more}
        with coordination.extended_timeout(self._wait_s):
            self._saver.directory = coordination.agree(self._saver.directory, self.max_steps, sorted(more), data)
            if self._interval_given and not self._saver.directory:
                raise InputError("Session: save_secs and save_steps need a checkpoint_dir")
            check_directories(self.hooks, self._saver.directory)
            directory = self._saver.directory
            restored, extra = optimizer.restore_all(directory, params, others) if directory else (None, None)
            if restored is None:  # `restore_all` has copied the parameters
                (optimizer.broadcast_others if directory else optimizer.broadcast)(given)
            if restored is not None:
                state.load({} if extra is None else extra, f"{self._saver.directory}, step {restored}")
            error = final_checkpoint.directory_error(self._saver) if self.is_chief else None
            coordination.raise_on_all(optimizer, error)
            self._token = functions.allgather_object(secrets.token_hex(4))[0]  # no rank steps before all know the step
        return restored

    # Recovery (membership/recovery.py).

    def keep_state(self) -> None:
        """Internal: a step is lost. The program does not know it, and may call `step` of a tracked scheduler."""
        self._state.keep()

    def return_to_kept(self) -> None:
        """Internal: return to the state of `keep_state`."""
        self._state.return_to_kept()

    def send_state(self) -> Any:
        """Internal: the state for a process that joins."""
        parts = self._state.pickle(None, uses_saved_position=self._left_step is None)
        left: Any = None if self._left_step is None else (self._left_step[0], {}, 0.0)
        return self._token, self._saver.directory, self._stop_reason, parts, left

    def receive_state(self, state: Any) -> None:
        """Internal: take the result of `send_state`."""
        self._token, self._saver.directory, self._stop_reason, parts, self._left_step = state
        self._state.receive(parts)
        self._hooks_called = 0

    def begin_world(self) -> None:
        """Internal: end the loop on all ranks if it has ended on one. End a step that was committed in the last world:
        all ranks call their hooks with the same values. Collective."""
        asked = (self._signals.reason or self._stop_request) if self._left_step is not None else ""
        found = functions.allgather_object((self._stop_reason or asked, self._reported, self._left_step))
        self._stop_reason = next(filter(None, (reason for reason, _, _ in found)), "")
        self._times = world.current().counters.times
        if self._left_step is not None:
            reports = (values for _, (step, values), _ in found if step == self._left_step[0])
            self._agreed = next(reports, None) or coordination.mean_values([left[1:] for *_, left in found if left])
            self._left_step = None
        if self._optimizer is not None:
            self._end_left_step()

    def _end_left_step(self, joins: bool = False) -> None:
        """Call the hooks of a step that has ended in another world, if there is one. joins: whether this process has
        joined after it."""
        if self._agreed is not None:
            self.step, self._due_savers = self.optimizer.global_step, []
            self._call_hooks(self._agreed, notes_position=not joins)  # a process that joins has received it
            self._agreed = None

    def _leave_step(self) -> None:
        """The ranks change. If the current step is committed, it ends in the next world; else forget it."""
        if self._is_ending and not self.optimizer.interrupted:  # hooks are left
            self._left_step = self.optimizer.global_step, *self._metrics.take()
        self._metrics, self._in_step, self._is_ending = coordination.StepMetrics(), False, False

    def _next_after_change(self, iterator: Iterator[T]) -> Iterator[T]:
        """The ranks have changed at the end of a step. Return the next batch, in the next world, as an iterator; an
        empty one if the loop ends."""
        self._leave_step()
        for batch in iterator:  # forms the next world
            self.step = self._step_begin = self.optimizer.global_step
            if not self._stop_reason:
                self._begin_step()
                yield batch
            return
        self._stop_reason, self._is_exhausted = self._stop_reason or final_checkpoint.END_OF_DATA, True

    # The loop.

    def steps(self, batches: Iterable[T]) -> Iterator[T]:
        """Iterate over batches until the loop ends: at max_steps, at the end of the data, or at a stop request.

        `batches` covers all epochs: its end is the end of training. Raises InputError for a second call after it."""
        if self._is_exhausted:
            raise InputError(
                "session.steps() was called again after the end of the data: one call is for all epochs, as in "
                "session.steps(allred.data.batches(..., epochs=10))"
            )
        if self._saver.directory and self._optimizer is not None:
            self._state.warn_untracked(batches)
        iterator = iter(self._state.follow(batches) if self._state else batches)
        while True:
            try:
                if self._ends():
                    return
            except RanksChanged:
                recovery = world.current().recovery
                if not recovery.absorbs():
                    raise
                yield from self._next_after_change(iterator)
                continue
            step = self.optimizer.global_step
            try:
                batch = next(iterator)
            except StopIteration:
                self._in_step = False
                self._batches -= 1
                self._stop_reason, self._is_exhausted = final_checkpoint.END_OF_DATA, True
                return
            if self._stop_reason:  # of another rank, in a world that `next` has formed
                self._in_step = False
                return
            if self.optimizer.global_step != step:  # so it was received there
                self.step = self._step_begin = self.optimizer.global_step
            self._pull_first()
            yield batch

    def should_stop(self) -> bool:
        """End the step before, return whether the loop ends, and else begin a step. Collective in mode sync.

            while not session.should_stop():
                ...

        With accumulate=k a step has k batches; hooks are called before the first and after the last of them.
        """
        if not (ends := self._ends()):
            self._pull_first()
        return ends

    def _ends(self) -> bool:
        self._check_open()
        if self._optimizer is None:
            raise InputError("session: call session.track(params=..., optimizer=...) before the first step")
        if self._in_step:
            if self._optimizer.accumulates:
                self._metrics.next_micro_batch()
                return False
            self._end_step()
        if self._stop_reason:
            return True
        self._begin_step()
        return False

    def _begin_step(self) -> None:
        self._in_step, self._is_ending, self._hooks_called = True, False, 0
        self._batches += 1
        self._step_begin = self.step
        for hook in self.hooks:
            hook.before_step(self)

    def _pull_first(self) -> None:
        """Mode ps: pull before the first gradient, because other workers already train."""
        if not self._is_fresh and not self.optimizer.session_support.is_lockstep:
            self.optimizer.pull(self.params)
            self.step = self._step_begin = self.optimizer.global_step
        self._is_fresh = True

    def log(self, *, examples: Any = None, **values: Any) -> None:
        """Log numbers of this step. In mode sync they are averaged over ranks, weighted by `examples`, the number of
        samples of this rank. All ranks must log the same names. Raises InputError for values that are not numbers.

            session.log(loss=0.25, accuracy=0.91, examples=64)
        """
        self._check_open()
        self._metrics.add(values, examples)

    def watch(self, **nests: Any) -> None:
        """Set nests of arrays, by name, for the histograms of the Summary hook: watch(gradients=grads)."""
        self.watched.update(nests)

    def _check_open(self) -> None:
        if not self._entered:
            raise InputError(
                "session: it has not begun; use it in a with statement: with allred.Session(...) as session"
            )
        if self._done:
            raise InputError("session: it has ended with its with statement; create a new one to continue training")

    def request_stop(self, reason: str = "stopped", everywhere: bool = False) -> None:
        """End the loop. In mode sync all ranks end it after the same step, which is the current one or the next; in
        mode local after a round.

        everywhere: all ranks call this after the same step; then the loop ends at once.
        """
        support = self.optimizer.session_support
        together = support.is_lockstep and support.at_boundary
        if everywhere and (together or reason == "max_steps"):  # which each worker sees at the servers
            self._stop_reason = self._stop_reason or reason
        else:
            self._stop_request = self._stop_request or reason
            self.optimizer.session_support.request_stop()

    def _end_step(self, alone: bool = False) -> None:
        """End the current step. Collective in mode sync, unless `alone`: then report only the values of this rank,
        without a collective, and write no periodic checkpoint."""
        in_lockstep = self.optimizer.session_support.end_of_step() and not alone
        self._note_step()
        optimizer, self._is_ending, self._due_savers = self.optimizer, True, []
        in_turn = in_lockstep or not optimizer.session_support.is_lockstep  # else the ranks are between two rounds
        due = self.is_chief and bool(self._saver.directory) and not alone and in_turn and self._saver.due(self.step)
        make_report = self._metrics.report_all if in_lockstep else self._metrics.report_local
        saves = due or (in_lockstep and bool(self._later_savers))
        step_report = make_report(self._signals.reason or self._stop_request, saves)
        times = world.current().counters.times
        ranks = world.current().communicator.size if in_turn and not in_lockstep else 1
        self.rates.record(self.step, int(step_report.examples) * ranks, *map(operator.sub, times, self._times))
        self._times = times
        if step_report.stop and optimizer.session_support.is_lockstep and (in_lockstep or alone):
            self._stop_reason = self._stop_reason or step_report.stop
        if in_lockstep or not optimizer.session_support.is_lockstep:  # else they are of this rank alone
            self._reported = self.step, step_report.values
        self._call_hooks(step_report.values)
        if step_report.save and not self._stop_reason:
            optimizer.session_support.before_checkpoint()
            randoms = coordination.gather_random_states(optimizer)
            savers, self._later_savers = [self._saver] * due + self._later_savers, []
            for saver in savers if self.is_chief else ():
                self._save_now(saver, randoms)

    def _call_hooks(self, values: dict[str, float], notes_position: bool = True) -> None:
        """Call the hooks that are left at the end of a step."""
        while self._hooks_called < len(self.hooks):
            self._hooks_called += 1
            self.hooks[self._hooks_called - 1].after_step(self, values)
        if notes_position:
            self._state.note_position()
        self._is_ending = False
        for saver in self._due_savers:
            self.save_by(saver)

    def _is_unfinished(self) -> bool:
        """Return whether the current step has updated the parameters, or its end has begun, and not all hooks have
        run."""
        return self._is_ending or (self._in_step and self.optimizer.global_step != self._step_begin)

    def _note_step(self) -> None:
        """Count the current step, if it has made an update."""
        self._in_step = False
        if self.optimizer.global_step != self._step_begin:
            self.step = self.optimizer.global_step

    # Checkpoints.

    def save_by(self, saver: Saver) -> None:
        """Write a checkpoint of the current state. For hooks, on the chief, after a step. A call within `after_step`
        writes when all hooks have run; in mode local after the next round."""
        if self._is_ending:
            self._due_savers.append(saver)
        elif self.optimizer.session_support.saves_in_rounds:
            self._later_savers.append(saver)
        else:
            self._save_now(saver)

    def _save_now(self, saver: Saver, randoms: Any = None) -> None:
        in_thread = self.optimizer.session_support.is_lockstep
        saver.save(self.step, lambda: self._capture(randoms, copy=True), in_thread)
        self.rates.pause()

    def _capture(self, randoms: Any = None, copy: bool = False) -> Callable[[str], str]:
        """Return a function that writes a checkpoint of the current state."""
        uses_saved_position = self.step == self.optimizer.global_step
        return self.optimizer.saving(self.params, self._state.pickle(randoms, uses_saved_position), copy)

    def _save_after_join(self, writer: int) -> None:
        """Write a checkpoint of rank `writer`, which joined last, after all ranks have joined."""
        if self._is_unfinished():  # the loop was left by a break
            self._end_step(alone=True)
        elif self.step != self.optimizer.global_step:
            self._state.note_position()
        randoms = coordination.gather_random_states(self.optimizer, root=writer)
        capture = functools.partial(self._capture, randoms)
        self.step = final_checkpoint.write_after_join(self._saver, self.optimizer, writer, capture)
        self._step_begin = self.step  # `join` copies the updates; `_note_step` must not count them as this rank's step

    # The end.

    def _finish_in_any_world(self) -> str | None:
        """As `_finish`, again if the ranks change before it is complete."""
        while True:
            try:
                return self._finish()
            except RanksChanged:
                self._leave_step()
                world.current().recovery.form()

    def _finish(self) -> str | None:
        if self._is_unfinished():  # the loop was left by a break
            self._end_step()
        return self._write_final()

    def _write_final(self) -> str | None:
        """Write the final checkpoint, when all workers have made their last step. Collective."""
        self._in_step = False
        self._wait_all_workers()
        self.optimizer.session_support.before_checkpoint()
        randoms = coordination.gather_random_states(self.optimizer, "the end of the session")
        for saver in self._later_savers:
            self._save_now(saver, randoms)
        return final_checkpoint.write(self._saver, self.optimizer, self.step, lambda: self._capture(randoms))

    def _finish_after_shutdown(self) -> str | None:
        """Mode ps: the job was asked to stop, and a checkpoint is written. Policy async: updates of other workers may
        have followed; then it is written again. Workers whose loop had ended before are in `_finish`, with the same
        collective operations."""
        self._stop_reason = self.asked or coordination.OTHER_RANK
        return self._write_final()

    def _finish_after_error(self, error: BaseException) -> str | None:
        optimizer, path = self.optimizer, None
        is_elastic = (here := world.current_or_none()) is None or here.recovery is not None  # the others go on
        if self._saver.directory and not is_elastic:
            path = final_checkpoint.write_after_error(
                error, self._is_unfinished(), self._saver, optimizer, self._token, self._capture
            )
        self.step = optimizer.global_step if optimizer.session_support.is_lockstep else self.step
        return path

    def _wait_all_workers(self) -> None:
        """Mode ps: wait for all workers, which make different numbers of steps, and pull the final parameters."""
        if not self.optimizer.session_support.is_lockstep:
            self.optimizer.session_support.wait_all_workers()
            self.optimizer.pull(self.params)
            self.step = self.optimizer.global_step

    def _call_end(self, failure: BaseException | None, path: str | None) -> None:
        seconds = time.monotonic() - self._start
        outcome = final_checkpoint.outcome(failure, self.asked, self.step, seconds, self._saver, path)
        if failure is None:
            updated = self.step != self._training_begin or bool(self.optimizer.skipped)
            final_checkpoint.report_outcome(outcome, self.max_steps, self._batches, updated)
        final_checkpoint.call_end(self.hooks, self, outcome)

    @property
    def starts(self) -> int:
        """How often `allred run` has started the job: 1 at first, one more after each restart and resize."""
        return world.config().starts

    # For hooks.

    @property
    def optimizer(self) -> DistributedOptimizer:
        """The optimizer given to `track`. Raises InputError before."""
        if self._optimizer is None:
            raise InputError("session: call session.track(params=..., optimizer=...) first")
        return self._optimizer

    @property
    def is_chief(self) -> bool:
        """Whether this is rank 0."""
        return topology.rank() == 0

    @property
    def asked(self) -> str:
        """The reason why the loop ends: the name of a signal to this process, or the requested reason; "" if none."""
        return self._stop_reason or self._signals.reason or self._stop_request
