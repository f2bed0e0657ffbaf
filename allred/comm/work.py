"""Started operations and how they make progress.

A collective is written as a generator that yields whenever it has to wait and returns its result: `Steps`. The queue of
a communicator runs them strictly in the order they were started, because MPI matches collectives by order; whoever
waits for one drives those before it, and, as its peers may be waiting there, those of other communicators. Where
something else keeps the order and drives (shm.py), they are begun ahead: all up to their first wait, without a look at
whether those before are complete. Nothing blocks in C for more than 20 ms, or a millisecond without progress: every
wait is a loop with a time limit, so Ctrl-C works and a missing peer ends in an error.
"""

import contextlib
import itertools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

from allred.errors import AllredError, InputError
from allred.timeline.track import Operation, Track
from allred.watch import exit as exit_protocol
from allred.watch import line
from allred.watch.wait import Awaited, Wait

T = TypeVar("T")

_SPINS = 50  # tests in a row before the core is offered to others; about 20 us
SPIN_WAIT_S = 0.001
_AWAKE_S = 0.1  # how long to go on looking without any progress, before sleeping
_SLEEP_SHARE = 0.01  # then sleep for this part of the time since the last progress: a wait is not much prolonged by it
_LONGEST_SLEEP_S = 0.01
_MOST_UNSEEN = 64  # operations that are kept, complete perhaps, before somebody looks


class Pending(Protocol):
    """Something under way."""

    @property
    def waits_for_peers(self) -> bool:
        """Whether it waits for the other ranks to arrive rather than for bytes."""

    @property
    def progress_count(self) -> int:
        """Grows while bytes move."""

    def done(self) -> bool:
        """Whether it is complete; does not wait."""

    def spin_wait(self) -> bool:
        """The same, waiting for a millisecond at most: spinning first, then offering the core to others."""


def spin_wait(done: Callable[[], bool]) -> bool:
    """`Pending.spin_wait` for what can only be tested."""
    tests, until = 0, time.perf_counter() + SPIN_WAIT_S
    while not done():
        tests += 1
        if tests > _SPINS:
            os.sched_yield()
            if time.perf_counter() > until:
                return False
    return True


class End(Protocol):
    """What a complete operation has left to do on a GPU."""

    def order(self) -> None:
        """Have what the caller enqueues from now on wait for it."""

    def done(self) -> bool:
        """Whether it is over."""

    def synchronize(self) -> None:
        """Wait for it, on the host."""


class Described(Protocol):
    """What knows the words for an operation: a header's Call."""

    def describe(self, number: int) -> str: ...


class Engine(Protocol):
    """What keeps the order of operations that are begun ahead, and moves them."""

    @property
    def has_progress_thread(self) -> bool:
        """Whether it does so while nobody waits."""

    def acquire(self, blocking: bool) -> bool:
        """A lock: False if it is taken."""

    def release(self) -> object: ...

    def on_complete(self, first: Any) -> object:
        """An operation is complete, that waited for this first: what was begun behind it may go on."""

    def halt(self) -> object:
        """Nothing is to move any more."""


class _NoEngine:
    """Nothing moves but while somebody waits."""

    has_progress_thread = False

    def __init__(self) -> None:
        lock = threading.Lock()
        self.acquire, self.release = lock.acquire, lock.release

    def on_complete(self, first: Any) -> None:
        pass

    def halt(self) -> None:
        pass


Steps = Generator[Pending, None, T]


