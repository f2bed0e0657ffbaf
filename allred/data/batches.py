"""Batches and streams: each rank's share of global batches of arrays and datasets, or of records that can be read only
in order; and a shuffle buffer for these.

The order of the samples depends on the seed only, not on the number of ranks: batch number k holds the same samples on
1 rank and on 64. Shares of ranks differ by at most one sample. An optimizer wrapped by allred.distributed weights the
gradients of each rank by its share, so the update is that of the whole batch.

Of a stream every rank reads all records and decodes only its share. So the batches are the same on any number of ranks,
and a position is a number of records. To resume, the records before the position are read again without decoding.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any

import numpy as np

from allred.arrays import Array
from allred.data.columns import Columns, as_column, collate
from allred.data.loader import (
    BatchSpec,
    Loader,
    LoaderArguments,
    Position,
    Sampler,
    check_batch_size,
    rank_slice,
    resolve_rank,
)
from allred.errors import InputError
from allred.validators import boolean, integer

Decode = Callable[[Any], Any]


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
    follows_ranks = rank is None and size is None
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
    made = Batches(Columns(found), Sampler(rows, batch_size, epochs, seed, drop_last), rank, size)
    made.follows_ranks = follows_ranks
    return made


# Streams.


class Shuffled:
    """Iterable of shuffled records, returned by `shuffled`. A plain iteration uses the order of epoch 0."""

    def __init__(self, records: Iterable[Any], buffer: int, seed: int) -> None:
        self.records, self.buffer, self.seed = records, buffer, seed

    def __iter__(self) -> Iterator[Any]:
        return self.of_epoch(0)

    def of_epoch(self, epoch: int) -> Iterator[Any]:
        """Yield all records in the order of an epoch."""
        rng = np.random.default_rng([self.seed, epoch])
        held: list[Any] = []
        for record in self.records:
            if len(held) < self.buffer:
                held.append(record)
                continue
            index = int(rng.integers(self.buffer))
            yield held[index]
            held[index] = record
        for index in rng.permutation(len(held)):
            yield held[index]


def shuffled(records: Iterable[Any], buffer: int, seed: int = 0) -> Shuffled:
    """Shuffle records with a buffer: each next record is drawn at random from `buffer` records in memory.

    Arguments:
        records: iterable; for several epochs it must be iterable again.
        buffer: records in memory, >= 1. No record moves forward by more than this number, so it should exceed the
            longest run of equal labels.
        seed: >= 0. The order depends on it and on the epoch, which `allred.data.stream` sets. It is the same on all
            ranks and after a resume.

    Raises InputError: buffer or seed out of range.

    >>> list(shuffled(range(8), buffer=4, seed=1))
    [1, 2, 3, 6, 7, 0, 5, 4]
    """
    return Shuffled(records, integer("shuffled: buffer", buffer, 1), integer("shuffled: seed", seed, 0))


class Stream(Loader):
    """Iterable of batches, returned by `stream`. It has no `len`, because the number of records is not known."""

    function = "stream"

    def __init__(
        self,
        records: Iterable[Any],
        batch_size: int,
        epochs: int,
        drop_last: bool,
        decode: Decode | None,
        rank: int,
        size: int,
    ) -> None:
        shuffle = records if isinstance(records, Shuffled) else None
        identity = {"seed": shuffle.seed if shuffle else None, "buffer": shuffle.buffer if shuffle else None}
        super().__init__(rank, size, DecodeAndCollate(decode), identity)
        self.batch_size, self.epochs, self.drop_last = batch_size, epochs, bool(drop_last)
        self._records = records

    def check_repeatable(self) -> None:
        source = self._records.records if isinstance(self._records, Shuffled) else self._records
        if iter(source) is source:
            raise InputError(
                f"stream: {type(source).__name__} can be iterated over only once, but `allred run --elastic` reads it "
                "again when the ranks change; pass an object whose __iter__ starts again, such as allred.data.tfrecord"
            )

    @property
    def arguments(self) -> LoaderArguments:
        """Arguments that must be equal on all ranks, with the number of records if they have a length."""
        source = self._records.records if isinstance(self._records, Shuffled) else self._records
        found = super().arguments
        if not isinstance(source, Sized):
            return found
        return LoaderArguments(found.function, (("rows", len(source)), *found.values))

    def specs(self, start: Position) -> Iterator[BatchSpec]:
        """Yield the records of this rank's shares, and the first record of the batch as a model for an empty share."""
        for epoch in range(start.epoch, self.epochs):
            records = self._records
            remaining = records.of_epoch(epoch) if isinstance(records, Shuffled) else iter(records)
            done = _skip(remaining, start.samples) if epoch == start.epoch else 0
            while batch := list(itertools.islice(remaining, self.batch_size)):
                if self.drop_last and len(batch) < self.batch_size:
                    break
                share = rank_slice(len(batch), self.rank, self.size)
                mine, first = batch[share], done + share.start
                done += len(batch)
                yield BatchSpec(Position(epoch, done), len(mine), len(batch), (mine, batch[0], first))


