"""Sampler: the samples of each global batch and the share of each rank. Pure functions of numbers.

A position in the data is an epoch and the number of its samples that were yielded over all ranks. It does not depend on
the number of ranks or the batch size: a position saved on 4 ranks with batches of 100 is valid on 3 with batches of 64.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from allred.arrays import Array


@dataclasses.dataclass(frozen=True)
class Position:
    """Position in the data: all earlier epochs and `samples` samples of `epoch` were yielded."""

    epoch: int = 0
    samples: int = 0


BEGIN = Position()


@dataclasses.dataclass(frozen=True)
class Sampler:
    """Global batches of `epochs` passes over samples 0 to rows - 1."""

    rows: int
    batch_size: int
    epochs: int
    seed: int | None
    drop_last: bool

    @property
    def steps_per_epoch(self) -> int:
        """Number of batches in a complete epoch."""
        return self.rows // self.batch_size if self.drop_last else -(-self.rows // self.batch_size)

    def order(self, epoch: int) -> Array:
        """Order of the samples in an epoch, int64 (rows,): a permutation, or 0, 1, 2 ... without a seed."""
        if self.seed is None:
            return np.arange(self.rows)
        return np.random.default_rng([self.seed, epoch]).permutation(self.rows)

    def batches(self, start: Position = BEGIN) -> Iterator[tuple[Position, Array]]:
        """Yield each global batch from `start` on: the position after it, and its samples, int64 (n,).

        >>> for position, samples in Sampler(5, 2, 2, None, False).batches(Position(0, 3)):
        ...     print(position.epoch, position.samples, samples)
        0 5 [3 4]
        1 2 [0 1]
        1 4 [2 3]
        1 5 [4]
        """
        for epoch in range(start.epoch, self.epochs):
            first = start.samples if epoch == start.epoch else 0
            least = self.batch_size if self.drop_last else 1
            begins = range(first, self.rows - least + 1, self.batch_size)
            if not begins:
                continue
            order = self.order(epoch)
            for begin in begins:
                samples = order[begin : begin + self.batch_size]
                yield Position(epoch, begin + len(samples)), samples


def rank_slice(total: int, rank: int, size: int) -> slice:
    """Slice of a rank in a global batch of `total` samples. Sizes differ by at most 1; the first ranks have more.

    >>> [rank_slice(10, rank, 4) for rank in range(4)]
    [slice(0, 3, None), slice(3, 6, None), slice(6, 8, None), slice(8, 10, None)]
    """
    base, extra = divmod(total, size)
    start = rank * base + min(rank, extra)
    return slice(start, start + base + (rank < extra))
