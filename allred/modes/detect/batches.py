"""Compares the arguments of `batches` and `stream` over the ranks. If they differ, samples are skipped and repeated.

The ranks exchange the arguments in the first step, and in a later step where a rank has new ones. An iteration takes
part if it gives out the shares of this communicator's ranks, or of the world's. A rank that reads data of its own, or
has a loader that is not allred's, shows nothing. A rank may show more than the others (a validation on the chief).
"""

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from allred.cluster import topology
from allred.comm import functions
from allred.comm.header import by_rank
from allred.data import Batches, Prefetch, Stream, share
from allred.data.arguments import Arguments
from allred.data.share import Source
from allred.errors import MismatchError

if TYPE_CHECKING:
    from allred.ps.client import Client

_APART = 20  # steps from one comparison to the next at least: an exchange of objects takes about 0.1 ms


class BatchArguments:
    """Compares the arguments of the batches of one wrapper's steps. `title`: what errors begin with."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._compared: set[str] = set()  # keys of the iterations in the last comparison
        self._next_at = 0  # the step from which on there may be another

    def new(self, step: int) -> bool:
        """Whether this rank's batches come from arguments that were not compared yet."""
        unknown = [source for source in share.running() if source.key not in self._compared]
        if not unknown or step < self._next_at or functions.current().size == 1:
            return False
        return any(map(_shared, unknown))

    def compare(self, step: int) -> None:
        """Exchange them. Raises MismatchError on all ranks if they differ. Collective."""
        mine = {source.key: source.arguments_and_start for source in share.running() if _shared(source)}
        everyone = functions.allgather_object(list(mine.values()), f"{self._title}: arguments of the batches")
        if problem := difference(everyone, functions.current().active.ranks):
            raise MismatchError(f"{self._title}: {problem}")
        self._compared, self._next_at = set(mine), step + _APART


def compare_at_server(client: "Client", title: str) -> None:
    """Mode ps: compare the arguments of this worker's batches with those of the workers that made a step before it.

    The positions at which iterations began are not compared: workers may resume at different ones.
    Raises MismatchError on this worker.
    """
    mine = list(dict.fromkeys(source.arguments for source in share.running() if _shared(source)))
    if mine:
        everyone = client.call("the arguments of the batches", "batches", [(mine,)])[0]
        workers = sorted(everyone)
        if problem := difference([everyone[worker] for worker in workers], workers):
            raise MismatchError(f"{title}: {problem}")


def arguments_of(data: Any) -> list[Arguments]:
    """The arguments of a loader; none of one that is not allred's, or does not share its batches with other ranks."""
    loader = data.loader if isinstance(data, Prefetch) else data
    if not isinstance(loader, Batches | Stream) or (loader.rank, loader.size) != (topology.rank(), topology.size()):
        return []
    return [loader.arguments]


def difference(everyone: Sequence[Sequence[Arguments]], ranks: Sequence[int]) -> str:
    """What differs between the arguments that each rank uses, in words; "" if nothing does. The same on every rank.

    A rank may use more than another: of any two ranks, one's arguments must be among the other's.

    Arguments:
        everyone: the arguments in use on each rank.
        ranks: the numbers of the ranks, in the same order.
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
        f"the ranks iterate over batches of different arguments: {words}. Samples would be skipped or used twice; give "
        "every rank the same data, arguments and state. A rank that reads data of its own passes rank=0, size=1"
    )


def _shared(source: Source) -> bool:
    """Whether it gives out shares to the ranks of this communicator, or of the world."""
    here = functions.current()
    return (source.rank, source.ranks) in ((here.rank, here.size), (topology.rank(), topology.size()))