class Work(Generic[T]):
    """A started operation: what the functions whose name ends in `_async` return.

    On the host `wait` blocks; on a GPU it orders the caller's current stream after it. Whether somebody keeps this
    object makes no difference to the operation.
    """

    def __init__(self, queue: "WorkQueue", title: str, steps: Steps[T]) -> None:
        self.title = title
        self.place = ""  # where it was started, "train.py:87", if whoever started it noted that
        self.described: tuple[Callable[[], Described], Callable[[], int]] | None = None  # by what, as which number
        self.end: End | None = None  # of an operation on device arrays, once it is enqueued
        self.noted: Operation | None = None  # in the timeline, if there is one
        self._queue = queue
        self._steps = steps
        self._pending: Pending | None = None
        self._first: Pending | None = None
        self._outcome: T | AllredError | None = None
        self._finished = False

    def done(self) -> bool:
        """Whether it is complete; makes what progress can be made without waiting."""
        self._queue.progress(self)
        return self._finished and (self.end is None or self.end.done())

    def wait(self, timeout_s: float | None = None) -> T:
        """The result, once the operation is complete.

        Raises what every rank raises if the ranks disagree, and CollectiveTimeout after `timeout_s` seconds (default:
        the setting of that name), after which the communicator cannot be used.
        """
        if timeout_s is not None and not (isinstance(timeout_s, (int, float)) and timeout_s > 0):
            raise InputError(f"wait({timeout_s!r}) must be a positive number of seconds, or None for the setting")
        if not self._finished:
            self._queue.wait(self, timeout_s)
        if isinstance(self._outcome, AllredError):
            raise self._outcome
        if line.current is not None and line.current.pending():
            raise line.current.error()
        if self.end is not None:
            self.end.order()
        return self._outcome  # type: ignore[return-value]

    def synchronize(self, timeout_s: float | None = None) -> T:
        """As `wait`; and of device arrays the host waits too, until the GPU is done with it."""
        result = self.wait(timeout_s)
        if self.end is not None:
            self.end.synchronize()
        return result

    def _advance(self) -> bool:
        """Take all steps that need no waiting; True when the operation is complete."""
        while not self._finished:
            if self._pending is not None and not self._pending.done():
                return False
            self._step()
        return True

    def _step(self) -> None:
        """Go on until it has to wait for something else."""
        self._queue.steps_taken += 1
        self._queue.advancing = self
        try:
            self._pending = next(self._steps)
            self._first = self._first or self._pending
        except StopIteration as stop:
            self._finish(stop.value)
        except AllredError as error:  # a verdict, the same on all ranks: the next operation can go on
            self._finish(error)
        except BaseException as error:
            self._queue.poison(f"{self.title} was cut short by {type(error).__name__}")
            raise

    def _finish(self, outcome: T | AllredError) -> None:
        self._outcome, self._finished = outcome, True
        self._queue.engine.on_complete(self._first)
        self._queue.advancing = None  # who keeps it has its result, which may be large
        self._pending = self._first = None
        if self.noted is not None and self._queue.track is not None:
            self._queue.track.end(self.noted)


communicators: "weakref.WeakSet[WorkQueue]" = weakref.WeakSet()  # whose queues go on in every wait