class DecodeAndCollate:
    """Picklable function that decodes records and collates them into a batch."""

    def __init__(self, decode: Decode | None) -> None:
        self._decode = decode

    def __call__(self, task: tuple[list[Any], Any, int]) -> Any:
        """task: records, a record that defines kinds and shapes if there are none, number of the first record."""
        records, like, first = task
        if self._decode is None:
            return collate(records, like)
        samples = []
        for number, record in enumerate(records):
            try:
                samples.append(self._decode(record))
            except Exception as error:
                error.add_note(f"raised by decode() for record {first + number} of the stream (the first record is 0)")
                raise
        return collate(samples, None if records else self._decode(like))


def stream(
    records: Iterable[Any],
    *,
    batch_size: int,
    epochs: int = 1,
    decode: Decode | None = None,
    drop_last: bool = False,
    rank: int | None = None,
    size: int | None = None,
) -> Stream:
    """Iterate over this rank's share of every global batch of a stream of records.

    Every rank reads all records. `allred.data.prefetch` does reading and decoding ahead; with processes, these decode.

    Arguments:
        records: `allred.data.tfrecord(...)`, `allred.data.shuffled(...)`, or any iterable of the same records in the
            same order on every rank. For several epochs it must be iterable again.
        decode: function from a record to a sample. It is called for this rank's records only. Samples are collated to
            numpy arrays as in `batches`. Without it, a batch of bytes is a list.
        batch_size, epochs, drop_last, rank, size: as in `batches`.

    Returns a `Stream` object, which yields this rank's batches. Weights of steps, `state_dict` and `load_state_dict`
    are as in `batches`: a position is a number of records over all ranks, valid on any number of ranks.
    Raises InputError: a batch_size below one sample per rank; several epochs of an iterable that can be iterated once;
    during iteration, a position beyond the end of the stream.

    >>> for batch in stream(range(7), batch_size=4, decode=lambda n: 10 * n, rank=1, size=2):
    ...     print(batch)
    [20 30]
    [60]
    """
    follows_ranks = rank is None and size is None
    rank, size = resolve_rank("stream", rank, size)
    batch_size = check_batch_size("stream", batch_size, size)
    epochs = integer("stream: epochs", epochs, 0)
    source = records.records if isinstance(records, Shuffled) else records
    if not hasattr(source, "__iter__"):
        raise InputError(f"stream() needs an iterable of records, got {type(source).__name__}")
    if epochs > 1 and iter(source) is source:
        raise InputError(
            f"stream: {type(source).__name__} can be iterated over only once, but epochs={epochs}; pass an object "
            "whose __iter__ starts again, such as allred.data.tfrecord(...)"
        )
    made = Stream(records, batch_size, epochs, drop_last, decode, rank, size)
    made.follows_ranks = follows_ranks
    return made


def _skip(records: Iterator[Any], count: int) -> int:
    """Read `count` records without decoding and return `count`. Raises InputError if there are fewer."""
    skipped = sum(1 for _ in itertools.islice(records, count))
    if skipped < count:
        raise InputError(
            f"load_state_dict: the position in the state is after {count} records of this epoch, but the stream ended "
            f"after {skipped}; pass the stream that the state was saved for"
        )
    return count
