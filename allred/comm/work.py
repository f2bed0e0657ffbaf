"""Started operations and how they make progress.

A collective is written as a generator that yields whenever it has to wait and returns its result: `Steps`. The queue
of a communicator runs them strictly in the order they were started, because MPI matches collectives by order; whoever
waits for one drives those before it. Nothing here blocks in C: every wait is a loop of tests with a time limit, so
Ctrl-C works and a missing peer ends in an error.
"""

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator
from typing import Any, Generic, Protocol, TypeVar

from allred.errors import AllredError, CollectiveTimeout
from allred.watch import exit as exit_protocol

T = TypeVar("T")

_SPINS = 50  # tests in a row before the core is offered to others; about 20 us
_YIELD_S = 1.0  # how long to go on yielding (0.5 us each) without any progress, before sleeping
_SLEEP_S = 0.001


class Pending(Protocol):
    """Something under way. `peers` says whether it waits for the other ranks to arrive rather than for bytes."""

    peers: bool

    def done(self) -> bool: ...


Steps = Generator[Pending, None, T]


class Work(Generic[T]):
    """A started operation. On the host `wait` blocks; on a GPU it orders the caller's current stream after it."""

    def __init__(self, queue: "WorkQueue", title: str, steps: Steps[T]) -> None:
        self.title = title
        self._queue = queue
        self._steps = steps
        self._pending: Pending | None = None
        self._outcome: T | AllredError | None = None
        self._finished = False

    def done(self) -> bool:
        """Whether it is complete; makes what progress can be made without waiting."""
        self._queue.progress(self)
        return self._finished

    def wait(self, timeout_s: float | None = None) -> T:
        """The result, once the operation is complete.

        Raises what every rank raises if the ranks disagree, and CollectiveTimeout after `timeout_s` seconds (default:
        the setting of that name), after which the communicator cannot be used.
        """
        if not self._finished:
            self._queue.wait(self, timeout_s)
        if isinstance(self._outcome, AllredError):
            raise self._outcome
        return self._outcome  # type: ignore[return-value]

    def _advance(self) -> bool:
        """Take all steps that need no waiting; True when the operation is complete."""
        while not self._finished:
            if self._pending is not None and not self._pending.done():
                return False
            self._queue.steps_taken += 1
            try:
                self._pending = next(self._steps)
            except StopIteration as stop:
                self._outcome, self._finished = stop.value, True
            except AllredError as error:  # a verdict, the same on all ranks: the next operation can go on
                self._outcome, self._finished = error, True
            except BaseException as error:
                self._queue.poison(f"{self.title} was cut short by {type(error).__name__}")
                raise
        return True


class WorkQueue:
    """The operations of one communicator that are not complete yet, oldest first. Used by one thread at a time."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.steps_taken = 0
        self.waited_for_peers_s = 0.0
        self.waited_s = 0.0  # in all, the former included
        self.poisoned = ""
        self._works: deque[Work[Any]] = deque()
        self._pid = os.getpid()
        self._lock = threading.Lock()  # never waited for

    def start(self, title: str, steps: Steps[T]) -> Work[T]:
        """Begin an operation, after all those before it."""
        with self._alone():
            work = Work(self, title, steps)
            self._works.append(work)
            self._progress(work)
        return work

    def progress(self, work: Work[Any]) -> bool:
        """Drive the queue up to `work` as far as it goes without waiting; True once `work` is complete."""
        with self._alone():
            return self._progress(work)

    def _progress(self, work: Work[Any]) -> bool:
        while not work._finished and self._works[0]._advance():
            self._works.popleft()
        return work._finished

    def wait(self, work: Work[Any], timeout_s: float | None) -> None:
        """Drive the queue until `work` is complete."""
        with self._alone():
            self._wait(work, timeout_s)

    def _wait(self, work: Work[Any], timeout_s: float | None) -> None:
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        start = last_progress = now = time.perf_counter()
        tests, taken = 0, self.steps_taken
        try:
            while not self._progress(work):
                if self.steps_taken != taken:
                    tests, taken, last_progress = 0, self.steps_taken, now
                tests += 1
                if now - last_progress > _YIELD_S:
                    time.sleep(_SLEEP_S)
                elif tests > _SPINS:
                    os.sched_yield()
                before, now = now, time.perf_counter()
                if self._works[0]._pending is not None and self._works[0]._pending.peers:
                    self.waited_for_peers_s += now - before
                if now - start > limit_s:
                    self.poison(f"{self._works[0].title} timed out after {limit_s:g} s")
                    exit_protocol.stuck()
                    raise CollectiveTimeout(
                        f"{self._works[0].title}: not complete after {limit_s:g} s; a rank is late, stopped or gone, "
                        "or does not call this operation. If so long a wait is meant, raise ALLRED_TIMEOUT_S"
                    )
        finally:
            self.waited_s += time.perf_counter() - start

    def poison(self, reason: str) -> None:
        """Refuse everything from now on: an MPI operation cannot be taken back, and the ranks no longer match."""
        self.poisoned = self.poisoned or reason

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """For one thread of the rank's own process at a time, and only while the communicator is sound."""
        if os.getpid() != self._pid:
            raise AllredError("this process was forked from a rank after allred.init(); only the rank itself is one")
        if not self._lock.acquire(blocking=False):
            raise AllredError("two threads use allred at once; the order of operations must be the same on all ranks")
        try:
            if self.poisoned:
                raise AllredError(
                    f"this communicator cannot be used any more: {self.poisoned}; end the job and start again"
                )
            yield
        finally:
            self._lock.release()
