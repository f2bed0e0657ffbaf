"""Throughput of training over the last seconds: examples per second, seconds per step, communication, time left."""

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

_PARTS = 100  # the window consists of at most about this many parts; the oldest is dropped


class _Part(NamedTuple):
    seconds: float = 0.0
    steps: int = 0
    examples: int = 0
    waited_s: float = 0.0


class Rates:
    """Measures the throughput of the latest steps.

    Call `record` at the end of every step. The first call only starts the clock, as does the first call after `pause`.
    The global step may increase by more than one between two calls (with parameter servers it counts the updates of all
    workers). A decrease counts as a pause.

    Arguments:
        window_s: seconds of training that are averaged; at least one step.
        clock: a monotonic clock, in seconds.

    >>> now = iter([0.0, 0.5, 1.0])
    >>> rates = Rates(clock=lambda: next(now))
    >>> for step in (1, 2, 3):
    ...     rates.record(step, examples=64, waited_s=0.125)
    >>> rates.examples_per_s, rates.s_per_batch, rates.communication_share, rates.eta_s(max_steps=13)
    (128.0, 0.5, 0.25, 5.0)
    """

    def __init__(self, window_s: float = 10.0, clock: Callable[[], float] = time.perf_counter) -> None:
        self._window_s = window_s
        self._clock = clock
        self._parts: deque[_Part] = deque()
        self._seconds = 0.0  # of all parts
        self._step = 0
        self._since: float | None = None  # the end of the previous step; None after a pause

    def record(self, step: int, examples: int, waited_s: float = 0.0) -> None:
        """Record the end of a step.

        Arguments:
            step: the global step, this one included.
            examples: examples of all ranks since the previous call; 0 if unknown.
            waited_s: seconds of communication of this rank since the previous call.
        """
        now, before, advanced = self._clock(), self._since, step - self._step
        self._since, self._step = now, step
        if before is None or advanced < 1:
            return
        part = _Part(now - before, advanced, examples, waited_s)
        self._seconds += part.seconds
        if self._parts and self._parts[-1].seconds < self._window_s / _PARTS:
            part = _sum([self._parts.pop(), part])
        self._parts.append(part)
        while len(self._parts) > 1 and self._seconds - self._parts[0].seconds >= self._window_s:
            self._parts.popleft()
            self._seconds = _sum(self._parts).seconds

    def pause(self) -> None:
        """Exclude the time until the next `record`: a checkpoint or an evaluation."""
        self._since = None

    @property
    def examples_per_s(self) -> float | None:
        """Examples per second of all ranks; None while unknown."""
        total = _sum(self._parts)
        return total.examples / total.seconds if total.examples and total.seconds > 0 else None

    @property
    def s_per_batch(self) -> float | None:
        """Seconds per global step; None while unknown."""
        total = _sum(self._parts)
        return total.seconds / total.steps if total.steps else None

    @property
    def communication_share(self) -> float | None:
        """The share of the time that this rank spends in communication, 0 to 1; None while unknown."""
        total = _sum(self._parts)
        return min(total.waited_s / total.seconds, 1.0) if total.seconds > 0 else None

    def eta_s(self, max_steps: int | None) -> float | None:
        """Seconds until the global step is `max_steps`; None while unknown, or if `max_steps` is None."""
        seconds = self.s_per_batch
        return None if seconds is None or max_steps is None else seconds * max(max_steps - self._step, 0)


def _sum(parts: Iterable[_Part]) -> _Part:
    return _Part(*map(sum, zip(_Part(), *parts, strict=True)))
