"""How many samples a step's gradients stand for, when nobody says: the share of the batch that came before it.

A step follows its batch, as a rule. Where batches were fetched ahead or skipped it is not known which of them a step
belongs to. That does not matter as long as their shares are alike; where they are not it is an error, since wrong
weights would show nowhere.
"""

from allred.data.loader_arguments import LoaderArguments
from allred.data.sampler import Position
from allred.errors import InputError


class Source:
    """One running iteration over batches.

    Arguments:
        rank, ranks: the number of its share of each global batch, and the number of shares.
        arguments: the arguments of its loader.
        start: the position in the data where the iteration began.
    """

    def __init__(self, rank: int, ranks: int, arguments: LoaderArguments, start: Position) -> None:
        self.rank, self.ranks, self.arguments = rank, ranks, arguments
        began = ("start", f"epoch {start.epoch}, sample {start.samples}")
        self.arguments_and_start = LoaderArguments(arguments.function, (*arguments.values, began))
        self.key = str(self.arguments_and_start)
        self.share = 0  # of the batch it gave out last: samples of this rank
        self.ahead = 0  # batches given out that no step has followed yet
        self.totals: set[int] = set()  # their sizes, samples over all ranks

    def give(self, share: int, total: int) -> None:
        """A batch is given out."""
        self.share = share
        self.ahead += 1
        self.totals.add(total)
        _running.pop(self, None)  # the one that gave last stands last
        _running[self] = None

    def follow(self, steps: int) -> None:
        """So many steps have followed."""
        self.ahead = max(self.ahead - steps, 0)
        if not self.ahead:
            self.totals.clear()

    def uneven(self) -> bool:
        """Whether ranks had different shares of one of these batches."""
        return any(total % self.ranks for total in self.totals)

    def end(self) -> None:
        """The iteration is over."""
        global _uneven_left
        _running.pop(self, None)
        _uneven_left = _uneven_left or self.uneven()


_running: dict[Source, None] = {}
_uneven_left = False  # uneven batches were iterated over to the end, and no step followed them


def forget() -> None:
    """A new world begins: what was iterated over before is of no step in it."""
    global _uneven_left
    _running.clear()
    _uneven_left = False


def running() -> list[Source]:
    """Return the unfinished iterations that have given out a batch; the last element gave out the latest batch."""
    return list(_running)


def claim(samples: int | None = None) -> int | None:
    """The samples of the step that is about to run: as given, else the share of its batch; None without batches.

    Raises InputError where it is not known which batch that is, and their shares differ.
    """
    global _uneven_left
    if not _running and not _uneven_left:
        return samples
    shared = [source for source in _running if source.ranks > 1]
    sources = shared or list(_running)  # a rank's own batches, such as a validation's, are not those of its steps
    sizes = set().union(*(source.totals for source in sources))
    unknown = len(sizes) > 1 and any(source.uneven() for source in sources)
    unknown = unknown or (_uneven_left and not _running)
    known = samples is not None or unknown
    _uneven_left = False
    for source in _running:
        source.follow(source.ahead if known else 1)
    if samples is not None:
        return samples
    if unknown:
        raise InputError(
            "batches with uneven shares were iterated without a step for each (fetched ahead, skipped or evaluated), "
            "so it is not known how many samples this step is for; say so with step(..., samples=len(x))"
        )
    return sources[-1].share if sources else None
