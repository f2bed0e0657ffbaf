"""Ends NCCL kernels that would wait forever: a thread that watches operations which have not finished.

Ranks exchange headers on the CPU before every operation (header.py), so most errors are found there. The rest: a rank
stops or dies after that, or a link fails; then the kernels of the other ranks spin. Every 50 ms the thread checks
whether another rank has failed, NCCL or CUDA reports an error, or an operation has exceeded the time limit. Then it
aborts the NCCL communicator, which ends the kernels, and the next call of allred raises the error. The host may be
blocked in CUDA meanwhile.

If the host is inside NCCL, which waits there for other ranks when it connects, ncclCommAbort is undefined, because the
communicator is a blocking one (cupy makes no others). Then the thread prints the error and ends the process.

When a rank dies, NCCL may report a closed connection before the watcher reports the cause. So the verdict of the
watcher is read first, and awaited for a second after an error of NCCL.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from allred import log, world
from allred.comm.work import WorkQueue
from allred.errors import AllredError, CollectiveTimeout
from allred.gpu.streams import Completion
from allred.runtime.timings import NCCL_VERDICT_S
from allred.watch import exit as exit_protocol

T = TypeVar("T")

CHECK_INTERVAL_S = 0.05
HINT = "run it again with NCCL_DEBUG=WARN (or INFO), which makes NCCL print its errors, on every rank"


class Guard:
    """Watches the operations of one NCCL communicator. queue: that of the communicator that starts them."""

    def __init__(self, queue: WorkQueue) -> None:
        self.failure: AllredError | None = None
        self._queue = queue
        self._communicator: Any = None  # an NCCL communicator
        self._running: deque[tuple[Completion, str, float]] = deque()  # oldest first: (end, title, start time)
        self._calling: tuple[str, float] | None = None  # the host is inside NCCL: title of the operation, start time
        self._entering = threading.Lock()  # held while the host enters NCCL, and during an abort
        self._thread: threading.Thread | None = None
        self._told = False
        self._closed = threading.Event()

    def begin(self, communicator: Any, prepare: Callable[[], object] = lambda: None) -> None:
        """Start to watch `communicator` in a thread, which calls `prepare` first."""
        self._communicator = communicator
        self._thread = threading.Thread(target=self._run, args=(prepare,), name="allred-nccl", daemon=True)
        self._thread.start()

    def watch(self, end: Completion, title: str) -> Completion:
        self._running.append((end, title, time.monotonic()))
        return Guarded(self, end)

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """The host is inside NCCL for the current operation: in a call, which may block it, or in a group of calls.
        Raises the error that the guard has found before."""
        if self._calling is not None:  # in a group
            yield
            return
        with self._entering:
            self.check()
            title = "NCCL" if self._queue.advancing is None else self._queue.advancing.title
            self._calling = title, time.monotonic()
        try:
            yield
        finally:
            self._calling = None

    def fail(self, problem: str) -> None:
        """Note an error that a call of NCCL has raised, for `check`."""
        _await_verdict()
        self.failure = self.failure or AllredError(problem)

    def check(self) -> None:
        """Raise the error that the guard found, if any; the communicator is unusable then."""
        if self.failure is not None:
            self._queue.poison(str(self.failure).partition("\n")[0])
            exit_protocol.stuck()
            if (watcher := world.watcher()) is not None and watcher.verdict is not None:
                raise watcher.error()
            raise self.failure

    def close(self) -> bool:
        """Wait until all operations have ended or failed. Returns whether there was no error."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
        return self.failure is None

    def _run(self, prepare: Callable[[], object]) -> None:
        prepare()
        while self.failure is None and not (self._closed.wait(CHECK_INTERVAL_S) and self._idle()):
            self.check_running(time.monotonic())

    def _idle(self) -> bool:
        """Return whether the thread can end: no operation is running, or the communicator is unusable."""
        if self._running and not self._queue.poisoned:
            time.sleep(CHECK_INTERVAL_S)
            return False
        return True

    def check_running(self, now: float) -> None:
        """Check the running operations once. now: time.monotonic()."""
        try:
            while self._running and self._running[0][0].done():
                self._running.popleft()
                if self._told and (watcher := world.watcher()) is not None:
                    watcher.send("resumed")
                self._told = False
        except Exception as error:
            self._abort(_explained(self._running[0][1], f"{type(error).__name__}: {error}"))
            return
        oldest = self._running[0][1:] if self._running else self._calling
        if oldest is not None:
            title, since = oldest
            self._tell(title, now - since)
            if (problem := self._problem(title, now - since)) is not None:
                self._abort(problem)

    def _abort(self, problem: AllredError) -> None:
        """End the kernels of NCCL; if the host is inside NCCL, the process."""
        with self._entering:
            self.failure = problem
            if self._calling is None:
                try:
                    self._communicator.abort()
                except Exception as error:
                    self.failure = AllredError(f"{problem}; and NCCL could not be aborted: {error}")
                return
        log.rank_warning(f"{problem}; this rank is blocked in a call of NCCL, which cannot be aborted, and ends")
        exit_protocol.end_blocked(f"{type(problem).__name__}: {problem}")

    def _problem(self, title: str, waited_s: float) -> AllredError | None:
        if (problem := _cut_short(title)) is not None:
            return problem
        try:
            self._communicator.check_async_error()
        except Exception as error:
            return _explained(title, f"NCCL: {error}; {HINT}")
        if waited_s > self._queue.timeout_s:
            return CollectiveTimeout(
                f"{title}: not complete on the GPU after {self._queue.timeout_s:g} s, although all ranks started it; a "
                f"rank has stopped or died since, or a link between GPUs is down; {HINT}"
            )
        return None

    def _tell(self, title: str, waited_s: float) -> None:
        """Report a long wait to the watcher, unless the rank is in a wait that reports itself."""
        watcher = world.watcher()
        if watcher is None or self._told or waited_s < watcher.warn_s / 2:
            return
        if watcher.waits and self._calling is None:
            return
        members = None if self._queue.members is None else list(self._queue.members)
        what = f"{title}, on the GPU"
        watcher.send("waiting", what=what, since_s=waited_s, peers=False, quiet=self._queue.quiet, members=members)
        self._told = True


