"""Forms communicators: the number of each rank, and an exchange of bytes before the ranks have any other connection.

Shared memory and TCP connections are made from a Bootstrap. MPI is one (backends/mpi_bootstrap.py); the rendezvous of
tasks without a launcher is another (launch/rendezvous_bootstrap.py). Its calls are collective and block.
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
    launcher_ends_job: whether a launcher ends all ranks when one dies. Else the watchers report deaths, and before they
    run the Bootstrap itself: its calls raise RemoteRankError.
    """

    mpi: Any = None
    launcher_ends_job = True

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    @abc.abstractmethod
    def allgather(self, mine: bytes) -> list[bytes]:
        """Return the bytes of all ranks. They come from other processes of the job, which are trusted."""

    @abc.abstractmethod
    def subset(self, ranks: Sequence[int]) -> "Bootstrap":
        """Return the Bootstrap of some ranks, in this order. Collective among them."""

    @abc.abstractmethod
    def assemble(self, ranks: Sequence[int], title: str) -> Steps[None]:
        """Wait until all of `ranks` have called this; other operations make progress meanwhile. title: the same on all
        of them, and different from that of others that they may wait for."""

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
        """Release the resources. Collective."""


class AloneBootstrap(Bootstrap):
    """One rank, without MPI."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    def allgather(self, mine: bytes) -> list[bytes]:
        return [mine]

    def subset(self, ranks: Sequence[int]) -> Bootstrap:
        return self

    def assemble(self, ranks: Sequence[int], title: str) -> Steps[None]:
        yield from ()

    def lowest_rank_here(self) -> int:
        return 0

    def close(self) -> None:
        """There is nothing to release."""
