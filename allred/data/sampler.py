"""Which samples are in which global batch, and which of these are whose. Pure: numbers in, numbers out.

A position in the data is an epoch and the samples of it that were given out, over all ranks. It says nothing about
ranks or batches, so one that was saved on 4 ranks with batches of 100 serves on 3 with batches of 64.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from allred.arrays import Array


@dataclasses.dataclass(frozen=True)
class Position:
    """So many samples of an epoch have been given out, and all of the epochs before it."""

    epoch: int = 0
    samples: int = 0


BEGIN = Position()


@dataclasses.dataclass(frozen=True)
class Sampler:
    """The global batches of `epochs` passes over samples 0 to rows - 1."""

    rows: int
    batch_size: int
    epochs: int
    seed: int | None
    drop_last: bool

    @property
    def steps_per_epoch(self) -> int:
        """Batches of a whole epoch."""
        return self.rows // self.batch_size if self.drop_last else -(-self.rows // self.batch_size)

    def order(self, epoch: int) -> Array:
        """The samples of an epoch, int64 (rows,): a permutation, or 0, 1, 2 ... without a seed."""
        if self.seed is None:
            return np.arange(self.rows)
        return np.random.default_rng([self.seed, epoch]).permutation(self.rows)

    def batches(self, start: Position = BEGIN) -> Iterator[tuple[Position, Array]]:
        """Every global batch from `start` on: the position after it, and its samples.

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


def part(total: int, rank: int, size: int) -> slice:
    """This rank's part of a global batch of `total`: within one of each other's, the first ranks take one more.

    >>> [part(10, rank, 4) for rank in range(4)]
    [slice(0, 3, None), slice(3, 6, None), slice(6, 8, None), slice(8, 10, None)]
    """
    base, extra = divmod(total, size)
    start = rank * base + min(rank, extra)
    return slice(start, start + base + (rank < extra))
