"""`Bootstrap` gives this process its rank, and exchanges bytes between ranks that have no other connection yet.

Communicators are created from it (create.py). MpiBootstrap (backends/mpi_bootstrap.py) uses MPI; RendezvousBootstrap
(launch/rendezvous_bootstrap.py) uses the rendezvous process of tasks without a launcher. All methods are collective;
all except `barrier_of` block.
"""

import abc
import pickle
from collections.abc import Sequence
from typing import Any, TypeVar

from allred.comm.messages import Messages
from allred.comm.work import Steps

T = TypeVar("T")


class Bootstrap(abc.ABC):
    """The Bootstrap of `size` ranks; this process is number `rank`.

    mpi: their mpi4py communicator, for the parts that need MPI: backend mpi, parameter servers, clients; else None.
    launcher_ends_job: whether a launcher ends all ranks when one dies. If not, the watchers report the death; if a rank
    dies before they run, the next call on the other ranks raises AllredError.
    generation: the generation of the world that is created (world.World); 0 before init() has determined it.
    """

    mpi: Any = None
    launcher_ends_job = True
    generation = 0

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    @abc.abstractmethod
    def allgather(self, value: bytes) -> list[bytes]:
        """Return the bytes of all ranks. They come from other processes of the job, which are trusted."""

    @abc.abstractmethod
    def subset(self, ranks: Sequence[int], title: str = "") -> "Bootstrap":
        """Return the Bootstrap of some ranks, in this order. Only these ranks call it. title: as in `barrier_of`."""

    @abc.abstractmethod
    def barrier_of(self, ranks: Sequence[int], title: str) -> Steps[None]:
        """Wait until all of `ranks` have called this; other operations make progress meanwhile. title: the same on all
        of them. Two of these barriers that are under way at once have different titles."""

    def open_messages(self, network: str, timeout_s: float) -> None:  # noqa: B027  (optional)
        """Let communicators that are made of this Bootstrap have messages, until `close`. Collective.

        network, timeout_s: the settings of these names. Raises ConfigError, the same on all ranks.
        """

    def messages(self) -> Messages | None:
        """Return the Messages of a new communicator of these ranks; None if there are none. Collective."""
        return None

    @abc.abstractmethod
    def lowest_rank_on_node(self) -> int:
        """Return the lowest rank on this node."""

    def allgather_object(self, value: T) -> list[T]:
        """Return the pickled objects of all ranks."""
        return [pickle.loads(each) for each in self.allgather(pickle.dumps(value))]

    def broadcast_object(self, value: T, root: int = 0) -> T:
        """Return the object of rank `root`."""
        found: T = pickle.loads(self.allgather(pickle.dumps(value) if self.rank == root else b"")[root])
        return found

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.allgather(b"")

    @abc.abstractmethod
    def close(self) -> None:
        """Release the resources. Collective; do not call it after a member has died."""


class SingleBootstrap(Bootstrap):
    """One rank, without MPI."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    def allgather(self, value: bytes) -> list[bytes]:
        return [value]

    def subset(self, ranks: Sequence[int], title: str = "") -> Bootstrap:
        return self

    def barrier_of(self, ranks: Sequence[int], title: str) -> Steps[None]:
        yield from ()

    def lowest_rank_on_node(self) -> int:
        return 0

    def close(self) -> None:
        """There is nothing to release."""
