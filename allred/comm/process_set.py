"""Process sets: collectives among some of the ranks.

    evens = allred.ProcessSet([0, 2])
    if evens.included():
        mean = allred.allreduce(x, process_set=evens)

A set has a communicator and a backend of its own, on the GPU that init() chose for the rank. They are created at the
first use of the set, which only its members take part in. Sets without a common rank run at the same time. Ranks in
several sets must call these in one order: two ranks with different orders wait for each other, and a warning is shown
after a while.
"""

import dataclasses
import functools
import operator
from collections.abc import Iterable, Sequence
from typing import Any

from allred import world
from allred.cluster import topology
from allred.comm import recording
from allred.comm.bootstrap import Bootstrap
from allred.comm.communicator import Communicator
from allred.comm.create import add_device, create
from allred.comm.select import TransportFacts, plan
from allred.comm.work import Steps, WorkQueue
from allred.config import Config
from allred.errors import InputError


@dataclasses.dataclass
class ProcessSets:
    """The communicators of the process sets of a world, and what they are created from.

    bootstrap: of all ranks of the world; the workers come after `servers` servers. everyone: the communicator of all
    workers. facts: of each worker. config: with the transport of all workers, not auto, if they are on several nodes.
    made: the communicators by ranks, shared by equal sets; and by the keys of `_subgroup`.
    """

    bootstrap: Bootstrap
    servers: int
    everyone: Communicator
    facts: list[TransportFacts]
    config: Config
    made: dict[tuple[Any, ...], Communicator] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.everyone.make_subgroup = functools.partial(self._subgroup, self.everyone)

    def create(self, ranks: tuple[int, ...], title: str, parent: Communicator | None = None) -> Steps[Communicator]:
        """Create a communicator of these ranks. Collective among them. title: describes them. parent: the communicator
        whose operations it runs; None: it has operations of its own."""
        world_ranks = [rank + self.servers for rank in ranks]
        yield from self.bootstrap.barrier_of(world_ranks, title)
        config = dataclasses.replace(self.config, timeout_s=self.everyone.queue.timeout_s)
        communicator, facts = create(
            self.bootstrap.subset(world_ranks, title), [self.facts[rank] for rank in ranks], config
        )
        communicator.queue.members, communicator.ranks = world_ranks, ranks
        communicator.checks_places = self.everyone.checks_places
        communicator.make_subgroup = functools.partial(self._subgroup, communicator)
        world.current().queues.add(communicator.queue)
        recording.attach(communicator, title)
        if (devices := (parent or self.everyone).devices) is not None:
            device = devices.device if parent is not None else devices.device.sibling()
            native, queue = self.config.nccl_16bit == "native", None if parent is None else parent.queue
            add_device(communicator, device, plan(facts, config).device, native, queue)
        return communicator

    def _subgroup(self, parent: Communicator, ranks: Sequence[int]) -> Steps[Communicator]:
        """Return the communicator of the ranks of `parent` that have not joined. It differs from that of a process set
        of the same ranks, which may have other operations under way."""
        key = parent, tuple(ranks)
        if key not in self.made:
            title = f"{ProcessSet(ranks)}, which have not joined, of {list(parent.ranks)}"
            self.made[key] = yield from self.create(tuple(ranks), title, parent)
        return self.made[key]

    def close(self) -> None:
        """Close all communicators except `everyone`. Collective."""
        for communicator in self.made.values():
            communicator.close()
        self.made.clear()


def communicators() -> list[Communicator]:
    """Return the communicators that were created so far."""
    return list(_current().made.values())


class ProcessSet:
    """A subset of the ranks, for the argument `process_set` of collectives and `allred.distributed`.

    ranks: numbers as returned by allred.rank(), in any order; or an mpi4py communicator, whose members are taken. The
    attribute `ranks` is the sorted tuple of numbers. Every rank may create it, member or not; from numbers also before
    allred.init().

    Raises InputError if `ranks` are no ranks, NotInitializedError for a communicator before allred.init().

    >>> ProcessSet([2, 0])
    ProcessSet([0, 2])
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
        """Return the number of ranks in the set."""
        return len(self.ranks)

    def included(self) -> bool:
        """Return whether this rank is in the set."""
        return topology.rank() in self.ranks

    def rank(self) -> int:
        """Return this rank's index in the set, 0 to size() - 1. Raises InputError if it is not in the set."""
        if not self.included():
            raise InputError(f"rank {topology.rank()} is not in {self}; call this only where included() is true")
        return self.ranks.index(topology.rank())

    def communicator(self) -> Communicator:
        """Return the communicator of the members. The first call is collective. Raises InputError on other ranks."""
        self.rank()  # raises
        base = _current()
        if self.ranks[-1] >= len(base.facts):
            raise InputError(f"{self}: there are only {len(base.facts)} ranks; the last one is {len(base.facts) - 1}")
        if len(self.ranks) == len(base.facts):
            return base.everyone
        if self.ranks not in base.made:
            queue = WorkQueue(base.config.timeout_s, members=[rank + base.servers for rank in self.ranks])
            base.made[self.ranks] = queue.start(f"the first use of {self}", base.create(self.ranks, str(self))).wait()
        return base.made[self.ranks]


def dedicated(ranks: Sequence[int], title: str) -> Communicator:
    """Create a communicator of these ranks, in this order, that no process set uses, with operations of its own.
    Collective among them. title: the same on all members, and different from that of other communicators of these
    ranks."""
    base, members = _current(), tuple(ranks)
    queue = WorkQueue(base.config.timeout_s, members=[rank + base.servers for rank in members])
    made = queue.start(f"the creation of {title}", base.create(members, title)).wait()
    base.made[title, members] = made
    return made


def close(communicator: Communicator) -> None:
    """Close a communicator that `dedicated` created. Collective."""
    made = _current().made
    for key in [key for key, each in made.items() if each is communicator]:
        del made[key]
    communicator.close()


PROCESS_SETS = world.Slot[ProcessSets | None](lambda: None)


def _current() -> ProcessSets:
    process_sets = PROCESS_SETS.of(world.current())
    assert process_sets is not None
    return process_sets


def _translated(comm: Any) -> list[int]:
    """Return the numbers of the members of an mpi4py communicator."""
    base = _current()
    if base.bootstrap.mpi is None:
        if base.bootstrap.size > 1:
            raise InputError(f"ProcessSet({comm!r}): this job runs without MPI; pass a list of ranks")
        return [0]
    group = comm.Get_group()
    numbers = group.Translate_ranks(None, base.bootstrap.mpi.Get_group())
    if any(not base.servers <= number < base.servers + len(base.facts) for number in numbers):
        raise InputError(f"ProcessSet({comm!r}): it has members that are not among allred's workers")
    return [number - base.servers for number in numbers]
