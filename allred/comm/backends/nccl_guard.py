"""Sees to it that nobody waits in a kernel of NCCL's for ever: a thread that looks at what has not finished.

Ranks meet on the CPU before every operation (header.py), so most that goes wrong is noticed there, with every word.
What is left is a rank that is stopped or dies after that, and a link that breaks: the others' kernels then spin.
Every 50 ms this thread looks whether NCCL has met an error, another rank has failed, or an operation is beyond the
time limit; then it aborts NCCL's communicator, which ends the kernels, and the next call of allred raises what it
was. The host may sit in a wait of CUDA's meanwhile, or in NCCL itself, which waits for the other ranks when it connects
and when there is no room for more: that returns, and what the watcher has to say is raised there.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from allred.comm.work import WorkQueue
from allred.errors import AllredError, CollectiveTimeout
from allred.watch import exit as exit_protocol
from allred.watch import line

LOOK_S = 0.05
HINT = "run it again with NCCL_DEBUG=WARN (or INFO), with which NCCL prints what it met, on every rank"


class Aborts(Protocol):
    """NCCL's communicator, as much of it as is needed here."""

    def check_async_error(self) -> None: ...
    def abort(self) -> None: ...


class Over(Protocol):
    """An End of gpu/device.py."""

    def order(self) -> None: ...
    def done(self) -> bool: ...
    def synchronize(self) -> None: ...


class Guard:
    """Of one communicator; `queue` is where its operations are started."""

    def __init__(self, queue: WorkQueue) -> None:
        self.failure: AllredError | None = None
        self._queue = queue
        self._communicator: Aborts | None = None
        self._running: deque[tuple[Over, str, float]] = deque()  # oldest first: what, in words, since when
        self._calling: tuple[str, float] | None = None  # what the host is in NCCL for, and since when
        self._thread: threading.Thread | None = None
        self._told = False
        self._closed = threading.Event()

    def begin(self, communicator: Aborts, prepare: Callable[[], object] = lambda: None) -> None:
        """From now on look after this one. prepare: what the thread has to do first."""
        self._communicator = communicator
        self._thread = threading.Thread(target=self._run, args=(prepare,), name="allred-nccl", daemon=True)
        self._thread.start()

    def watch(self, end: Over, title: str) -> Over:
        """An operation is on its way."""
        if self._communicator is None:  # nothing of NCCL's
            return end
        self._running.append((end, title, time.monotonic()))
        return Guarded(self, end)

    def call(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call NCCL, for the operation that advances, where the host may come to wait."""
        title = "NCCL" if self._queue.advancing is None else self._queue.advancing.title
        self._calling = title, time.monotonic()
        try:
            function(*arguments)
        finally:
            self._calling = None

    def check(self) -> None:
        """Raise what has gone wrong, if anything has; nothing can be done any more then."""
        if self.failure is not None:
            self._queue.poison(str(self.failure).partition("\n")[0])
            exit_protocol.stuck()
            if line.current is not None and line.current.verdict is not None:
                raise line.current.error()
            raise self.failure

    def close(self) -> bool:
        """Look until nothing is on its way any more, or nothing can be done; whether all is well."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
        return self.failure is None

    def _run(self, prepare: Callable[[], object]) -> None:
        prepare()
        while self.failure is None and not (self._closed.wait(LOOK_S) and self._idle()):
            self.look(time.monotonic())

    def _idle(self) -> bool:
        """At the end: whether there is nothing to look after, or nobody who could go on."""
        if self._running and not self._queue.poisoned:
            time.sleep(LOOK_S)
            return False
        return True

    def look(self, now: float) -> None:
        """Whether something is wrong, now."""
        while self._running and self._running[0][0].done():
            self._running.popleft()
            self._tell_going()
        oldest = self._running[0][1:] if self._running else self._calling
        if oldest is not None:
            title, since = oldest
            self._tell(title, now - since)
            problem = self._problem(title, now - since)
            if problem is not None:
                self._fail(problem)

    def _problem(self, title: str, waited_s: float) -> AllredError | None:
        assert self._communicator is not None
        try:
            self._communicator.check_async_error()
        except Exception as error:
            return AllredError(f"{title}: NCCL: {error}; {HINT}")
        if line.current is not None:
            line.current.read()
            if line.current.verdict is not None:
                return AllredError(f"{title} was cut short: {line.current.verdict.text}")
        if waited_s > self._queue.timeout_s:
            return CollectiveTimeout(
                f"{title}: not complete on the GPU after {self._queue.timeout_s:g} s, though all ranks had begun it; a "
                f"rank has stopped or died since, or a link between GPUs is down; {HINT}"
            )
        return None

    def _fail(self, problem: AllredError) -> None:
        assert self._communicator is not None
        self.failure = problem
        try:
            self._communicator.abort()
        except Exception as error:
            self.failure = AllredError(f"{problem}; and NCCL could not be aborted: {error}")

    def _tell(self, title: str, waited_s: float) -> None:
        """The watcher hears of a long wait, if the rank itself is not in one where it can tell."""
        if line.current is None or self._told or waited_s < line.current.warn_s / 2:
            return
        if line.current.waits and self._calling is None:
            return
        members = None if self._queue.members is None else list(self._queue.members)
        what = f"{title}, on the GPU"
        line.current.tell("waiting", what=what, since_s=waited_s, peers=False, quiet=self._queue.quiet, members=members)
        self._told = True

    def _tell_going(self) -> None:
        if self._told and line.current is not None:
            line.current.tell("going")
        self._told = False


class Guarded:
    """An End, which raises what has gone wrong instead of letting the caller go on with half a result."""

    def __init__(self, guard: Guard, end: Over) -> None:
        self._guard, self._end = guard, end

    def order(self) -> None:
        self._guard.check()
        self._end.order()

    def done(self) -> bool:
        self._guard.check()
        return self._end.done()

    def synchronize(self) -> None:
        """Wait on the host; what ended the wait is raised."""
        self._end.synchronize()
        self._guard.check()
