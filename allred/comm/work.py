"""Started operations and how they make progress.

A collective is a generator that yields whenever it has to wait and returns its result: `Steps`. The queue of a
communicator runs operations strictly in the order in which they were started, because MPI matches collectives by order.
A wait for one operation also runs the operations before it, and those of other communicators, because other ranks may
be waiting there. With backend shm, `start` runs each operation up to its first wait at once: the queue in C keeps the
order. Nothing blocks in C for more than 20 ms, or a
millisecond without progress: every wait is a loop with a time limit, so Ctrl-C works and a missing rank is an error.
"""

import contextlib
import itertools
import os
import signal
import sys
import threading
import time
import traceback
import types
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from allred import native, world
from allred.cluster import mpi_progress
from allred.comm.header import OpDescriptor
from allred.errors import AllredError, InputError, MismatchError
from allred.gpu.launch_order import LaunchTurn
from allred.gpu.streams import Completion
from allred.runtime import process_end
from allred.runtime.stderr import rank_warning
from allred.runtime.timings import LOST_CONNECTION_S
from allred.timeline.recorder import Operation, Track
from allred.watch import exit as exit_protocol
from allred.watch.wait import Awaited, Wait

if TYPE_CHECKING:
    from allred.native._kernels import Segment

T = TypeVar("T")

_NOT_THE_PROGRAM = frozenset(
    {
        *("_allred_torch", "allred", "contextlib", "equinox", "flax", "jax", "keras", "optax", "scipy", "tensorflow"),
        *("tf_keras", "torch", "typing_extensions"),
    }
)
_SPINS = 50  # tests in a row before the core is yielded; about 20 us
SPIN_WAIT_S = 0.001
_AWAKE_S = 0.1  # without progress for this long, start to sleep
_SLEEP_SHARE = 0.01  # a sleep, as a share of the time since the last progress: it hardly prolongs a wait
_LONGEST_SLEEP_S = 0.01
_ERROR_CHARS = 200  # of an earlier error in later ones
_MAX_UNCHECKED = 64  # started operations, possibly complete, before the queue checks them
_TWO_THREADS = "two threads use allred at once; use one, so that all ranks have the same order of operations"
_IN_ITSELF = (
    "this operation was called while another one of the same thread waits, by a signal handler, __del__ or a pickle "
    "method; set a flag there, and call the operation afterwards"
)


class Pending(Protocol):
    """Something that an operation waits for."""

    @property
    def waits_for_peers(self) -> bool:
        """Whether it waits for the other ranks to arrive rather than for bytes."""

    @property
    def progress_count(self) -> int:
        """Grows while bytes move."""

    def done(self) -> bool:
        """Whether it is complete; does not wait."""

    def spin_wait(self) -> bool:
        """As `done`, but wait for at most a millisecond: spin first, then yield the core."""


def spin_wait(done: Callable[[], bool]) -> bool:
    """`Pending.spin_wait` for something that can only be tested."""
    tests, until = 0, time.perf_counter() + SPIN_WAIT_S
    while not done():
        tests += 1
        if tests > _SPINS:
            os.sched_yield()
            if time.perf_counter() > until:
                return False
    return True


class Polled:
    """A Pending that can only be tested, by `done`, such as the Test of an MPI request."""

    progress_count = 0

    def __init__(self, done: Callable[[], bool], waits_for_peers: bool = False) -> None:
        self.done = done
        self.waits_for_peers = waits_for_peers

    def spin_wait(self) -> bool:
        return spin_wait(self.done)


class _NoEngine:
    """In place of a Segment, which runs operations that are begun ahead: they make progress only in waits."""

    has_progress_thread = False

    def __init__(self) -> None:
        lock = threading.Lock()
        self.acquire, self.release = lock.acquire, lock.release

    def on_complete(self, first: Any) -> None:
        pass

    def halt(self) -> None:
        pass


Steps = Generator[Pending, None, T]


