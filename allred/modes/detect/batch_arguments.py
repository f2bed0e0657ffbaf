"""Compares the arguments of `batches` and `stream` between the ranks. Different arguments skip and repeat samples.

The ranks exchange the arguments in the first step, and in later steps in which a rank has new arguments. They include
iterations that are shared between the ranks of this communicator or of the world. Data that one rank reads for itself
(rank=0, size=1) and other loaders than allred's are not compared. One rank may have more iterations than the others,
such as a validation on the chief.
"""

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from allred import world
from allred.cluster import topology
from allred.comm.communicator import Communicator
from allred.comm.header import by_rank
from allred.data import Batches, DistributedBatchSampler, Prefetch, Stream, loader
from allred.data.distributed_batch_sampler import sampler_of
from allred.data.loader import Iteration, LoaderArguments
from allred.errors import MismatchError
from allred.ps.protocol import CompareBatches

if TYPE_CHECKING:
    from allred.ps.worker_client import Client

_APART = 20  # the least number of steps between comparisons: an exchange of objects takes about 0.1 ms


class BatchArguments:
    """Compares the arguments of the batches that one optimizer or gradient function uses. `title`: prefix of errors."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._compared: set[str] = set()  # keys of the iterations in the last comparison
        self._next_at = 0  # the earliest step of the next comparison

    def new(self, communicator: Communicator, step: int) -> bool:
        """Whether this rank uses arguments that have not been compared yet."""
        unknown = [iteration for iteration in loader.running() if iteration.key not in self._compared]
        if not unknown or step < self._next_at or communicator.size == 1:
            return False
        return any(_shared(communicator, iteration) for iteration in unknown)

    def compare(self, communicator: Communicator, step: int) -> None:
        """Exchange the arguments in use. Collective. Raises MismatchError on all ranks if they differ."""
        mine = {iteration.key: iteration.arguments_and_start for iteration in _running(communicator)}
        title = f"{self._title}: arguments of the batches"
        everyone = communicator.allgather_object(list(mine.values()), title).wait()
        if problem := difference(everyone, communicator.active.ranks):
            raise MismatchError(f"{self._title}: {problem}")
        self._compared, self._next_at = set(mine), step + _APART


def compare_at_server(client: "Client", title: str) -> None:
    """Mode ps: compare this worker's arguments with those of the workers that have already made a step. Start positions
    are not compared: workers may resume at different positions. Raises MismatchError on this worker only."""
    running = _running(world.current().communicator)
    mine = list(dict.fromkeys(iteration.arguments for iteration in running))
    if mine:
        everyone = client.call_first(CompareBatches(mine))
        workers = sorted(everyone)
        if problem := difference([everyone[worker] for worker in workers], workers):
            raise MismatchError(f"{title}: {problem}")


def arguments_of(data: Any) -> list[LoaderArguments]:
    """Return the arguments of a loader; [] if it is not allred's or does not share its batches with all ranks."""
    loader = data.loader if isinstance(data, Prefetch) else sampler_of(data) or data
    if not isinstance(loader, Batches | Stream | DistributedBatchSampler) or (loader.rank, loader.size) != (
        topology.rank(),
        topology.size(),
    ):
        return []
    return [loader.arguments]


def difference(everyone: Sequence[Sequence[LoaderArguments]], ranks: Sequence[int]) -> str:
    """Return the difference between the arguments of the ranks as text, the same on every rank; "" if there is none.

    One rank may use more arguments than another: of any two ranks, one's set must contain the other's.

    Arguments:
        everyone: the arguments in use on each rank.
        ranks: the numbers of these ranks.
    """
    sets = sorted({frozenset(each) for each in everyone}, key=len)
    if all(fewer <= more for fewer, more in itertools.pairwise(sets)):
        return ""
    common = frozenset.intersection(*filter(None, sets))
    odd = [(rank, [one for one in each if one not in common]) for rank, each in zip(ranks, everyone, strict=True)]
    odd = [(rank, each) for rank, each in odd if each]
    numbers = [rank for rank, _ in odd]
    if len({one.function for _, each in odd for one in each}) == 1 and all(len(each) == 1 for _, each in odd):
        every = [dict(each[0].values) for _, each in odd]
        texts = {name: [f"{name}={values.get(name)!r}" for values in every] for name in every[0]}
        words = "; ".join(by_rank(text, numbers).replace(";", ",") for text in texts.values() if len(set(text)) > 1)
    else:
        words = by_rank([", ".join(map(str, each)) for _, each in odd], numbers)
    return (
        f"the ranks iterate over batches with different arguments: {words}. Samples would be skipped or used twice; "
        "give all ranks the same data, arguments and start position, or pass rank=0, size=1 for data of one rank alone"
    )


def _running(communicator: Communicator) -> list[Iteration]:
    return [iteration for iteration in loader.running() if _shared(communicator, iteration)]


def _shared(communicator: Communicator, iteration: Iteration) -> bool:
    """Whether an iteration is shared between the ranks of this communicator or of the world."""
    own = communicator.rank, communicator.size
    return (iteration.rank, iteration.ranks) in (own, (topology.rank(), topology.size()))
