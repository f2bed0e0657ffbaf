"""A shuffle buffer: an order by chance for what can only be read from front to back."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from allred.data.loader import check_numbers


class Shuffled:
    """What `shuffled` returns. Iterated over as it is, it gives the order of epoch 0 each time."""

    def __init__(self, records: Iterable[Any], buffer: int, seed: int) -> None:
        self.records, self.buffer, self.seed = records, buffer, seed

    def __iter__(self) -> Iterator[Any]:
        return self.of_epoch(0)

    def of_epoch(self, epoch: int) -> Iterator[Any]:
        """All records, in the order of that epoch."""
        chance = np.random.default_rng([self.seed, epoch])
        held: list[Any] = []
        for record in self.records:
            if len(held) < self.buffer:
                held.append(record)
                continue
            place = int(chance.integers(self.buffer))
            yield held[place]
            held[place] = record
        for place in chance.permutation(len(held)):
            yield held[place]


def shuffled(records: Iterable[Any], buffer: int, seed: int = 0) -> Shuffled:
    """The same records in another order, every one once: each comes by chance from `buffer` records that are held.

    records: iterable, more than once for more than one epoch. buffer: records in memory; a record comes at most that
    many earlier than it stands, so take more than there are in a run of equal labels. seed: the order depends on it and
    on the epoch, which `allred.data.stream` tells, and is the same on all ranks and after a resume.

    >>> list(shuffled(range(8), buffer=4, seed=1))
    [1, 2, 3, 6, 7, 0, 5, 4]
    """
    check_numbers(buffer=(buffer, 1), seed=(seed, 0))
    return Shuffled(records, int(buffer), int(seed))
