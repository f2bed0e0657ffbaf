"""What gives out batches, and knows where it is: the base of Batches and Stream.

A batch is made in two steps, so that the second can be done ahead, by a thread or in another process (prefetching.py):
`jobs` says what comes next, in order; `load` makes the batch of a job's task. Where a loader is, and how many samples a
step claims (share.py), goes by what was handed out, whatever was fetched ahead.
"""

import dataclasses
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from allred.cluster import topology
from allred.data.loader_arguments import LoaderArguments
from allred.data.sampler import BEGIN, Position
from allred.data.share import Source
from allred.errors import InputError


@dataclasses.dataclass(frozen=True)
class Job:
    """This rank's part of a global batch, before it is made.

    Arguments:
        position: after this batch.
        share, total: samples of this rank, and of all.
        task: what `load` takes.
    """

    position: Position
    share: int
    total: int
    task: Any


Load = Callable[[Any], Any]
Fetched = Generator[tuple[Job, Any], None, None]
Fetch = Callable[[Iterable[Job], Load], Fetched]


class Loader:
    """Iterate over it, more than once if you like; `state_dict` says at any time where it is."""

    batch_size: int  # samples over all ranks
    epochs: int
    drop_last: bool
    function: str  # the public function that returns this loader

    def __init__(self, rank: int, size: int, load: Load, identity: dict[str, Any]) -> None:
        """load: makes a batch; can be pickled. identity: what must be the same for a position to mean the same."""
        self.rank, self.size, self.load = rank, size, load
        self._identity = identity
        self._position = self._start = BEGIN

    def jobs(self, start: Position) -> Iterator[Job]:
        """What comes from `start` on."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        return self.iterate(_one_by_one)

    def iterate(self, fetch: Fetch) -> Iterator[Any]:
        """An iteration over what `fetch` makes of the jobs."""
        start, self._start = self._start, BEGIN
        source = Source(self.rank, self.size, self.arguments, start)
        return self._hand_out(fetch(self.jobs(start), self.load), source)

    @property
    def arguments(self) -> LoaderArguments:
        """The arguments that must be equal on all ranks that share its batches."""
        own = {"batch_size": self.batch_size, "epochs": self.epochs, "drop_last": self.drop_last}
        return LoaderArguments(self.function, tuple({**self._identity, **own}.items()))

    def _hand_out(self, fetched: Fetched, source: Source) -> Iterator[Any]:
        try:
            for job, batch in fetched:
                source.give(job.share, job.total)
                self._position = job.position
                yield batch
        finally:
            source.end()
            fetched.close()

    def state_dict(self) -> dict[str, Any]:
        """Where it is: numbers, of which JSON makes no others. The same on all ranks.

        "epoch", counted from 0, and "samples": so many of it have been given out over all ranks, the batch that came
        last included. The rest tells the data: "rows" and "seed" of arrays and datasets.
        """
        return {"epoch": self._position.epoch, "samples": self._position.samples, **self._identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on after the last batch that `state` knows of, and no other.

        The number of ranks and batch_size may be others than before. Give every rank the same state.
        Raises InputError, and changes nothing, if it is no such state or one of other data.
        """
        missing = [name for name in ("epoch", "samples", *self._identity) if name not in state]
        if missing:
            raise InputError(f"load_state_dict: expected what state_dict() gave, got {dict(state)!r} without {missing}")
        for name, own in self._identity.items():
            if state[name] != own:
                raise InputError(
                    f"load_state_dict: the state is of other data, with {name}={state[name]!r}; here {name} is "
                    f"{own!r}. A position is of use only in the data and the order in which it was saved; "
                    "to begin this data anew, restore without it (in a session: leave data= out of track)"
                )
        rows = self._identity.get("rows")
        for name, most in (("epoch", None), ("samples", rows)):
            value = state[name]
            if not isinstance(value, (int, np.integer)) or value < 0 or (most is not None and value > most):
                within = "a whole number of at least 0" if most is None else f"a whole number from 0 to {most}"
                raise InputError(f"load_state_dict: {name}={value!r} must be {within}")
        self._position = self._start = Position(int(state["epoch"]), int(state["samples"]))


def _one_by_one(jobs: Iterable[Job], load: Load) -> Fetched:
    for job in jobs:
        yield job, load(job.task)


def check_numbers(**numbers: tuple[Any, int]) -> None:
    """Raise InputError for one that is no whole number of at least the second of its pair."""
    for name, (value, least) in numbers.items():
        if not isinstance(value, (int, np.integer)) or value < least:
            why = " (batch_size counts the samples of all ranks)" if name == "batch_size" else ""
            raise InputError(f"{name}={value!r} must be a whole number of at least {least}{why}")


def whose_share(rank: int | None, size: int | None) -> tuple[int, int]:
    """Rank and size, this rank's where they are None. Raises InputError unless there is such a rank.

    A parameter server's own rank is behind the last worker's: it may go past the line that makes the batches, and would
    get none of them.
    """
    given = rank is not None or size is not None
    rank = topology.rank() if rank is None else rank
    size = topology.size() if size is None else size
    check_numbers(size=(size, 1), rank=(rank, 0))
    if given and rank >= size:
        raise InputError(f"rank={rank} is not one of {size} ranks")
    return int(rank), int(size)
