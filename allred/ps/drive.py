"""Running steps to their end outside a communicator's queue: at once where nothing has to be waited for, else with the
warnings and the time limit of every wait in allred (comm/work.py). And `idle`, for what may come at any time."""

import time
from collections.abc import Callable
from typing import Any, TypeVar

from allred import world
from allred.comm.work import Pending, Steps, WorkQueue, spin_wait
from allred.watch.wait import Awaited

T = TypeVar("T")

_TELL_S = 1.0  # then the watcher hears of it
_AWAKE_S, _NAP_S = 0.1, 0.01  # from then on, between two looks


class _Checked:
    """What is waited for, with a look at something else each time."""

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


class All:
    """Several things under way, of which all have to end."""

    waits_for_peers = False

    def __init__(self, pending: list[Any]) -> None:
        self._left = pending

    @property
    def progress_count(self) -> int:
        return sum(int(each.progress_count) for each in self._left) - 10**9 * len(
            self._left
        )  # one that ends is progress

    def done(self) -> bool:
        self._left = [each for each in self._left if not each.done()]
        return not self._left

    def spin_wait(self) -> bool:
        if len(self._left) != 1 and self.done():
            return True
        return self._left[0].spin_wait() and self.done()


def drive(
    title: str, steps: Steps[T], timeout_s: float, quiet: bool = False, check: Callable[[], None] = lambda: None,
    awaited: Awaited | None = None,
) -> T:  # fmt: skip
    """Run `steps`. `check` is called repeatedly during a long wait, and may raise. `awaited`: the ranks that the wait
    depends on."""
    while True:
        try:
            pending = next(steps)
        except StopIteration as stop:
            result: T = stop.value
            return result
        if not pending.done() and not pending.spin_wait():
            queue = WorkQueue(timeout_s)
            queue.quiet, queue.awaited = quiet, awaited
            return queue.start(title, _rest(pending, steps, check)).wait()


def _rest(pending: Pending, steps: Steps[T], check: Callable[[], None]) -> Steps[T]:
    while True:
        yield _Checked(pending, check)
        try:
            pending = next(steps)
        except StopIteration as stop:
            result: T = stop.value
            return result


def idle(title: str, come: Callable[[], bool], quiet: bool = True) -> None:
    """Wait until `come()` is true, without a time limit. `quiet`: without warnings of a long wait."""
    begun, told = time.monotonic(), False
    while not spin_wait(come):
        idle_s = time.monotonic() - begun
        if idle_s > _TELL_S and not told and (watcher := world.watcher()) is not None:
            watcher.tell("waiting", what=title, since_s=idle_s, peers=False, quiet=quiet)
            told = True
        if idle_s > _AWAKE_S:
            time.sleep(_NAP_S)
    if told and (watcher := world.watcher()) is not None:
        watcher.tell("going")
