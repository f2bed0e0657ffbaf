"""A Bootstrap knows the number of each rank, and exchanges bytes before the ranks have any other connection.

Communicators are formed from it. MPI is one (backends/mpi_bootstrap.py); the rendezvous of tasks without a launcher is
another (launch/rendezvous_bootstrap.py). Its calls are collective and block.
"""

import abc
import pickle
from collections.abc import Sequence
from typing import Any, TypeVar

from allred.comm.work import Steps

T = TypeVar("T")


class Bootstrap(abc.ABC):
    """Some ranks, in order: this one is number `rank` of `size`.

    mpi: their mpi4py communicator, for what only MPI does (backend mpi, messages, parameter servers); None without MPI.
    launcher_ends_job: whether a launcher ends all ranks when one dies. If no launcher does, the watchers report deaths.
    Before the watchers run, a call of the Bootstrap raises AllredError.
    generation: of the world that is formed.
    """

    mpi: Any = None
    launcher_ends_job = True
    generation = 0

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    @abc.abstractmethod
    def allgather(self, mine: bytes) -> list[bytes]:
        """Return the bytes of all ranks. They come from other processes of the job, which are trusted."""

    @abc.abstractmethod
    def subset(self, ranks: Sequence[int], title: str = "") -> "Bootstrap":
        """Return the Bootstrap of some ranks, in this order. Collective among them. title: as in `assemble`."""

    @abc.abstractmethod
    def assemble(self, ranks: Sequence[int], title: str) -> Steps[None]:
        """Wait until all of `ranks` have called this; other operations make progress meanwhile. title: the same on all
        of them. No other group of these ranks that is assembled at the same time has this title."""

    @abc.abstractmethod
    def lowest_rank_here(self) -> int:
        """Return the lowest rank on this node."""

    def allgather_object(self, mine: T) -> list[T]:
        """Return the pickled objects of all ranks."""
        return [pickle.loads(each) for each in self.allgather(pickle.dumps(mine))]

    def broadcast_object(self, mine: T, root: int = 0) -> T:
        """Return the object of rank `root`."""
        return self.allgather_object(mine if self.rank == root else None)[root]  # type: ignore[return-value]

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.allgather(b"")

    @abc.abstractmethod
    def close(self) -> None:
        """Release the resources. Collective: only while all members are alive."""


class AloneBootstrap(Bootstrap):
    """One rank, without MPI."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    def allgather(self, mine: bytes) -> list[bytes]:
        return [mine]

    def subset(self, ranks: Sequence[int], title: str = "") -> Bootstrap:
        return self

    def assemble(self, ranks: Sequence[int], title: str) -> Steps[None]:
        yield from ()

    def lowest_rank_here(self) -> int:
        return 0

    def close(self) -> None:
        """There is nothing to release."""