def call_site() -> str:
    """Return the innermost line of the caller outside allred, such as "train.py:87"."""
    frame: types.FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_THE_PROGRAM:
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}" if frame is not None else ""


class UserCodeError(Exception):
    """Raised by an operation that has exchanged all its data: code of the user has raised `error`, on this rank. The
    operation raises `error`, and the next one can run."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class Work(Generic[T]):
    """A started operation, as returned by the functions whose name ends in `_async`.

    For host arrays `wait` blocks; for device arrays it orders the caller's current stream after the operation. The
    operation runs whether the program keeps this object or not.

    Example: `work = allred.allreduce_async(x)`, then `y = work.wait()`.
    """

    def __init__(self, queue: "WorkQueue", title: str, steps: Steps[T]) -> None:
        self.title = title
        self.place = ""  # the line that started it, such as "train.py:87", if known
        self.described: tuple[Callable[[], OpDescriptor], Callable[[], int]] | None = None  # descriptor and number
        self.turn: LaunchTurn | None = None  # of an operation on device arrays: when it may be launched
        self.end: Completion | None = None  # of an operation on device arrays; it may still run on the GPU
        self.timeline_record: Operation | None = None  # its record in the timeline
        self.ranks = 0  # when it is complete: how many ranks took part, without those that have joined
        self._queue = queue
        self._steps = steps
        self._pending: Pending | None = None
        self._first: Pending | None = None
        self._result: T | None = None
        self._error: Exception | None = None
        self._finished = self._is_silent = False

    def done(self) -> bool:
        """Return whether it is complete. Makes all progress that is possible without waiting."""
        self._queue.progress(self)
        return self._finished and (self.end is None or self.end.done())

    @property
    def finished(self) -> bool:
        """Whether it is known to be complete or to have failed; makes no progress."""
        return self._finished

    @property
    def error(self) -> Exception | None:
        """The error that `wait` raises, if it is known to have failed. A wait also lets later operations start."""
        return self._error

    @property
    def limit_s(self) -> float:
        """The time limit of `wait()` without argument, in seconds."""
        return self._queue.timeout_s

    def wait(self, timeout_s: float | None = None) -> T:
        """Wait until the operation is complete, and return its result.

        timeout_s: the limit in seconds; default: the setting of that name.

        Raises InputError or MismatchError, the same on all ranks, if the ranks disagree. Raises CollectiveTimeout
        after `timeout_s`; the communicator cannot be used afterwards.
        """
        if timeout_s is not None and not (isinstance(timeout_s, (int, float)) and timeout_s > 0):
            raise InputError(f"wait({timeout_s!r}) must be a positive number of seconds, or None for the setting")
        if not self._finished:
            self._queue.wait(self, timeout_s)
        if self._error is not None:
            self._queue.note_raised(self._error)
            if isinstance(self._error, AllredError):
                self._error.to_report.clear()
            raise self._error
        if (watcher := world.watcher()) is not None and watcher.pending():
            raise watcher.error()
        if self.end is not None:
            self.end.order_callers()
        return self._result  # type: ignore[return-value]

    def run_in_thread(self, timeout_s: float | None, started: float) -> bool:
        """In a thread that is not the program's, make progress without waiting. Return whether it is complete.

        Raises CollectiveTimeout `timeout_s` after `started`, a time of time.perf_counter().
        """
        if not self._finished:
            self._queue.run_in_thread(self, self._queue.timeout_s if timeout_s is None else timeout_s, started)
        return self._finished

    def synchronize(self, timeout_s: float | None = None) -> T:
        """As `wait`, but for device arrays the host also waits until the GPU has finished."""
        result = self.wait(timeout_s)
        if self.end is not None:
            self.end.synchronize()
        return result

    def _advance(self) -> bool:
        """Run until it has to wait; True if the operation is complete."""
        while not self._finished:
            if self._pending is not None and not self._pending.done():
                return False
            self._step()
        return True

    def _step(self) -> None:
        """Run until it has to wait for something else."""
        self._queue.steps_taken += 1
        self._queue.advancing = self
        try:
            self._pending = next(self._steps)
            self._first = self._first or self._pending
        except StopIteration as stop:
            self._finish(stop.value)
        except AllredError as error:  # the same error on all ranks: the next operation can run
            self._queue.record_error(error)
            error.__traceback__ = None  # its frames refer to this object
            if not self._is_silent:
                error.to_report = [str(error)]
                _not_raised[weakref.ref(self, _report)] = error.to_report
            if isinstance(error, MismatchError) and error.operations_differ:
                self._queue.withdraw_later(self, error)
            self._finish(None, error)
        except UserCodeError as failure:
            self._finish(None, failure.error)
        except BaseException as error:
            reason = traceback.format_exception_only(error)[-1].partition("\n")[0]
            self._queue.poison(f"{self.title} was cut short by {reason}")
            raise

    def silence(self) -> None:
        """Do not print its error if no wait raises it: that of an operation started together with it is raised."""
        self._is_silent = True
        if isinstance(self._error, AllredError):
            self._error.to_report.clear()

    def withdraw(self, error: MismatchError) -> None:
        """Fail with the error of an operation that was started before. The other ranks do not know of this one."""
        if (withdraw := getattr(self._first, "withdraw", None)) is not None:
            withdraw()
        self._steps.close()
        self._finish(None, error)

    def _finish(self, result: T | None, error: Exception | None = None) -> None:
        self._result, self._error, self._finished = result, error, True
        if self.turn is not None:
            self.turn.end()
        self._queue.engine.on_complete(self._first)
        self._queue.advancing = None  # release the operation: its result may be large
        self._pending = self._first = None
        if self.timeline_record is not None and self._queue.track is not None:
            self._queue.track.end(self.timeline_record)


# `to_report` of the errors of operations.
_not_raised: dict[weakref.ref[Work[Any]], list[str]] = {}


def _report(work: weakref.ref[Work[Any]]) -> None:
    """Print the error of an operation whose Work is deleted, or kept until the end, without a wait that raises it."""
    for text in _not_raised.pop(work, ()):
        rank_warning(f"an operation failed, and the program has not waited for it: {text}")


def _report_all() -> None:
    for work in [*_not_raised]:
        _report(work)


process_end.register(_report_all)
os.register_at_fork(after_in_child=_not_raised.clear)


class WorkQueue:
    """The operations of one communicator that are not complete yet, oldest first. Used by one thread at a time. idle:
    whether there are none, and one may be started. With an engine they are begun ahead."""

    def __init__(self, timeout_s: float, engine: "Segment | None" = None, members: Sequence[int] | None = None) -> None:
        self.timeout_s = timeout_s
        self.members = members  # world ranks of a process set; None: all ranks
        self.steps_taken = 0
        self.waited_for_peers_s = 0.0
        self.waited_s = 0.0  # total, including waits for peers
        self.poisoned = ""
        self._errors, self._last_error = 0, ""  # that operations have raised
        self._not_raised: MismatchError | None = None  # by a wait of the program; operations that start fail with it
        self.idle = True
        self.quiet = False  # whether long waits are intended: no warnings
        self.awaited: Awaited | None = None  # the ranks that it waits for, if known
        self.advancing: Work[Any] | None = None  # the operation that is running
        self.track: Track | None = None  # records operations, if there is a timeline
        self.connection_error: Callable[[], AllredError | None] = lambda: None  # see Backend
        self._works: deque[Work[Any]] = deque()
        self._running_for_others = threading.RLock()  # taken by a thread that waits for another queue and runs this one
        self._pid = os.getpid()
        self._ahead = engine is not None
        self.engine: Segment | _NoEngine = engine or _NoEngine()

    def start(self, title: str, steps: Steps[T], turn: LaunchTurn | None = None) -> Work[T]:
        """Start an operation, which runs after all those before it. turn: of an operation on device arrays."""
        with self._exclusive():
            work = Work(self, title, steps)
            work.turn = turn
            if self.track is not None:
                work.timeline_record = Operation(title)
            if self._not_raised is not None:
                work.withdraw(self._not_raised)
                return work
            self._works.append(work)
            self.idle = False
            if self._ahead:
                work._step()
            if work._finished or not self.engine.has_progress_thread or len(self._works) > _MAX_UNCHECKED:
                self._progress(work)
        return work

    def begin_again(self) -> None:
        """Let the running operation exchange headers a second time. Only if it was started last."""
        assert self.advancing is not None
        assert self._works[-1] is self.advancing
        self.engine.on_complete(self.advancing._first)
        self.advancing._first = None

    def started_later(self, work: Work[Any], count: int) -> list[str]:
        """Return the titles of up to `count` operations that were started after `work`."""
        later = itertools.dropwhile(lambda other: other is not work, self._works)
        return [other.title for other in itertools.islice(later, 1, 1 + count)]

    def progress(self, work: Work[Any]) -> bool:
        """Run the queue up to `work` without waiting; True if `work` is complete."""
        with self._exclusive():
            return self._progress(work)

    def _progress(self, work: Work[Any]) -> bool:
        while not work._finished and self._works[0]._advance():
            self._works.popleft()
        while self._works and self._works[0]._finished:  # by its first step, in `start`
            self._works.popleft()
        self._set_idle()
        return work._finished

    def _set_idle(self) -> None:
        self.idle = not (self._works or self.poisoned or self._not_raised is not None)

    def withdraw_later(self, work: Work[Any], error: MismatchError) -> None:
        """Fail all operations that were started after `work`, which the ranks called differently, and new ones until a
        wait has raised the error. Otherwise a wait for a later operation could wait for a rank that has raised the
        error already and goes on."""
        self._not_raised = error
        for later in itertools.islice(itertools.dropwhile(lambda other: other is not work, self._works), 1, None):
            later.withdraw(error)

    def note_raised(self, error: Exception) -> None:
        """Note that a wait raises the error of an operation."""
        if error is self._not_raised:
            self._not_raised = None
            self._set_idle()

    def _run_for_others(self) -> None:
        """Run the whole queue without waiting, unless another thread does."""
        with self._exclusive_for_others() as runs:
            if runs and self._works and not self.poisoned:
                self._progress(self._works[-1])

    def run_in_thread(self, work: Work[Any], limit_s: float, started: float) -> None:
        """Run the queue up to `work` unless another thread does; wait only after the time limit or a failure."""
        self._check_usable()
        with self._exclusive_for_others() as runs:
            if runs and not self.poisoned and not self._progress(work):
                late_s = time.perf_counter() - started - limit_s
                if late_s > 0 or world.error() is not None:
                    self._wait(work, limit_s, started)

    @contextlib.contextmanager
    def _exclusive_for_others(self) -> Iterator[bool]:
        """Yield whether this thread may run the queue: no other one does. The program's thread waits until the end."""
        if not self._running_for_others.acquire(False):
            yield False
            return
        try:
            runs = self.engine.acquire(False)
            try:
                yield runs
            finally:
                if runs:
                    self.engine.release()
        finally:
            self._running_for_others.release()

    def wait(self, work: Work[Any], timeout_s: float | None) -> None:
        """Run the queue until `work` is complete."""
        with self._exclusive():
            self._wait(work, timeout_s)

    def _wait(self, work: Work[Any], timeout_s: float | None, started: float | None = None) -> None:
        """started: when the time limit began to run; default: now."""
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        start = last_progress = now = time.perf_counter()
        deadline, taken = (start if started is None else started) + limit_s, (self.steps_taken, 0)
        long_wait: Wait | None = None
        others = [queue for queue in world.queues() if queue is not self and queue._works]
        watcher = world.watcher()
        if watcher is not None:
            watcher.waits = True
        try:
            while not self._progress(work):
                for queue in others:
                    queue._run_for_others()
                pending = self._works[0]._pending
                assert pending is not None
                if (self.steps_taken, pending.progress_count) != taken:
                    taken, last_progress = (self.steps_taken, pending.progress_count), now
                peers = pending.waits_for_peers
                done = False
                if now - last_progress > _AWAKE_S:
                    long_wait = long_wait or Wait(self.describe(), self.quiet, self.members, earlier=self.earlier)
                    long_wait.report(now - start, peers or getattr(pending, "needs_all_ranks", False))
                    time.sleep(min(_SLEEP_SHARE * (now - last_progress), _LONGEST_SLEEP_S))
                    if native.interrupted() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                        raise KeyboardInterrupt  # another handler runs after the wait
                else:
                    done = pending.spin_wait()
                if not done:
                    mpi_progress.advance()
                before, now = now, time.perf_counter()
                if peers:
                    self.waited_for_peers_s += now - before
                if now > deadline:
                    wait = Wait(self.describe(), self.quiet, awaited=self.awaited, earlier=self.earlier)
                    outcome = wait.at_limit(limit_s)
                    if isinstance(outcome, Exception):
                        self.poison(f"{self._works[0].title} timed out after {limit_s:g} s")
                        exit_protocol.stuck()
                        raise outcome
                    deadline = now + outcome
                error = world.error()
                if error is None and now - last_progress > LOST_CONNECTION_S:
                    error = self.connection_error()
                    if error is not None and (recovery := world.current().recovery) is not None:
                        error = recovery.lose_connection(error)
                if error is not None:
                    self.poison(str(error).partition("\n")[0])
                    exit_protocol.stuck()
                    raise error
        finally:
            if watcher is not None:
                watcher.waits = False
            if long_wait is not None:
                long_wait.end()
            now = time.perf_counter()
            self.waited_s += now - start
            if self.track is not None and work.timeline_record is not None:
                self.track.waited(work.timeline_record, start)

    def describe(self) -> str:
        """Describe the current operation."""
        if self._works[0].described is None:
            return self._works[0].title
        call, number = self._works[0].described
        return call().describe(number())

    def record_error(self, error: AllredError) -> None:
        """Record an error of an operation, or of the checks that follow it. The program may catch it; later errors name
        it."""
        if not hasattr(error, "is_recorded"):
            error.is_recorded = True  # type: ignore[attr-defined]
            self._errors += 1
            self._last_error = f"{type(error).__name__}: {error}".partition("\n")[0][:_ERROR_CHARS]

    @property
    def earlier(self) -> str:
        """The errors so far as text, for messages; "" if there is none."""
        if self._errors < 2:
            return f"an earlier operation failed: {self._last_error}" if self._errors else ""
        return f"{self._errors} earlier operations failed, the last one: {self._last_error}"

    def poison(self, reason: str) -> None:
        """Refuse all further operations: an MPI operation cannot be cancelled, and the ranks no longer match."""
        self.poisoned = self.poisoned or reason
        self.idle = False
        self.engine.halt()

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Allow one thread of the rank's own process at a time, and only if the communicator is usable."""
        if os.getpid() != self._pid:
            raise AllredError("this process was forked from a rank after allred.init(); use allred in the rank only")
        if not self.engine.acquire(False):
            with self._running_for_others:  # wait for `_run_for_others`, which is short
                if not self.engine.acquire(False):
                    raise AllredError(_IN_ITSELF if _is_in_itself() else _TWO_THREADS)
        try:
            self._check_usable()
            yield
        finally:
            self.engine.release()

    def _check_usable(self) -> None:
        if self.poisoned:
            if (error := world.error()) is not None:
                raise error
            raise AllredError(
                f"this communicator cannot be used any more: {self.poisoned}; end the job and start again"
            )


def _is_in_itself() -> bool:
    """Return whether the stack of this thread has a function of the program between two calls of operations."""
    frame, runs, was_inside = sys._getframe(), 0, False
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        inside = module.startswith("allred.comm.")
        if inside or not module.startswith(("allred.", "contextlib")):
            runs, was_inside = runs + (inside and not was_inside), inside
        frame = frame.f_back  # type: ignore[assignment]
    return runs > 1
