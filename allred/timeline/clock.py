"""From the clock of one rank to that of the chief."""

from collections.abc import Sequence


class Clock:
    """measured: when, by the rank's clock; how far the chief's is ahead; give or take how much. In nanoseconds.

    After one measurement the offset stays; between two, and beyond them, it changes evenly, as clocks drift. An offset
    that is smaller than its error is none: two ranks of a machine have one clock, and neither offset nor drift.

    >>> Clock([(0, 1000, 10), (100_000, 1200, 10)])(50_000)
    51100
    """

    def __init__(self, measured: Sequence[tuple[int, int, int]]) -> None:
        if all(abs(offset) <= error for _, offset, error in measured):
            measured = [(0, 0, 0)]
        self.error = max(error for *_, error in measured)  # largest
        (self._first, self._offset, _), (last, offset, _) = measured[0], measured[-1]
        self._change, self._over = offset - self._offset, max(last - self._first, 1)

    def __call__(self, when: int) -> int:
        """A time of the rank, by the chief's clock."""
        return when + self._offset + (when - self._first) * self._change // self._over
