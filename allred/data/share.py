"""How many samples a step's gradients stand for, when nobody says: the share of the batch that came before it.

A step follows its batch, as a rule. Where batches were fetched ahead or skipped it is not known which of them a step
belongs to. That does not matter as long as their shares are alike; where they are not it is an error, since wrong
weights would show nowhere.
"""

import dataclasses

from allred import world
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
        running = _iterations().running
        running.pop(self, None)  # the one that gave last stands last
        running[self] = None

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
        iterations = _iterations()
        iterations.running.pop(self, None)
        iterations.uneven_left = iterations.uneven_left or self.uneven()


@dataclasses.dataclass
class Iterations:
    """The iterations over batches in one world.

    running: the unfinished iterations that have given out a batch; the last one gave out the latest batch. uneven_left:
    whether uneven batches were iterated to the end without a step after them.
    """

    running: dict[Source, None] = dataclasses.field(default_factory=dict)
    uneven_left: bool = False


_without_world = Iterations()


def _iterations() -> Iterations:
    here = world.current_or_none()
    return _without_world if here is None or here.iterations is None else here.iterations


def running() -> list[Source]:
    """Return the unfinished iterations that have given out a batch; the last element gave out the latest batch."""
    return list(_iterations().running)


def claim(samples: int | None = None) -> int | None:
    """The samples of the step that is about to run: as given, else the share of its batch; None without batches.

    Raises InputError where it is not known which batch that is, and their shares differ.
    """
    iterations = _iterations()
    running = iterations.running
    if not running and not iterations.uneven_left:
        return samples
    shared = [source for source in running if source.ranks > 1]
    sources = shared or list(running)  # a rank's own batches, such as a validation's, are not those of its steps
    sizes = set().union(*(source.totals for source in sources))
    unknown = len(sizes) > 1 and any(source.uneven() for source in sources)
    unknown = unknown or (iterations.uneven_left and not running)
    known = samples is not None or unknown
    iterations.uneven_left = False
    for source in running:
        source.follow(source.ahead if known else 1)
    if samples is not None:
        return samples
    if unknown:
        raise InputError(
            "batches with uneven shares were iterated without a step for each (fetched ahead, skipped or evaluated), "
            "so it is not known how many samples this step is for; say so with step(..., samples=len(x))"
        )
    return sources[-1].share if sources else None