def _cut_short(title: str) -> AllredError | None:
    """Return the error for an operation that ends because another rank has failed; None if none has."""
    if (watcher := world.watcher()) is None:
        return None
    watcher.read()
    return None if watcher.verdict is None else AllredError(f"{title} was cut short: {watcher.verdict.text}")


def _explained(title: str, problem: str) -> AllredError:
    """Return the error for a problem of NCCL or CUDA: the failure of another rank, if it has caused the problem."""
    _await_verdict()
    return _cut_short(title) or AllredError(f"{title}: {problem}")


def _await_verdict() -> None:
    """Wait for a verdict, at most NCCL_VERDICT_S seconds."""
    until = time.monotonic() + NCCL_VERDICT_S
    while (watcher := world.watcher()) is not None and watcher.is_alive() and time.monotonic() < until:
        watcher.read()
        if watcher.verdict is not None:
            return
        time.sleep(CHECK_INTERVAL_S)


class Guarded(Completion):
    """A Completion that raises the error of the guard, so that the caller does not use an incomplete result."""

    def __init__(self, guard: Guard, end: Completion) -> None:
        self._guard, self._end = guard, end

    def order_callers(self) -> None:
        self._guard.check()
        self._checked(self._end.order_callers)

    def done(self) -> bool:
        self._guard.check()
        return self._checked(self._end.done)

    def synchronize(self) -> None:
        self._checked(self._end.synchronize)
        self._guard.check()

    def _checked(self, call: Callable[[], T]) -> T:
        """Call a function of CUDA; its error is one of the guard too."""
        try:
            return call()
        except Exception as error:
            self._guard.fail(f"{type(error).__name__}: {error}")
            self._guard.check()
            raise
