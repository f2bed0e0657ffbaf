"""Global batches, of which each rank gets its share.

The order of the samples depends on the seed alone, not on the number of ranks: batch number k holds the same samples
on 1 rank and on 64. The share differs by at most one sample between ranks, and an optimizer wrapped by
allred.distributed weights each rank's gradients by it, so the update is that of the whole batch.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from allred.arrays import Array
from allred.data.columns import Columns, column
from allred.data.loader import Job, Loader, check_numbers, whose_share
from allred.data.sampler import Position, Sampler, part
from allred.errors import InputError


class Batches(Loader):
    """What `batches` returns: iterate over it, more than once if you like.

    `len` is the number of steps of all epochs, and `steps_per_epoch` of one, counted from the beginning; also after
    `load_state_dict`, when fewer are left, so that schedules and limits that are made of it stay what they were.
    """

    function = "batches"

    def __init__(self, columns: Columns, sampler: Sampler, rank: int, size: int) -> None:
        super().__init__(rank, size, columns, {"rows": sampler.rows, "seed": sampler.seed})
        self._sampler = sampler
        self.rows, self.batch_size, self.epochs = sampler.rows, sampler.batch_size, sampler.epochs
        self.drop_last = sampler.drop_last
        self.steps_per_epoch = sampler.steps_per_epoch

    def __len__(self) -> int:
        return self.epochs * self.steps_per_epoch

    def order(self, epoch: int) -> Array:
        """The samples of an epoch, as row numbers, int64 (rows,): a permutation, or 0, 1, 2 ... without a seed."""
        return self._sampler.order(epoch)

    def jobs(self, start: Position) -> Iterator[Job]:
        """Row numbers of this rank's parts."""
        for position, rows in self._sampler.batches(start):
            mine = rows[part(len(rows), self.rank, self.size)]
            yield Job(position, len(mine), len(rows), mine)


def batches(
    *columns: Any,
    batch_size: int,
    epochs: int = 1,
    seed: int | None = 0,
    drop_last: bool = False,
    rank: int | None = None,
    size: int | None = None,
) -> Batches:
    """This rank's share of every global batch of `columns`, which have equal lengths.

    columns: arrays of shape (rows, ...) of any dtype, also memory-mapped ones, from which only the rows of a batch are
    read (`numpy.load(path, mmap_mode="r")`, `allred.data.npy`); or objects with `__len__` and `__getitem__(int)`, such
    as a torch Dataset, whose samples are made batches of numpy arrays as torch's default_collate would: numbers,
    arrays, tuples and dicts.
    batch_size: samples over all ranks. epochs: passes over the data. seed: of the shuffling, new in every epoch; None
    keeps the order. drop_last: leave out the last batch of an epoch if it is smaller; else, where it has fewer samples
    than there are ranks, some ranks get none in it (their gradients count for nothing). rank, size: whose share,
    instead of this rank's; `rank=0, size=1` gives whole batches.

    Yields tuples of batches (the batch itself if there is one column), copies of shape (share, ...). The next step
    takes its weight from the batch that came last; `allred.data.prefetch` keeps to that. If you fetch ahead in another
    way, give it: `opt.step(..., samples=len(x))`.

    `state_dict()` says at any time where it is, and `load_state_dict(state)` lets the next iteration go on there, on
    any number of ranks and with any batch_size: no sample of an epoch is left out and none comes twice. After the end,
    and after a `break`, an iteration starts from the beginning.

    All ranks must pass the same arguments: the first step compares them, and raises MismatchError if they differ.

    Raises InputError for columns of different lengths and for a batch too small for every rank to have a part.

    >>> data = batches([1, 2, 3, 4, 5], [10, 20, 30, 40, 50], batch_size=4, seed=None, rank=1, size=2)
    >>> for x, y in data:
    ...     print(x, y, data.state_dict())
    [3 4] [30 40] {'epoch': 0, 'samples': 4, 'rows': 5, 'seed': None}
    [] [] {'epoch': 0, 'samples': 5, 'rows': 5, 'seed': None}
    """
    rank, size = whose_share(rank, size)
    if not columns:
        raise InputError("batches() needs at least one array")
    found = [column(value) for value in columns]
    lengths = [len(one) for one in found]
    if len(set(lengths)) > 1 or not lengths[0]:
        raise InputError(f"batches() needs arrays of equal, non-zero length, got lengths {lengths}")
    if seed is not None and not (isinstance(seed, (int, np.integer)) and seed >= 0):
        raise InputError(f"seed={seed!r} must be a whole number of at least 0, or None to keep the order")
    check_numbers(batch_size=(batch_size, size), epochs=(epochs, 0))
    if drop_last and batch_size > lengths[0]:
        raise InputError(f"drop_last leaves nothing: {lengths[0]} rows do not fill one batch of {batch_size}")
    seed = None if seed is None else int(seed)
    return Batches(Columns(found), Sampler(lengths[0], int(batch_size), int(epochs), seed, bool(drop_last)), rank, size)
