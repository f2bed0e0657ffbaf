"""How fast a training is now: over the last seconds, not since its start. Knows no communicator; the clock is given."""

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

_PARTS = 100  # of the window: what is forgotten at once


class _Part(NamedTuple):
    seconds: float = 0.0
    steps: int = 0
    examples: int = 0
    waited_s: float = 0.0


class Rates:
    """Examples and seconds of the latest steps.

    `record` is called at the end of every step. The first one only starts the clock, as does the first after `pause`:
    what came before it was not, or not only, training. The global step may have advanced by more than one since the
    call before (with parameter servers other workers' updates count, too), or have gone back, which is a pause.

    Arguments:
        window_s: seconds of training that the rates are of; long steps: at least the last one.
        clock: a clock that never goes back, in seconds.

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
        self._since: float | None = None  # when the step before ended; None: there was a pause

    def record(self, step: int, examples: int, waited_s: float = 0.0) -> None:
        """A step has ended.

        Arguments:
            step: the global step, with this one.
            examples: of all ranks, since the call before; 0 where they are not known.
            waited_s: seconds that this rank has spent in communication since the call before.
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
        """What comes now is no training (a checkpoint, an evaluation): time does not count until the next `record`."""
        self._since = None

    @property
    def examples_per_s(self) -> float | None:
        """Examples of all ranks in a second; None while it is not known."""
        total = _sum(self._parts)
        return total.examples / total.seconds if total.examples and total.seconds > 0 else None

    @property
    def s_per_batch(self) -> float | None:
        """Seconds for one global step; None while it is not known."""
        total = _sum(self._parts)
        return total.seconds / total.steps if total.steps else None

    @property
    def communication_share(self) -> float | None:
        """Of a step, the part that this rank is in communication: 0 to 1; None while it is not known."""
        total = _sum(self._parts)
        return min(total.waited_s / total.seconds, 1.0) if total.seconds > 0 else None

    def eta_s(self, max_steps: int | None) -> float | None:
        """Seconds of training until the global step is `max_steps`; None without a last step, or while not known."""
        pace = self.s_per_batch
        return None if pace is None or max_steps is None else pace * max(max_steps - self._step, 0)


def _sum(parts: Iterable[_Part]) -> _Part:
    return _Part(*map(sum, zip(_Part(), *parts, strict=True)))
