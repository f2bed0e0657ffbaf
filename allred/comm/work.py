"""Started operations and how they make progress.

A collective is written as a generator that yields whenever it has to wait and returns its result: `Steps`. The queue
of a communicator runs them strictly in the order they were started, because MPI matches collectives by order; whoever
waits for one drives those before it. Nothing blocks in C for more than 20 ms, or a
millisecond without progress: every wait is a loop with a time limit, so Ctrl-C works and a missing peer ends in an
error.
"""

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

from allred.errors import AllredError
from allred.watch import exit as exit_protocol
from allred.watch import line
from allred.watch.wait import Wait

T = TypeVar("T")

_SPINS = 50  # tests in a row before the core is offered to others; about 20 us
LINGER_S = 0.001
_AWAKE_S = 0.1  # how long to go on looking without any progress, before sleeping
_SLEEP_SHARE = 0.01  # then sleep for this part of the time since the last progress: a wait is not much prolonged by it
_LONGEST_SLEEP_S = 0.01


class Pending(Protocol):
    """Something under way."""

    @property
    def peers(self) -> bool:
        """Whether it waits for the other ranks to arrive rather than for bytes."""

    @property
    def moves(self) -> int:
        """Grows while bytes move."""

    def done(self) -> bool:
        """Whether it is complete; does not wait."""

    def linger(self) -> bool:
        """The same, waiting for a millisecond at most: spinning first, then offering the core to others."""


def linger(done: Callable[[], bool]) -> bool:
    """`Pending.linger` for what can only be tested."""
    tests, until = 0, time.perf_counter() + LINGER_S
    while not done():
        tests += 1
        if tests > _SPINS:
            os.sched_yield()
            if time.perf_counter() > until:
                return False
    return True


class Described(Protocol):
    """What knows the words for an operation: a header's Call."""

    def describe(self, number: int) -> str: ...


class Lock(Protocol):
    """What a queue needs of a lock."""

    def acquire(self, blocking: bool) -> bool: ...

    def release(self) -> object: ...


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
        if line.current is not None and line.current.pending():
            raise line.current.error()
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
    """The operations of one communicator that are not complete yet, oldest first. Used by one thread at a time.

    `idle` says that there are none, and that one may be started. `lock` is never waited for.
    """

    def __init__(self, timeout_s: float, lock: Lock | None = None, members: Sequence[int] | None = None) -> None:
        self.timeout_s = timeout_s
        self.members = members  # of a process set, by their numbers in the world; None: all ranks
        self.steps_taken = 0
        self.waited_for_peers_s = 0.0
        self.waited_s = 0.0  # in all, the former included
        self.poisoned = ""
        self.idle = True
        self.quiet = False  # whether a long wait is meant
        self.under_way: tuple[Callable[[], Described], int] | None = None  # the oldest operation, and its number
        self._works: deque[Work[Any]] = deque()
        self._pid = os.getpid()
        self._lock = lock or threading.Lock()

    def start(self, title: str, steps: Steps[T]) -> Work[T]:
        """Begin an operation, after all those before it."""
        with self._alone():
            work = Work(self, title, steps)
            self._works.append(work)
            self.idle = False
            self._progress(work)
        return work

    def progress(self, work: Work[Any]) -> bool:
        """Drive the queue up to `work` as far as it goes without waiting; True once `work` is complete."""
        with self._alone():
            return self._progress(work)

    def _progress(self, work: Work[Any]) -> bool:
        while not work._finished and self._works[0]._advance():
            self._works.popleft()
            self.under_way = None
            self.idle = not self._works and not self.poisoned
        return work._finished

    def wait(self, work: Work[Any], timeout_s: float | None) -> None:
        """Drive the queue until `work` is complete."""
        with self._alone():
            self._wait(work, timeout_s)

    def _wait(self, work: Work[Any], timeout_s: float | None) -> None:
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        start = last_progress = now = time.perf_counter()
        deadline, taken = start + limit_s, (self.steps_taken, 0)
        told: Wait | None = None
        if line.current is not None:
            line.current.waits = True
        try:
            while not self._progress(work):
                pending = self._works[0]._pending
                assert pending is not None
                if (self.steps_taken, pending.moves) != taken:
                    taken, last_progress = (self.steps_taken, pending.moves), now
                peers = pending.peers
                if now - last_progress > _AWAKE_S:
                    told = told or Wait(self.describe(), self.quiet, self.members)
                    told.go_on(now - start, peers)
                    time.sleep(min(_SLEEP_SHARE * (now - last_progress), _LONGEST_SLEEP_S))
                else:
                    pending.linger()
                before, now = now, time.perf_counter()
                if peers:
                    self.waited_for_peers_s += now - before
                if now > deadline:
                    error = Wait(self.describe(), self.quiet).limit(limit_s)
                    if error is not None:
                        self.poison(f"{self._works[0].title} timed out after {limit_s:g} s")
                        exit_protocol.stuck()
                        raise error
                    deadline = now + limit_s
                if line.current is not None and line.current.verdict is not None:
                    raise self._over(line.current.error())
        finally:
            if line.current is not None:
                line.current.waits = False
            if told is not None:
                told.end()
            self.waited_s += time.perf_counter() - start

    def describe(self) -> str:
        """The operation under way, in words."""
        if self.under_way is None:
            return self._works[0].title
        call, number = self.under_way
        return call().describe(number)

    def _over(self, error: AllredError) -> AllredError:
        self.poison(str(error).partition("\n")[0])
        exit_protocol.stuck()
        return error

    def poison(self, reason: str) -> None:
        """Refuse everything from now on: an MPI operation cannot be taken back, and the ranks no longer match."""
        self.poisoned = self.poisoned or reason
        self.idle = False

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """For one thread of the rank's own process at a time, and only while the communicator is sound."""
        if os.getpid() != self._pid:
            raise AllredError("this process was forked from a rank after allred.init(); only the rank itself is one")
        if not self._lock.acquire(False):
            raise AllredError("two threads use allred at once; the order of operations must be the same on all ranks")
        try:
            if self.poisoned:
                if line.current is not None and line.current.verdict is not None:
                    raise line.current.error()
                raise AllredError(
                    f"this communicator cannot be used any more: {self.poisoned}; end the job and start again"
                )
            yield
        finally:
            self._lock.release()
