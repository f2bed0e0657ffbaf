"""Process sets: collectives among some of the ranks.

    evens = allred.ProcessSet([0, 2])
    if evens.included():
        mean = allred.allreduce(x, process_set=evens)

A set has a communicator of its own, with a backend of its own: made at its first use, for which its members wait for
each other, and nobody else. Sets that have no rank in common work at the same time. Of sets that have, each rank in
several calls in one order; if two ranks do not, they wait for each other, and are told of after a while.
"""

import dataclasses
import functools
import operator
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from allred.cluster import topology
from allred.comm import recording
from allred.comm.backends import select
from allred.comm.communicator import Communicator
from allred.comm.work import Steps, WorkQueue
from allred.config import Config
from allred.errors import InputError
from allred.gpu.places import Seen


@dataclasses.dataclass(frozen=True)
class Base:
    """What sets are made from: an mpi4py communicator (None where there is no MPI) that belongs to `control`, in which
    the workers come after so many servers; the communicator of all workers, which may be `control` too; of each worker
    the node, whether it has the C extension, and what GPUs it sees."""

    comm: Any
    control: Communicator
    servers: int
    everyone: Communicator
    nodes: list[int]
    kernels: list[bool]
    seen: list[Seen]
    config: Config


_base: Base | None = None
_made: dict[tuple[Any, ...], Communicator] = {}  # by ranks: equal sets share one; and as `_left` has it


def install(base: Base | None) -> None:
    """The running world; None closes what was made in it. For allred.init and allred.shutdown."""
    global _base
    if base is not None:
        base.everyone.among = functools.partial(_left, tuple(range(len(base.nodes))))
    else:
        for communicator in _made.values():
            communicator.close()
        _made.clear()
        if _base is not None and _base.control is not _base.everyone:
            _base.control.close()
    _base = base


def communicators() -> list[Communicator]:
    """Those that were made so far."""
    return list(_made.values())


class ProcessSet:
    """Some of the ranks, to be given to collectives and to `allred.distributed` as `process_set`.

    ranks: numbers as allred.rank() gives them, in any order; or an mpi4py communicator, of which the members are taken.
    `ranks` is then the sorted tuple of them. It may be made before allred.init() from numbers, and by every rank,
    whether it is in it or not.

    Raises InputError for what are no ranks, NotInitializedError for a communicator before allred.init().
    """

    def __init__(self, ranks: Iterable[int] | Any) -> None:
        if hasattr(ranks, "Get_group"):
            ranks = _translated(ranks)
        try:
            numbers = sorted(operator.index(rank) for rank in ranks)
        except TypeError:
            numbers = []
        if not numbers or numbers[0] < 0 or len(set(numbers)) < len(numbers):
            raise InputError(
                f"ProcessSet({ranks!r}): expected different ranks, such as [0, 2], or an mpi4py communicator"
            )
        self.ranks = tuple(numbers)

    def __repr__(self) -> str:
        return f"ProcessSet({list(self.ranks)})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProcessSet) and self.ranks == other.ranks

    def __hash__(self) -> int:
        return hash(self.ranks)

    def size(self) -> int:
        """How many ranks are in it."""
        return len(self.ranks)

    def included(self) -> bool:
        """Whether this rank is in it."""
        return topology.rank() in self.ranks

    def rank(self) -> int:
        """This rank's number among them, 0 to size() - 1. Raises InputError if it is not in it."""
        if not self.included():
            raise InputError(f"rank {topology.rank()} is not in {self}; call this only where included() is true")
        return self.ranks.index(topology.rank())

    def communicator(self) -> Communicator:
        """That of its members; made at the first call, collective among them. Raises InputError on other ranks."""
        base = _current()
        self.rank()  # raises
        if self.ranks[-1] >= len(base.nodes):
            raise InputError(f"{self}: there are only {len(base.nodes)} ranks; the last one is {len(base.nodes) - 1}")
        if len(self.ranks) == len(base.nodes):
            return base.everyone
        if self.ranks not in _made:
            queue = WorkQueue(base.config.timeout_s, members=[rank + base.servers for rank in self.ranks])
            _made[self.ranks] = queue.start(f"the first use of {self}", _make(base, self.ranks, str(self))).wait()
            _made[self.ranks].among = functools.partial(_left, self.ranks)
        return _made[self.ranks]


def _current() -> Base:
    if _base is None:
        topology.current()  # raises
    assert _base is not None
    return _base


def _translated(comm: Any) -> list[int]:
    """The numbers of a communicator's members."""
    base = _current()
    if base.comm is None:
        return [0]
    group = comm.Get_group()
    numbers = group.Translate_ranks(None, base.comm.Get_group())
    if any(not base.servers <= number < base.servers + len(base.nodes) for number in numbers):
        raise InputError(f"ProcessSet({comm!r}): it has members that are not among allred's workers")
    return [number - base.servers for number in numbers]


def _left(parent: tuple[int, ...], ranks: Sequence[int]) -> Steps[Communicator]:
    """That of those of a communicator's ranks that have not joined: its own, not that of the set that a user may have
    of the same ranks, and on which other operations may be under way."""
    key = parent, tuple(ranks)
    if key not in _made:
        title = f"{ProcessSet(ranks)}, which have not joined, of {list(parent)}"
        _made[key] = yield from _make(_current(), tuple(ranks), title)
    return _made[key]


def _make(base: Base, ranks: tuple[int, ...], title: str) -> Steps[Communicator]:
    """A communicator of these ranks, who all come here."""
    nodes = [base.nodes[rank] for rank in ranks]
    kernels = [base.kernels[rank] for rank in ranks]
    config, world = base.config, [rank + base.servers for rank in ranks]
    name, _ = select.choose(config.backend, nodes, True, kernels)
    yield from _meet(base.comm, world, title)
    comm = base.comm.Create_group(base.comm.Get_group().Incl(world))
    communicator = select.BACKENDS[name](comm, config.timeout_s, nodes)
    communicator.queue.timeout_s = base.everyone.queue.timeout_s
    communicator.queue.members, communicator.ranks = world, ranks
    communicator.checks_places = base.everyone.checks_places
    recording.attach(communicator, title)
    seen = [base.seen[rank] for rank in ranks]
    return select.with_devices(communicator, config, seen, nodes)[0]


def _meet(comm: Any, world: list[int], title: str) -> Steps[None]:
    """Wait until all members are here: what makes a communicator can only be waited for in C, without a limit."""
    from allred.comm.backends.mpi import Request

    tag, mine = zlib.crc32(title.encode()) % 2**15, comm.Get_rank()
    word = np.zeros(1, np.uint8)
    first, *others = world
    if mine != first:
        yield Request(comm.Isend(word, first, tag))
        yield Request(comm.Irecv(word, first, tag), peers=True)
        return
    for other in others:
        yield Request(comm.Irecv(word, other, tag), peers=True)
    for other in others:
        yield Request(comm.Isend(word, other, tag))
