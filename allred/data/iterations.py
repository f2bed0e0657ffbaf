"""Iterations over batches, and the number of samples that a step stands for if the program passes none.

A step normally follows its batch, so it takes the share of the latest batch. If batches are fetched ahead or skipped,
the batch of a step is not known. That is harmless while all ranks have equal shares. Otherwise it is an error, because
wrong weights of gradients would go unnoticed.
"""

import dataclasses
from typing import Any, NamedTuple

from allred import world
from allred.errors import InputError


class LoaderArguments(NamedTuple):
    """Arguments of a loader that must be equal on all ranks: they decide the samples and the number of batches.

    function: "batches" or "stream". values: the name and value of each argument.

    >>> print(LoaderArguments("batches", (("rows", 5), ("seed", None))))
    batches(rows=5, seed=None)
    """

    function: str
    values: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        return f"{self.function}({', '.join(f'{name}={value!r}' for name, value in self.values)})"


class Iteration:
    """One running iteration over a loader.

    rank, ranks: index of its share of each global batch, and the number of shares. arguments: the arguments of its
    loader. start: the position in the data where it began, as text.
    """

    def __init__(self, rank: int, ranks: int, arguments: LoaderArguments, start: str) -> None:
        self.rank, self.ranks, self.arguments = rank, ranks, arguments
        self.arguments_and_start = LoaderArguments(arguments.function, (*arguments.values, ("start", start)))
        self.key = str(self.arguments_and_start)
        self.share = 0  # samples of this rank in the latest batch
        self.ahead = 0  # batches yielded that no step has followed yet
        self.totals: set[int] = set()  # samples over all ranks in each of these batches

    def count_batch(self, share: int, total: int) -> None:
        """Record that a batch is yielded. share, total: its samples on this rank and on all ranks."""
        self.share = share
        self.ahead += 1
        self.totals.add(total)
        running = _iterations().running
        running.pop(self, None)  # the iteration with the latest batch is the last element
        running[self] = None

    def count_steps(self, steps: int) -> None:
        """Record that steps have followed the batches."""
        self.ahead = max(self.ahead - steps, 0)
        if not self.ahead:
            self.totals.clear()

    def uneven(self) -> bool:
        """Whether the shares of the ranks differ in one of the batches without a step."""
        return any(total % self.ranks for total in self.totals)

    def end(self) -> None:
        """Record that the iteration has ended."""
        iterations = _iterations()
        iterations.running.pop(self, None)
        iterations.uneven_left = iterations.uneven_left or self.uneven()


@dataclasses.dataclass
class Iterations:
    """Iterations over batches in one world.

    running: unfinished iterations that have yielded a batch; the last element yielded the latest batch. uneven_left:
    whether an iteration has ended whose uneven batches no step followed.
    """

    running: dict[Iteration, None] = dataclasses.field(default_factory=dict)
    uneven_left: bool = False


_without_world = Iterations()


def _iterations() -> Iterations:
    here = world.current_or_none()
    return _without_world if here is None or here.iterations is None else here.iterations


def running() -> list[Iteration]:
    """Return the unfinished iterations that have yielded a batch; the last element yielded the latest batch."""
    return list(_iterations().running)


def claim_samples(samples: int | None = None) -> int | None:
    """Return the samples of the step that is about to run: `samples` if given, else the share of its batch.

    Returns None if no batches are in use. Raises InputError if the batch is not known and the shares differ.
    """
    iterations = _iterations()
    running = iterations.running
    if not running and not iterations.uneven_left:
        return samples
    shared = [iteration for iteration in running if iteration.ranks > 1]
    candidates = shared or list(running)  # steps do not use batches of one rank alone, such as for validation
    sizes = set().union(*(iteration.totals for iteration in candidates))
    unknown = len(sizes) > 1 and any(iteration.uneven() for iteration in candidates)
    unknown = unknown or (iterations.uneven_left and not running)
    known = samples is not None or unknown
    iterations.uneven_left = False
    for iteration in running:
        iteration.count_steps(iteration.ahead if known else 1)
    if samples is not None:
        return samples
    if unknown:
        raise InputError(
            "the number of samples of this step is not known: batches with uneven shares were iterated without a step "
            "for each (fetched ahead, skipped or evaluated); pass it with step(..., samples=len(x))"
        )
    return candidates[-1].share if candidates else None
