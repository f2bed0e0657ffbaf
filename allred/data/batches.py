"""Batches: each rank's share of global batches of arrays and datasets.

The order of the samples depends on the seed only, not on the number of ranks: batch number k holds the same samples on
1 rank and on 64. Shares of ranks differ by at most one sample. An optimizer wrapped by allred.distributed weights the
gradients of each rank by its share, so the update is that of the whole batch.
"""

from collections.abc import Iterator
from typing import Any

from allred.arrays import Array
from allred.data.columns import Columns, as_column
from allred.data.loader import BatchSpec, Loader, Position, Sampler, check_batch_size, rank_slice, resolve_rank
from allred.errors import InputError
from allred.validators import boolean, integer


class Batches(Loader):
    """Iterable of batches, returned by `batches`; it can be iterated several times.

    `len` is the number of steps of all epochs, `steps_per_epoch` of one. Both count from the beginning of the data,
    also after `load_state_dict`, so schedules and limits computed from them do not change when training resumes.
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
        """Row numbers of an epoch in their order, int64 (rows,): a permutation, or 0, 1, 2 ... without a seed."""
        return self._sampler.order(epoch)

    def specs(self, start: Position) -> Iterator[BatchSpec]:
        """Yield the row numbers of this rank's shares."""
        for position, rows in self._sampler.batches(start):
            mine = rows[rank_slice(len(rows), self.rank, self.size)]
            yield BatchSpec(position, len(mine), len(rows), mine)


def batches(
    *columns: Any,
    batch_size: int,
    epochs: int = 1,
    seed: int | None = 0,
    drop_last: bool = False,
    rank: int | None = None,
    size: int | None = None,
) -> Batches:
    """Iterate over this rank's share of every global batch.

    All ranks must pass the same arguments. The first step of an optimizer compares them, and raises MismatchError if
    they differ.

    Arguments:
        columns: arrays of shape (rows, ...) and any dtype; or map-style datasets: objects with `__len__` and
            `__getitem__(int)`, such as a torch Dataset. All have the same length. Of memory-mapped arrays
            (`numpy.load(path, mmap_mode="r")`, `allred.data.npy`) only the rows of a batch are read. Samples of a
            dataset (numbers, arrays, tuples, dicts) are collated to numpy arrays, as by torch's default_collate.
        batch_size: samples over all ranks, at least one per rank.
        epochs: passes over the data.
        seed: seed of the shuffling, which differs in every epoch; None keeps the order.
        drop_last: leave out the last batch of an epoch if it is smaller. Otherwise, if it has fewer samples than there
            are ranks, some ranks get 0 samples, and their gradients have weight 0.
        rank, size: whose share to return, by default this rank's; `rank=0, size=1` returns whole batches.

    Returns a `Batches` object. It yields tuples of batches, or the batch itself if there is one column: copies of shape
    (share, ...). The next step weights its gradients by the share of the latest batch. `allred.data.prefetch` preserves
    this; with other ways of fetching ahead pass it: `opt.step(..., samples=len(x))`. `state_dict()` returns the
    position, and after `load_state_dict(state)` the next iteration continues there, on any number of ranks and with any
    batch_size; no sample of an epoch is skipped or repeated. After its end or a `break`, a new iteration starts at the
    beginning.
    Raises InputError: columns of different lengths, or a batch_size below one sample per rank.

    >>> data = batches([1, 2, 3, 4, 5], [10, 20, 30, 40, 50], batch_size=4, seed=None, rank=1, size=2)
    >>> for x, y in data:
    ...     print(x, y, data.state_dict())
    [3 4] [30 40] {'epoch': 0, 'samples': 4, 'rows': 5, 'seed': None}
    [] [] {'epoch': 0, 'samples': 5, 'rows': 5, 'seed': None}
    """
    rank, size = resolve_rank("batches", rank, size)
    if not columns:
        raise InputError("batches() needs at least one array")
    found = [as_column(value) for value in columns]
    lengths = [len(one) for one in found]
    rows = lengths[0]
    if len(set(lengths)) > 1 or not rows:
        raise InputError(f"batches() needs arrays of equal, non-zero length, got lengths {lengths}")
    if seed is not None:
        seed = integer("batches: seed", seed, 0, "pass None to keep the order")
    batch_size = check_batch_size("batches", batch_size, size)
    epochs = integer("batches: epochs", epochs, 0)
    boolean("batches: drop_last", drop_last)
    if drop_last and batch_size > rows:
        raise InputError(f"batches: with drop_last there are no batches: {rows} rows do not fill one of {batch_size}")
    return Batches(Columns(found), Sampler(rows, batch_size, epochs, seed, drop_last), rank, size)
