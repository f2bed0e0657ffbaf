"""Loader: base class of Batches, Stream and DistributedBatchSampler, with the positions and samples of their batches.

Loading has two steps, so that a thread or another process can do the second one ahead (prefetching.py): `specs` yields
the specification of each batch in order; `load` makes a batch from its specification. Position and claimed samples
follow the batches that were yielded, not those that were fetched ahead.

A position is an epoch and the number of its samples that were yielded over all ranks. It does not depend on the number
of ranks or the batch size: a position saved on 4 ranks with batches of 100 is valid on 3 with batches of 64.

A step normally follows its batch, so it takes the share of the latest batch. If batches are fetched ahead or skipped,
the batch of a step is not known. That is harmless while all ranks have equal shares. Otherwise it is an error, because
wrong weights of gradients would go unnoticed.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from allred import world
from allred.arrays import Array
from allred.cluster import topology
from allred.errors import InputError
from allred.validators import integer


class LoaderArguments(NamedTuple):
    """Arguments of a loader that must be equal on all ranks: they decide the samples and the number of batches.

    function: "batches", "stream" or "DistributedBatchSampler". values: the name and value of each argument.

    >>> print(LoaderArguments("batches", (("rows", 5), ("seed", None))))
    batches(rows=5, seed=None)
    """

    function: str
    values: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        return f"{self.function}({', '.join(f'{name}={value!r}' for name, value in self.values)})"


class Iteration:
    """One running iteration over a loader.

    rank, ranks: index of its share of each global batch, and the number of shares. arguments: the arguments of its
    loader. start: the position in the data where it began, as text.
    """

    def __init__(self, rank: int, ranks: int, arguments: LoaderArguments, start: str) -> None:
        self.rank, self.ranks, self.arguments = rank, ranks, arguments
        self.arguments_and_start = LoaderArguments(arguments.function, (*arguments.values, ("start", start)))
        self.key = str(self.arguments_and_start)
        self.share = 0  # samples of this rank in the latest batch
        self.ahead = 0  # batches yielded that no step has followed yet
        self.totals: set[int] = set()  # samples over all ranks in each of these batches

    def count_batch(self, share: int, total: int) -> None:
        """Record that a batch is yielded. share, total: its samples on this rank and on all ranks."""
        self.share = share
        self.ahead += 1
        self.totals.add(total)
        running = _iterations().running
        running.pop(self, None)  # the iteration with the latest batch is the last element
        running[self] = None

    def count_steps(self, steps: int) -> None:
        """Record that steps have followed the batches."""
        self.ahead = max(self.ahead - steps, 0)
        if not self.ahead:
            self.totals.clear()

    def uneven(self) -> bool:
        """Whether the shares of the ranks differ in one of the batches without a step."""
        return any(total % self.ranks for total in self.totals)

    def end(self) -> None:
        """Record that the iteration has ended."""
        iterations = _iterations()
        iterations.running.pop(self, None)
        iterations.uneven_left = iterations.uneven_left or self.uneven()


@dataclasses.dataclass
class Iterations:
    """Iterations over batches in one world.

    running: unfinished iterations that have yielded a batch; the last element yielded the latest batch. uneven_left:
    whether an iteration has ended whose uneven batches no step followed.
    """

    running: dict[Iteration, None] = dataclasses.field(default_factory=dict)
    uneven_left: bool = False


_without_world = Iterations()
ITERATIONS = world.Slot(Iterations)


def _iterations() -> Iterations:
    here = world.current_or_none()
    return _without_world if here is None else ITERATIONS.of(here)


def running() -> list[Iteration]:
    """Return the unfinished iterations that have yielded a batch; the last element yielded the latest batch."""
    return list(_iterations().running)


def claim_samples(samples: int | None = None) -> int | None:
    """Return the samples of the step that is about to run: `samples` if given, else the share of its batch.

    Returns None if no batches are in use. Raises InputError if the batch is not known and the shares differ.
    """
    here = world.current_or_none()  # not _iterations(): every step calls this
    iterations = _without_world if here is None else here.slots.get(ITERATIONS)
    if iterations is None:
        return samples
    running = iterations.running
    if not running and not iterations.uneven_left:
        return samples
    shared = [iteration for iteration in running if iteration.ranks > 1]
    candidates = shared or list(running)  # steps do not use batches of one rank alone, such as for validation
    sizes = set().union(*(iteration.totals for iteration in candidates))
    unknown = len(sizes) > 1 and any(iteration.uneven() for iteration in candidates)
    unknown = unknown or (iterations.uneven_left and not running)
    known = samples is not None or unknown
    iterations.uneven_left = False
    for iteration in running:
        iteration.count_steps(iteration.ahead if known else 1)
    if samples is not None:
        return samples
    if unknown:
        raise InputError(
            "the number of samples of this step is not known: batches with uneven shares were iterated without a step "
            "for each (fetched ahead, skipped or evaluated); pass samples=len(x) to step(); for a torch optimizer set "
            "opt.allred.samples = len(x) before backward(), or iterate over sampler.follow(loader)"
        )
    return candidates[-1].share if candidates else None


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
    joins_below: int = 0  # a last batch with fewer samples is joined to the one before it

    @property
    def steps_per_epoch(self) -> int:
        """Number of batches in a complete epoch."""
        return len(self.begins(0))

    def order(self, epoch: int) -> Array:
        """Order of the samples in an epoch, int64 (rows,): a permutation, or 0, 1, 2 ... without a seed."""
        if self.seed is None:
            return np.arange(self.rows)
        return np.random.default_rng([self.seed, epoch]).permutation(self.rows)

    def begins(self, first: int) -> range:
        """Return the first sample of each global batch of an epoch that begins at sample `first`."""
        least = self.batch_size if self.drop_last else 1
        begins = range(first, self.rows - least + 1, self.batch_size)
        return begins[:-1] if len(begins) > 1 and self.rows - begins[-1] < self.joins_below else begins

    def batches(self, start: Position = BEGIN, stop: int | None = None) -> Iterator[tuple[Position, Array]]:
        """Yield each global batch from `start` on: the position after it, and its samples, int64 (n,). stop: the epoch
        to end before, by default `epochs`.

        >>> for position, samples in Sampler(5, 2, 2, None, False).batches(Position(0, 3)):
        ...     print(position.epoch, position.samples, samples)
        0 5 [3 4]
        1 2 [0 1]
        1 4 [2 3]
        1 5 [4]
        """
        for epoch in range(start.epoch, self.epochs if stop is None else stop):
            begins = self.begins(start.samples if epoch == start.epoch else 0)
            if not begins:
                continue
            order = self.order(epoch)
            for begin in begins:
                is_last = begin == begins[-1] and not self.drop_last
                samples = order[begin : self.rows if is_last else begin + self.batch_size]
                yield Position(epoch, begin + len(samples)), samples


def rank_slice(total: int, rank: int, size: int) -> slice:
    """Slice of a rank in a global batch of `total` samples. Sizes differ by at most 1; the first ranks have more.

    >>> [rank_slice(10, rank, 4) for rank in range(4)]
    [slice(0, 3, None), slice(3, 6, None), slice(6, 8, None), slice(8, 10, None)]
    """
    base, extra = divmod(total, size)
    start = rank * base + min(rank, extra)
    return slice(start, start + base + (rank < extra))


@dataclasses.dataclass(frozen=True)
class BatchSpec:
    """Specification of this rank's share of a global batch.

    position: the position after this batch. share, total: samples of this rank, and of all ranks. input: the argument
    of `load`.
    """

    position: Position
    share: int
    total: int
    input: Any


Load = Callable[[Any], Any]
Fetched = Generator[tuple[BatchSpec, Any], None, None]
Fetch = Callable[[Iterable[BatchSpec], Load], Fetched]


def fetch_now(specs: Iterable[BatchSpec], load: Load) -> Fetched:
    """Make each batch when it is asked for."""
    for spec in specs:
        yield spec, load(spec.input)


class Loader:
    """Iterable of this rank's batches; it can be iterated several times. `state_dict` returns its position."""

    batch_size: int  # samples over all ranks
    epochs: int
    drop_last: bool
    function: str  # the public function that returns this loader
    follows_ranks = False  # whether it yields the shares of this rank, also after the ranks have changed

    def __init__(self, rank: int, size: int, load: Load, identity: dict[str, Any]) -> None:
        """load: picklable function that makes a batch. identity: values that a saved position is valid for."""
        self.rank, self.size, self.load = rank, size, load
        self._identity = identity
        self._position = self._start = BEGIN

    def specs(self, start: Position) -> Iterator[BatchSpec]:
        """Yield the specification of each batch from `start` on."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        return self.iterate(fetch_now)

    def iterate(self, fetch: Fetch) -> Iterator[Any]:
        """Iterate over batches that `fetch` makes from their specifications."""
        start, here = self.take_start(), world.current_or_none()
        recovery = here.recovery if here is not None and self.follows_ranks else None
        return self._iterate_from(start, fetch) if recovery is None else self._follow(start, fetch, recovery)

    def take_start(self) -> Position:
        """Return where the next iteration starts; the one after it starts at the beginning."""
        start, self._start = self._start, BEGIN
        return start

    def _iterate_from(self, start: Position, fetch: Fetch) -> Generator[Any, None, None]:
        where = f"epoch {start.epoch}, sample {start.samples}"
        iteration = Iteration(self.rank, self.size, self.arguments, where)
        return self._yield_batches(fetch(self.specs(start), self.load), iteration)

    def _follow(self, start: Position, fetch: Fetch, recovery: Any) -> Iterator[Any]:
        """As `_iterate_from`. recovery: a `Recovery`. When the ranks change, form the next world, and continue after
        the committed batch with the shares of the new ranks."""
        self.check_repeatable()
        loop = recovery.begin_loop(start)
        try:
            while loop.committed is not None:
                loop.position, generation = loop.committed, recovery.generation
                self.take_ranks(topology.rank(), topology.size())  # they may have changed since it was made
                with contextlib.closing(self._iterate_from(loop.committed, fetch)) as batches:
                    for batch in batches:
                        loop.position, loop.steps = self._position, 0
                        yield batch
                        if recovery.is_due or recovery.generation != generation:
                            break
                    else:
                        return
                if recovery.is_due:  # else another loop has formed the next world
                    recovery.form_for(loop)
        finally:
            recovery.end_loop(loop)

    def take_ranks(self, rank: int, size: int) -> None:
        """Yield the share of this rank from now on."""
        self.rank, self.size = rank, size

    def check_repeatable(self) -> None:
        """Raise InputError if it cannot be iterated again from an earlier position."""

    @property
    def arguments(self) -> LoaderArguments:
        """Arguments that must be equal on all ranks that share its batches."""
        own = {"batch_size": self.batch_size, "epochs": self.epochs, "drop_last": self.drop_last}
        return LoaderArguments(self.function, tuple({**self._identity, **own}.items()))

    def _yield_batches(self, fetched: Fetched, iteration: Iteration) -> Generator[Any, None, None]:
        try:
            for spec, batch in fetched:
                iteration.count_batch(spec.share, spec.total)
                self._position = spec.position
                yield batch
        finally:
            iteration.end()
            fetched.close()

    def state_dict(self) -> dict[str, Any]:
        """Position in the data, the same on all ranks.

        Returns a dict of ints and None, which JSON can hold: "epoch", counted from 0; "samples", the number of samples
        of that epoch that were yielded over all ranks, including the latest batch; and values that identify the data,
        such as "rows" and "seed".
        """
        return {"epoch": self._position.epoch, "samples": self._position.samples, **self._identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start the next iteration after the last batch that `state` includes. Later iterations start at the beginning.

        The number of ranks and batch_size may differ from those of the saved state. Pass the same state on every rank.
        Raises InputError: `state` is not a state of a loader, or was saved for other data; nothing has changed then.
        """
        if not isinstance(state, Mapping):
            raise InputError(f"load_state_dict: expected the result of state_dict(), got {state!r}")
        missing = [name for name in ("epoch", "samples", *self._identity) if name not in state]
        if missing:
            raise InputError(
                f"load_state_dict: expected the result of state_dict(), got {dict(state)!r} without {missing}"
            )
        for name, own in self._identity.items():
            if state[name] != own:
                raise InputError(
                    f"load_state_dict: the state was saved for other data: {name} is {state[name]!r} in the state and "
                    f"{own!r} here. Pass the same data and seed as when it was saved; to start this data from the "
                    "beginning, do not load the state (in a session: leave data= out of track)"
                )
        rows = self._identity.get("rows")
        for name, most in (("epoch", None), ("samples", rows)):
            value = state[name]
            if not isinstance(value, (int, np.integer)) or value < 0 or (most is not None and value > most):
                expected = "an integer >= 0" if most is None else f"an integer from 0 to {most}"
                raise InputError(f"load_state_dict: {name} must be {expected}, but is {value!r}")
        self._position = self._start = Position(int(state["epoch"]), int(state["samples"]))


def check_batch_size(function: str, value: Any, size: int) -> int:
    """Return the batch size. Raises InputError if it is less than one sample for each rank."""
    number = integer(f"{function}: batch_size", value, 1)
    if number < size:
        raise InputError(
            f"{function}: batch_size={number} is less than one sample for each of the {size} ranks; it counts the "
            f"samples of all ranks together: pass at least {size}"
        )
    return number


def resolve_rank(function: str, rank: int | None, size: int | None) -> tuple[int, int]:
    """Return rank and size, by default those of this process. Raises InputError if the rank does not exist.

    The own rank of a parameter server is beyond the last worker. A server may create loaders; it gets no samples.
    """
    given = rank is not None or size is not None
    size = integer(f"{function}: size", topology.size() if size is None else size, 1)
    rank = integer(f"{function}: rank", topology.rank() if rank is None else rank, 0)
    if given and rank >= size:
        raise InputError(f"{function}: rank must be less than size={size}, but is {rank}")
    return rank, size
