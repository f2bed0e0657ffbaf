"""Global batches of what can only be read from front to back, of which each rank gets its share.

Every rank reads the whole stream, and decodes its share alone. So the batches are the same on any number of ranks, a
position is a number of records, and to go on from one those before it are read again, and not decoded.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any

from allred.data.collate import collate
from allred.data.loader import Job, Loader, check_numbers, whose_share
from allred.data.loader_arguments import LoaderArguments
from allred.data.sampler import Position, part
from allred.data.shuffle import Shuffled
from allred.errors import InputError

Decode = Callable[[Any], Any]


class Stream(Loader):
    """What `stream` returns: iterate over it. It has no length, since nobody knows it."""

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
        of = records if isinstance(records, Shuffled) else None
        identity = {"seed": of.seed if of else None, "buffer": of.buffer if of else None}
        super().__init__(rank, size, Decoded(decode), identity)
        self.batch_size, self.epochs, self.drop_last = batch_size, epochs, bool(drop_last)
        self._records = records

    @property
    def arguments(self) -> LoaderArguments:
        """The arguments that must be equal on all ranks, with the number of records if they have a length."""
        source = self._records.records if isinstance(self._records, Shuffled) else self._records
        found = super().arguments
        if not isinstance(source, Sized):
            return found
        return LoaderArguments(found.function, (("rows", len(source)), *found.values))

    def jobs(self, start: Position) -> Iterator[Job]:
        """Records of this rank's parts; where there are none, one that tells what the others look like."""
        for epoch in range(start.epoch, self.epochs):
            records = self._records
            one_by_one = records.of_epoch(epoch) if isinstance(records, Shuffled) else iter(records)
            done = _skip(one_by_one, start.samples) if epoch == start.epoch else 0
            while batch := list(itertools.islice(one_by_one, self.batch_size)):
                if self.drop_last and len(batch) < self.batch_size:
                    break
                share = part(len(batch), self.rank, self.size)
                mine, first = batch[share], done + share.start
                done += len(batch)
                yield Job(Position(epoch, done), len(mine), len(batch), (mine, batch[0], first))


class Decoded:
    """Makes a batch of a rank's records, and of one that tells what they are like."""

    def __init__(self, decode: Decode | None) -> None:
        self._decode = decode

    def __call__(self, task: tuple[list[Any], Any, int]) -> Any:
        """task: the records, the one that tells, and the number of the first."""
        records, like, first = task
        if self._decode is None:
            return collate(records, like)
        made = []
        for number, record in enumerate(records):
            try:
                made.append(self._decode(record))
            except Exception as error:
                error.add_note(f"decode() raised it for record {first + number} of the stream (the first one is 0)")
                raise
        return collate(made, None if records else self._decode(like))


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
    """This rank's share of every global batch of a stream of records.

    records: `allred.data.tfrecord(...)`, `allred.data.shuffled(...)`, or any iterable that gives the same records in
    the same order on every rank and each time; for several epochs one that can be iterated again. Every rank reads all
    of them. decode: makes a sample of a record, for this rank's records alone; samples are collated to numpy arrays as
    those of a dataset in `batches`. Without it a batch of bytes is a list.
    batch_size, epochs, drop_last, rank, size: as in `batches`.

    Yields this rank's batches, which the next step takes its weight from. `state_dict` and `load_state_dict` are those
    of `batches`: a position is a number of records over all ranks, and serves on any number of ranks. To go on from it
    the records before it are read again. `allred.data.prefetch` does reading and decoding ahead; its processes do the
    decoding alone.

    Raises InputError for a batch too small for every rank to have a part, for several epochs of what can be iterated
    only once, and, when iterated, if a position is behind the end of the stream.

    >>> for batch in stream(range(7), batch_size=4, decode=lambda n: 10 * n, rank=1, size=2):
    ...     print(batch)
    [20 30]
    [60]
    """
    rank, size = whose_share(rank, size)
    check_numbers(batch_size=(batch_size, size), epochs=(epochs, 0))
    source = records.records if isinstance(records, Shuffled) else records
    if not hasattr(source, "__iter__"):
        raise InputError(f"stream() needs something to iterate over, got {type(source).__name__}")
    if epochs > 1 and iter(source) is source:
        raise InputError(
            f"{type(source).__name__} can be iterated over only once, and epochs={epochs}; give an object whose "
            "__iter__ begins anew, such as allred.data.tfrecord(...)"
        )
    return Stream(records, int(batch_size), int(epochs), drop_last, decode, rank, size)


def _skip(records: Iterator[Any], count: int) -> int:
    skipped = sum(1 for _ in itertools.islice(records, count))
    if skipped < count:
        raise InputError(
            f"load_state_dict: the state says that {count} records of this epoch were given out, and the stream ended "
            f"after {skipped}; it is another one, or has lost records"
        )
    return count
