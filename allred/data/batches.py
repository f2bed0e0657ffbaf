"""Global batches, of which each rank gets its share.

The order of the samples depends on the seed alone, not on the number of ranks: batch number k holds the same samples
on 1 rank and on 64. The share differs by at most one sample between ranks, and an optimizer wrapped by
allred.distributed weights each rank's gradients by it, so the update is that of the whole batch.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from allred import arrays
from allred.arrays import Array
from allred.cluster import topology
from allred.data.share import Source
from allred.errors import InputError


class Batches:
    """What `batches` returns: iterate over it, more than once if you like; `len` is the number of steps."""

    def __init__(
        self,
        columns: tuple[Array, ...],
        batch_size: int,
        epochs: int,
        seed: int | None,
        drop_last: bool,
        rank: int,
        size: int,
    ) -> None:
        self.rows = len(columns[0])
        self.batch_size, self.epochs, self.rank, self.size = batch_size, epochs, rank, size
        self._columns, self._seed = columns, seed
        self.steps_per_epoch = self.rows // batch_size if drop_last else -(-self.rows // batch_size)

    def __len__(self) -> int:
        return self.epochs * self.steps_per_epoch

    def order(self, epoch: int) -> Array:
        """The samples of an epoch, as row numbers, int64 (rows,): a permutation, or 0, 1, 2 ... without a seed."""
        if self._seed is None:
            return np.arange(self.rows)
        return np.random.default_rng([self._seed, epoch]).permutation(self.rows)

    def __iter__(self) -> Iterator[Any]:
        source = Source(self.size)
        try:
            for epoch in range(self.epochs):
                order = self.order(epoch)
                for step in range(self.steps_per_epoch):
                    rows = order[step * self.batch_size : (step + 1) * self.batch_size]
                    mine = _part(rows, self.rank, self.size)
                    source.give(len(mine), len(rows))
                    picked = tuple(column[mine] for column in self._columns)
                    yield picked if len(picked) > 1 else picked[0]
        finally:
            source.end()


def batches(
    *columns: Any,
    batch_size: int,
    epochs: int = 1,
    seed: int | None = 0,
    drop_last: bool = False,
    rank: int | None = None,
    size: int | None = None,
) -> Batches:
    """This rank's share of every global batch of the arrays `columns`, which have equal first dimensions.

    batch_size: samples over all ranks. epochs: passes over the data. seed: of the shuffling, new in every epoch; None
    keeps the order. drop_last: leave out the last batch of an epoch if it is smaller; else, where it has fewer samples
    than there are ranks, some ranks get none in it (their gradients count for nothing). rank, size: whose share,
    instead of this rank's; `rank=0, size=1` gives whole batches.

    Yields tuples of arrays (the array itself if there is one), copies of shape (share, ...). The next step takes its
    weight from the batch that came last; if batches are fetched ahead, give it: `opt.step(..., samples=len(x))`.
    Raises InputError for arrays of different lengths and for a batch too small for every rank to have a part.

    >>> for x, y in batches([1, 2, 3, 4, 5], [10, 20, 30, 40, 50], batch_size=4, seed=None, rank=1, size=2):
    ...     print(x, y)
    [3 4] [30 40]
    [] []
    """
    rank = topology.rank() if rank is None else rank
    size = topology.size() if size is None else size
    if not columns:
        raise InputError("batches() needs at least one array")
    hosts = tuple(arrays.as_host_array(column) for column in columns)
    lengths = [len(host) if host.ndim else 0 for host in hosts]
    if len(set(lengths)) > 1 or not lengths[0]:
        raise InputError(f"batches() needs arrays of equal, non-zero length, got lengths {lengths}")
    if seed is not None and not (isinstance(seed, (int, np.integer)) and seed >= 0):
        raise InputError(f"seed={seed!r} must be a whole number of at least 0, or None to keep the order")
    limits = (("size", size, 1), ("rank", rank, 0), ("batch_size", batch_size, size), ("epochs", epochs, 0))
    for name, value, least in limits:
        if not isinstance(value, (int, np.integer)) or value < least:
            why = " (batch_size counts the samples of all ranks)" if name == "batch_size" else ""
            raise InputError(f"{name}={value!r} must be a whole number of at least {least}{why}")
    if drop_last and batch_size > lengths[0]:
        raise InputError(f"drop_last leaves nothing: {lengths[0]} rows do not fill one batch of {batch_size}")
    if not 0 <= rank < size:
        raise InputError(f"rank={rank} is not one of {size} ranks")
    return Batches(hosts, int(batch_size), int(epochs), seed, drop_last, rank, size)


def _part(rows: Array, rank: int, size: int) -> Array:
    sizes = arrays.split_sizes(len(rows), size)
    start = sum(itertools.islice(sizes, rank))
    part: Array = rows[start : start + sizes[rank]]
    return part
