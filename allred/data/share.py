"""How many samples a step's gradients stand for, when nobody says: the share of the batch that came before it.

A step follows its batch, as a rule. Where batches were fetched ahead or skipped in between it is not known which of
them a step belongs to. That does not matter as long as they are alike; where they differ it is an error, since wrong
weights would show nowhere.
"""

from allred.errors import InputError


class Source:
    """One running iteration over batches: what it has given out since the last step."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self.share = 0  # of the batch it gave out last: samples of this rank
        self.totals: set[int] = set()  # samples over all ranks, of the batches that no step has taken yet

    def give(self, share: int, total: int) -> None:
        """A batch is given out."""
        self.share = share
        self.totals.add(total)
        _running.pop(self, None)  # the one that gave last stands last
        _running[self] = None

    def end(self) -> None:
        """The iteration is over."""
        global _uneven_left
        _running.pop(self, None)
        _uneven_left = _uneven_left or any(total % self._ranks for total in self.totals)


_running: dict[Source, None] = {}
_uneven_left = False  # batches of uneven shares were given out by iterations that ended before a step took them


def claim() -> int | None:
    """The share that the step which is about to run belongs to; None where no batches are in use.

    Raises InputError where that cannot be known: batches that differ were fetched ahead.
    """
    totals = set().union(*(source.totals for source in _running))
    for source in _running:
        source.totals.clear()
    if len(totals) > 1 or (not _running and _uneven_left):
        raise InputError(
            "batches of different sizes were taken since the last step, so it is not known which of them this step is "
            "for; say so with step(..., samples=len(x))"
        )
    return next(reversed(_running)).share if _running else None
