"""Horovod's process sets: sets of ranks with an id, which `init` or `add_process_set` gives them."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from allred import world
from allred.cluster import topology
from allred.comm import functions
from allred.comm.communicator import Communicator
from allred.comm.process_set import ProcessSet as RankSet
from allred.errors import InputError, MismatchError
from allred.horovod import handles
from allred.horovod.horovod_errors import HorovodNotInitializedError, as_horovod_error
from allred.watch import exit_callbacks


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
    mpi_comm: Any = None
    _ranks: list[int] | None = None

    def __init__(self, ranks_or_comm: Iterable[int] | Any) -> None:
        if hasattr(ranks_or_comm, "Get_group"):
            self.mpi_comm = ranks_or_comm
            return
        ranks: list[Any] = list(ranks_or_comm) if isinstance(ranks_or_comm, Iterable) else [None]
        if not all(isinstance(rank, int) for rank in ranks):
            raise InputError(f"ProcessSet({ranks_or_comm!r}): expected a list of ranks, or an mpi4py communicator")
        self.ranks = sorted(ranks)

    @property
    def ranks(self) -> list[int] | None:
        if self is global_process_set:
            return list(range(topology.size())) if world.is_initialized() else []
        return self._ranks

    @ranks.setter
    def ranks(self, ranks: list[int] | None) -> None:
        self._ranks = ranks

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
_in_use = False  # by the current world


def _leave_world(_: BaseException | None) -> None:
    """Forget the handles and process sets of a world that ends."""
    global _in_use
    _in_use = False
    handles.forget_all()
    for each in _registered.values():
        each.process_set_id = None
    _registered.clear()


def register(process_sets: Sequence[ProcessSet]) -> None:
    """Register the sets that `init` got, except those that are. Raises ValueError if two have the same ranks."""
    for each in process_sets:
        if each.process_set_id is None:
            add_process_set(each)


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a set, and return it. Collective over all ranks, which pass the same ranks. Communicators may differ, as
    the results of MPI's Split do; all of them are registered.

    Raises ValueError, on all ranks, if the ranks do not exist, differ, or are those of another set; ValueError before
    `hvd.init()`.

    Example: `first = hvd.add_process_set([0, 1])`.
    """
    check_initialized("add_process_set()")
    made = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if made.mpi_comm is not None:
        made.ranks = list(RankSet(made.mpi_comm).ranks)
    mine = made.ranks or [], made.mpi_comm is not None
    with as_horovod_error():
        everyone = functions.allgather_object((*mine, _problem(made)), name="add_process_set")
        if problem := next((f"rank {rank}: {text}" for rank, (*_, text) in enumerate(everyone) if text), ""):
            raise InputError(problem)
        sets = sorted({tuple(ranks) for ranks, *_ in everyone})
        if len(sets) > 1 and not all(of_comm for _, of_comm, _ in everyone):
            raise MismatchError(f"add_process_set(): the ranks passed different sets, {', '.join(map(str, sets))}")
    for ranks in sets:
        each = made if list(ranks) == made.ranks else ProcessSet(ranks)
        each.process_set_id = next(_numbers)
        _registered[each.process_set_id] = each
    return made


def _problem(made: ProcessSet) -> str:
    """Return why a set cannot be registered, or ""."""
    ranks, size = made.ranks or [], topology.size()
    if not ranks or len(set(ranks)) < len(ranks) or not 0 <= ranks[0] <= ranks[-1] < size:
        return f"{made}: expected different ranks from 0 to {size - 1}"
    for other in (global_process_set, *_registered.values()):
        if other.ranks == ranks:
            return f"{made}: there is a process set with these ranks already: {other}"
    return ""


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a set. Return False for the global set and for one that is not registered.

    Example: `hvd.remove_process_set(first)`.
    """
    if process_set.process_set_id is None or process_set.process_set_id == 0:
        return False
    removed = _registered.pop(process_set.process_set_id, None) is process_set
    process_set.process_set_id = None
    return removed


def process_set_of(process_set_id: int) -> ProcessSet:
    """Return the registered set with this id. Raises ValueError if there is none."""
    found = global_process_set if process_set_id == 0 else _registered.get(process_set_id)
    if found is None:
        raise InputError(f"process_set_id={process_set_id}: there is no process set with this id")
    return found


def rank_set(process_set: ProcessSet | RankSet) -> RankSet | None:
    """Return the set for functions of allred; None for the global set. Raises ValueError if it is not registered."""
    if process_set is global_process_set:
        return None
    if isinstance(process_set, RankSet):
        return process_set
    if not isinstance(process_set, ProcessSet) or _registered.get(process_set.process_set_id or 0) is not process_set:
        raise InputError(
            f"process_set={process_set}: expected a registered hvd.ProcessSet; pass it to hvd.init(process_sets=[...]) "
            "or to hvd.add_process_set() before"
        )
    return RankSet(process_set.ranks or [])


def communicator_of(process_set: ProcessSet | RankSet) -> Communicator:
    """Return the communicator of a set. Raises ValueError if this rank is not in it or the set is not registered."""
    check_initialized("this call")
    return functions.current(rank_set(process_set))


def check_initialized(what: str) -> None:
    """Raise ValueError before `hvd.init()`. `allred.init()` and `init_process_group("allred")` may replace it.

    what: the call.
    """
    global _in_use
    if not world.is_initialized():
        raise HorovodNotInitializedError(f"{what}: call hvd.init() first")
    if not _in_use:
        _in_use = True
        exit_callbacks.register(_leave_world)
