"""Run `Steps` outside the queue of a communicator, with the warnings and the time limit of other waits (comm/work.py).

Also `wait_until`, for a condition that may take any time.
"""

import time
from collections.abc import Callable
from typing import Any, TypeVar

from allred.cluster import mpi_progress
from allred.comm.work import Pending, Polled, Steps, WorkQueue, spin_wait
from allred.watch.wait import Awaited, Wait

T = TypeVar("T")

_AWAKE_S, _NAP_S = 0.1, 0.01  # duration of a wait before it sleeps between tests; the length of a sleep


class Condition(Polled):
    """A `Pending` that is complete when `done()` is true. worker: the worker that it depends on, if known."""

    def __init__(self, done: Callable[[], bool], worker: int | None = None) -> None:
        super().__init__(done)
        self.worker = worker


class _Checked:
    """A `Pending` that calls `check` at each test."""

    def __init__(self, pending: Pending, check: Callable[[], None]) -> None:
        self._pending, self._check = pending, check

    @property
    def waits_for_peers(self) -> bool:
        return self._pending.waits_for_peers

    @property
    def progress_count(self) -> int:
        return self._pending.progress_count

    def done(self) -> bool:
        self._check()
        return self._pending.done()

    def spin_wait(self) -> bool:
        self._check()
        return self._pending.spin_wait()


class AllPending:
    """A `Pending` that is complete when all of `pending` are."""

    waits_for_peers = False

    def __init__(self, pending: list[Any]) -> None:
        self._left = pending

    @property
    def progress_count(self) -> int:
        completed = -(10**9) * len(self._left)  # it grows when one is complete
        return completed + sum(int(each.progress_count) for each in self._left)

    def done(self) -> bool:
        self._left = [each for each in self._left if not each.done()]
        return not self._left

    def spin_wait(self) -> bool:
        if len(self._left) != 1 and self.done():
            return True
        return self._left[0].spin_wait() and self.done()


def run_steps(
    title: str, steps: Steps[T], timeout_s: float, quiet: bool = False, check: Callable[[], None] = lambda: None,
    awaited: Awaited | None = None,
) -> T:  # fmt: skip
    """Run `steps` to the end and return their result.

    check: called repeatedly during a long wait; it may raise. awaited: the ranks that the wait depends on.
    """
    try:
        while (pending := next(steps)).done() or pending.spin_wait():
            pass
    except StopIteration as stop:
        result: T = stop.value
        return result
    queue = WorkQueue(timeout_s)
    queue.quiet, queue.awaited = quiet, awaited
    return queue.start(title, _checked_steps(pending, steps, check)).wait()


def _checked_steps(pending: Pending, steps: Steps[T], check: Callable[[], None]) -> Steps[T]:
    try:
        while True:
            yield _Checked(pending, check)
            pending = next(steps)
    except StopIteration as stop:
        result: T = stop.value
        return result


def wait_until(title: str, done: Callable[[], bool], quiet: bool = True) -> None:
    """Wait until `done()` is true, without a time limit. quiet: there is no warning of a long wait."""
    start, wait = time.monotonic(), Wait(title, quiet)
    while not spin_wait(done):
        mpi_progress.advance()
        waited_s = time.monotonic() - start
        if waited_s > _AWAKE_S:
            wait.report(waited_s, peers=False)
            time.sleep(_NAP_S)
    wait.end()