class WorkQueue:
    """The operations of one communicator that are not complete yet, oldest first. Used by one thread at a time.

    `idle` says that there are none, and that one may be started. With an engine they are begun ahead.
    """

    def __init__(self, timeout_s: float, engine: Engine | None = None, members: Sequence[int] | None = None) -> None:
        self.timeout_s = timeout_s
        self.members = members  # of a process set, by their numbers in the world; None: all ranks
        self.steps_taken = 0
        self.waited_for_peers_s = 0.0
        self.waited_s = 0.0  # in all, the former included
        self.poisoned = ""
        self.idle = True
        self.quiet = False  # whether a long wait is meant
        self.awaited: Awaited | None = None  # the ranks that its waits depend on, if known
        self.advancing: Work[Any] | None = None  # the operation whose steps are being taken
        self.track: Track | None = None  # where operations are noted, if there is a timeline
        self._works: deque[Work[Any]] = deque()
        self._nudging = threading.RLock()  # of a thread that waits for another queue and moves this one
        self._pid = os.getpid()
        self._ahead = engine is not None
        self.engine: Engine = engine or _NoEngine()

    def start(self, title: str, steps: Steps[T]) -> Work[T]:
        """Begin an operation, after all those before it."""
        with self._alone():
            work = Work(self, title, steps)
            if self.track is not None:
                work.noted = Operation(title)
            self._works.append(work)
            self.idle = False
            if self._ahead:
                work._step()
            if not self.engine.has_progress_thread or len(self._works) > _MOST_UNSEEN:
                self._progress(work)
        return work

    def behind(self, work: Work[Any], count: int) -> list[str]:
        """The titles of the next operations that were started after this one, so many at most."""
        later = itertools.dropwhile(lambda other: other is not work, self._works)
        return [other.title for other in itertools.islice(later, 1, 1 + count)]

    def progress(self, work: Work[Any]) -> bool:
        """Drive the queue up to `work` as far as it goes without waiting; True once `work` is complete."""
        with self._alone():
            return self._progress(work)

    def _progress(self, work: Work[Any]) -> bool:
        while not work._finished and self._works[0]._advance():
            self._works.popleft()
            self.idle = not self._works and not self.poisoned
        return work._finished

    def _nudge(self) -> None:
        """Drive all of it as far as it goes without waiting, if nobody else does."""
        if not self._works or self.poisoned or not self._nudging.acquire(False):
            return
        try:
            if self.engine.acquire(False):
                try:
                    self._progress(self._works[-1])
                finally:
                    self.engine.release()
        finally:
            self._nudging.release()

    def wait(self, work: Work[Any], timeout_s: float | None) -> None:
        """Drive the queue until `work` is complete."""
        with self._alone():
            self._wait(work, timeout_s)

    def _wait(self, work: Work[Any], timeout_s: float | None) -> None:
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        start = last_progress = now = time.perf_counter()
        deadline, taken = start + limit_s, (self.steps_taken, 0)
        told: Wait | None = None
        others = [queue for queue in communicators if queue is not self and queue._works]
        if line.current is not None:
            line.current.waits = True
        try:
            while not self._progress(work):
                for queue in others:
                    queue._nudge()
                pending = self._works[0]._pending
                assert pending is not None
                if (self.steps_taken, pending.progress_count) != taken:
                    taken, last_progress = (self.steps_taken, pending.progress_count), now
                peers = pending.waits_for_peers
                if now - last_progress > _AWAKE_S:
                    told = told or Wait(self.describe(), self.quiet, self.members)
                    told.go_on(now - start, peers)
                    time.sleep(min(_SLEEP_SHARE * (now - last_progress), _LONGEST_SLEEP_S))
                else:
                    pending.spin_wait()
                before, now = now, time.perf_counter()
                if peers:
                    self.waited_for_peers_s += now - before
                if now > deadline:
                    outcome = Wait(self.describe(), self.quiet, awaited=self.awaited).limit(limit_s)
                    if isinstance(outcome, Exception):
                        self.poison(f"{self._works[0].title} timed out after {limit_s:g} s")
                        exit_protocol.stuck()
                        raise outcome
                    deadline = now + outcome
                if line.current is not None and line.current.has_error:
                    raise self._over(line.current.error())
        finally:
            if line.current is not None:
                line.current.waits = False
            if told is not None:
                told.end()
            now = time.perf_counter()
            self.waited_s += now - start
            if self.track is not None and work.noted is not None:
                self.track.waited(work.noted, start)

    def describe(self) -> str:
        """The operation under way, in words."""
        if self._works[0].described is None:
            return self._works[0].title
        call, number = self._works[0].described
        return call().describe(number())

    def _over(self, error: AllredError) -> AllredError:
        self.poison(str(error).partition("\n")[0])
        exit_protocol.stuck()
        return error

    def poison(self, reason: str) -> None:
        """Refuse everything from now on: an MPI operation cannot be taken back, and the ranks no longer match."""
        self.poisoned = self.poisoned or reason
        self.idle = False
        self.engine.halt()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """For one thread of the rank's own process at a time, and only while the communicator is sound."""
        if os.getpid() != self._pid:
            raise AllredError("this process was forked from a rank after allred.init(); only the rank itself is one")
        if not self.engine.acquire(False):
            with self._nudging:  # then it is not for a nudge, which is soon over
                if not self.engine.acquire(False):
                    raise AllredError(
                        "two threads use allred at once; the order of operations must be the same on all ranks"
                    )
        try:
            if self.poisoned:
                if line.current is not None and line.current.has_error:
                    raise line.current.error()
                raise AllredError(
                    f"this communicator cannot be used any more: {self.poisoned}; end the job and start again"
                )
            yield
        finally:
            self.engine.release()
