"""`DistributedBatchSampler`: batch sampler for torch's DataLoader. Yields the indices of this rank's samples of each
global batch. Without drop_last every sample of an epoch is used exactly once, on any number of ranks; nothing is
padded."""

import collections
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import numpy as np

from allred.data.loader import (
    BatchSpec,
    Fetched,
    Load,
    Loader,
    Position,
    Sampler,
    check_batch_size,
    fetch_now,
    rank_slice,
    resolve_rank,
)
from allred.errors import InputError
from allred.validators import boolean, integer

T = TypeVar("T")


class DistributedBatchSampler(Loader):
    """Iterable of lists of sample indices: the argument `batch_sampler` of torch.utils.data.DataLoader.

    Unlike torch's DistributedSampler it yields lists (batch_sampler=, not sampler=), batch_size is the global batch,
    and seed=None replaces shuffle=False. Saves its position: state_dict, load_state_dict.

        sampler = allred.data.DistributedBatchSampler(dataset, batch_size=256)
        loader = DataLoader(dataset, batch_sampler=sampler, num_workers=4)
        for epoch in range(sampler.epoch, 10):
            sampler.set_epoch(epoch)
            for x, y in sampler.follow(loader):
                ...

    Global batches are those of `allred.data.batches`: the order of the rows depends on seed and epoch only, and the
    shares of the ranks differ by at most one row. If the last global batch of an epoch has fewer rows than there are
    ranks, it is joined to the one before it, so that every rank has a row. All ranks make the same number of steps, and
    the optimizer weights the ranks by the sizes of their shares.

    `follow` is needed if the loader fetches ahead (num_workers > 0): position and sizes are those of the batches that
    the program has received. `Session.steps(loader)` calls it.

    Arguments:
        data: the dataset, or an int: its number of rows.
        batch_size: rows over all ranks, at least one per rank.
        epochs: passes of one iteration. With 1, `set_epoch` selects the epoch.
        seed: seed of the shuffling, which differs in every epoch; None keeps the order.
        drop_last: leave out the last batch of an epoch if it is smaller than the others.
        rank, size: whose share to return, by default this rank's.

    Raises InputError for arguments that cannot be used.

    >>> for rows in DistributedBatchSampler(5, batch_size=2, seed=None, rank=0, size=2):
    ...     print(rows)
    [0]
    [2, 3]
    """

    function = "DistributedBatchSampler"

    def __init__(
        self,
        data: Any,
        batch_size: int,
        epochs: int = 1,
        seed: int | None = 0,
        drop_last: bool = False,
        rank: int | None = None,
        size: int | None = None,
    ) -> None:
        name = "DistributedBatchSampler"
        self.follows_ranks = rank is None and size is None
        rank, size = resolve_rank(name, rank, size)
        rows = integer(f"{name}: data", len(data) if hasattr(data, "__len__") else data, 0)
        if rows < size:
            raise InputError(
                f"{name}: the data has {rows} rows, which is less than one for each of the {size} ranks; start "
                "fewer ranks, or pass more data"
            )
        seed = None if seed is None else integer(f"{name}: seed", seed, 0, "pass None to keep the order")
        batch_size = check_batch_size(name, batch_size, size)
        epochs = integer(f"{name}: epochs", epochs, 1)
        drop_last = boolean(f"{name}: drop_last", drop_last)
        super().__init__(rank, size, np.ndarray.tolist, {"rows": rows, "seed": seed})
        self._sampler = Sampler(rows, batch_size, epochs, seed, drop_last, joins_below=size)
        self.rows, self.batch_size, self.epochs, self.drop_last = rows, batch_size, epochs, drop_last
        self._followed: Iterator[Any] | None = None

    @property
    def epoch(self) -> int:
        """The epoch of the latest batch, or of the position that was loaded."""
        return self._position.epoch

    def set_epoch(self, epoch: int) -> None:
        """Start the next iteration at this epoch; at the restored position if that is in this epoch. Raises InputError
        for a negative number."""
        if integer("set_epoch", epoch, 0) != self._start.epoch:
            self._start = Position(int(epoch), 0)

    def __len__(self) -> int:
        """Return the number of batches of an iteration from the beginning."""
        return self.epochs * len(self._sampler.begins(0))

    def specs(self, start: Position) -> Iterator[BatchSpec]:
        """Yield the sample indices of this rank's shares."""
        for position, rows in self._sampler.batches(start, start.epoch + 1 if self.epochs == 1 else None):
            if len(rows) < self.size:
                raise InputError(
                    f"DistributedBatchSampler: {len(rows)} rows of epoch {position.epoch} are left after the position "
                    f"that was loaded, which are too few for {self.size} ranks; resume on {len(rows)} or fewer ranks"
                )
            mine = rows[rank_slice(len(rows), self.rank, self.size)]
            yield BatchSpec(position, len(mine), len(rows), mine)

    def __iter__(self) -> Iterator[list[int]]:
        return self._iterate_lazily() if self._followed is None else self._followed

    def _iterate_lazily(self) -> Iterator[list[int]]:
        """Iterate; the position is used at the first batch, because torch's DataLoader creates an iterator that it does
        not use. A loader may fetch ahead. Then only `follow` knows the position of the program, so an elastic job does
        not go on in a loop without it."""
        yield from self._iterate_from(self.take_start(), fetch_now)

    def take_ranks(self, rank: int, size: int) -> None:
        super().take_ranks(rank, size)
        self._sampler = dataclasses.replace(self._sampler, joins_below=size)

    def follow(self, batches: Iterable[T]) -> Iterator[T]:
        """Iterate over the batches of a loader that uses this sampler. The position and the number of samples are those
        of the batch that was yielded last. Raises InputError if the loader does not use this sampler."""

        def fetch(specs: Iterable[BatchSpec], load: Load) -> Fetched:
            requested: collections.deque[BatchSpec] = collections.deque()

            def rows() -> Iterator[Any]:
                for spec in specs:
                    requested.append(spec)
                    yield load(spec.input)

            self._followed = rows()
            try:
                for batch in batches:
                    if not requested:
                        raise InputError(
                            "DistributedBatchSampler.follow: the loader does not use this sampler; pass it as "
                            "batch_sampler"
                        )
                    yield requested.popleft(), batch
            finally:
                self._followed = None

        return self.iterate(fetch)


def sampler_of(data: Any) -> DistributedBatchSampler | None:
    """Return the sampler of a loader, or `data` if it is a sampler itself; None if there is none."""
    found = data if isinstance(data, DistributedBatchSampler) else getattr(data, "batch_sampler", None)
    return found if isinstance(found, DistributedBatchSampler) else None
