"""Horovod's process sets: sets of ranks with an id, which `init` or `add_process_set` gives them."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from allred import world
from allred.cluster import topology
from allred.comm import functions
from allred.comm.communicator import Communicator
from allred.comm.process_set import ProcessSet as RankSet
from allred.errors import InputError
from allred.torch.horovod.horovod_errors import HorovodNotInitializedError


class ProcessSet:
    """Ranks that take part in collectives with `process_set=` this object.

    ranks_or_comm: a list of ranks, or an mpi4py communicator. Pass the object to `hvd.init(process_sets=[...])` or
    `hvd.add_process_set` on all ranks before it is used.

    process_set_id: its number, None without registration. ranks: the sorted list of ranks; None for a communicator that
    is not registered.

    Raises ValueError for something else.

    Example: `evens = hvd.add_process_set([0, 2])`, then `hvd.allreduce(x, process_set=evens)` on ranks 0 and 2.
    """

    process_set_id: int | None = None
    ranks: list[int] | None = None
    mpi_comm: Any = None

    def __init__(self, ranks_or_comm: Iterable[int] | Any) -> None:
        if hasattr(ranks_or_comm, "Get_group"):
            self.mpi_comm = ranks_or_comm
            return
        ranks: list[Any] = list(ranks_or_comm) if isinstance(ranks_or_comm, Iterable) else [None]
        if not all(isinstance(rank, int) for rank in ranks):
            raise InputError(f"ProcessSet({ranks_or_comm!r}): expected a list of ranks, or an mpi4py communicator")
        self.ranks = sorted(ranks)

    def size(self) -> int | None:
        """Return the number of ranks; None without registration."""
        return None if self.process_set_id is None or self.ranks is None else len(self.ranks)

    def rank(self) -> int | None:
        """Return this rank's index in the set; None without registration. Raises ValueError on other ranks."""
        return None if self.process_set_id is None or self.ranks is None else RankSet(self.ranks).rank()

    def included(self) -> bool | None:
        """Return whether this rank is in the set; None if its ranks are not known yet."""
        return None if self.ranks is None else topology.rank() in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"


global_process_set = ProcessSet([])
global_process_set.process_set_id = 0

_numbers = itertools.count(1)
_registered: dict[int, ProcessSet] = {}  # by id, without the global one


def register(process_sets: Sequence[ProcessSet]) -> None:
    """Forget all sets, and register these. Called by `init`. Raises ValueError if two have the same ranks."""
    for each in _registered.values():
        each.process_set_id = None
    _registered.clear()
    global_process_set.ranks = list(range(topology.size()))
    for each in process_sets:
        add_process_set(each)


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a set, and return it. Call it on all ranks, in the same order.

    Raises ValueError if the ranks do not exist or another set has the same ranks, and before `hvd.init()`.

    Example: `first = hvd.add_process_set([0, 1])`.
    """
    made = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    _check_initialized("add_process_set()")
    if made.mpi_comm is not None:
        made.ranks = list(RankSet(made.mpi_comm).ranks)
    ranks, size = made.ranks or [], topology.size()
    if not ranks or len(set(ranks)) < len(ranks) or not 0 <= ranks[0] <= ranks[-1] < size:
        raise InputError(f"{made}: expected different ranks from 0 to {size - 1}")
    for other in (global_process_set, *_registered.values()):
        if other.ranks == ranks:
            raise InputError(f"{made}: there is a process set with these ranks already: {other}")
    made.process_set_id = next(_numbers)
    _registered[made.process_set_id] = made
    return made


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a set. Return False for the global set and for one that is not registered.

    Example: `hvd.remove_process_set(first)`.
    """
    if process_set.process_set_id is None or process_set.process_set_id == 0:
        return False
    removed = _registered.pop(process_set.process_set_id, None) is process_set
    process_set.process_set_id = None
    return removed


def rank_set(process_set: ProcessSet) -> RankSet | None:
    """Return the set for functions of allred; None for the global set. Raises ValueError if it is not registered."""
    if process_set is global_process_set:
        return None
    if not isinstance(process_set, ProcessSet) or process_set.process_set_id is None or process_set.ranks is None:
        raise InputError(
            f"process_set={process_set}: it is not registered; pass it to hvd.init(process_sets=[...]) or to "
            "hvd.add_process_set()"
        )
    return RankSet(process_set.ranks)


def communicator_of(process_set: ProcessSet) -> Communicator:
    """Return the communicator of a set. Raises ValueError if this rank is not in it or the set is not registered."""
    _check_initialized("this call")
    return functions.current(rank_set(process_set))


def _check_initialized(what: str) -> None:
    if not world.is_initialized():
        raise HorovodNotInitializedError(f"{what} needs the ranks: call hvd.init() before")
