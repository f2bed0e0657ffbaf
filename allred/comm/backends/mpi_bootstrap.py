"""A Bootstrap that uses MPI: the ranks that a launcher started."""

import zlib
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from mpi4py import MPI

from allred.comm.backends.mpi_messages import MpiMessages
from allred.comm.bootstrap import Bootstrap
from allred.comm.work import Polled, Steps

T = TypeVar("T")


class MpiBootstrap(Bootstrap):
    """The Bootstrap of the ranks of `comm`, which it owns."""

    mpi: MPI.Intracomm

    def __init__(self, comm: MPI.Intracomm, launcher_ends_job: bool = True) -> None:
        super().__init__(comm.Get_rank(), comm.Get_size())
        self.mpi, self.launcher_ends_job = comm, launcher_ends_job

    def allgather(self, value: bytes) -> list[bytes]:
        return self.mpi.allgather(value)

    def allgather_object(self, value: T) -> list[T]:
        return self.mpi.allgather(value)

    def broadcast_object(self, value: T, root: int = 0) -> T:
        return self.mpi.bcast(value, root)  # type: ignore[no-any-return]

    def subset(self, ranks: Sequence[int], title: str = "") -> "MpiBootstrap":
        everyone = self.mpi.Get_group()
        members = everyone.Incl(list(ranks))
        comm = self.mpi.Create_group(members, _tag(title))
        everyone.Free()
        members.Free()
        assert isinstance(comm, MPI.Intracomm)
        made = MpiBootstrap(comm, self.launcher_ends_job)
        made.generation = self.generation
        return made

    def barrier_of(self, ranks: Sequence[int], title: str) -> Steps[None]:
        # MPI_Comm_create_group alone would wait in C, without a time limit.
        tag, byte = _tag(title), np.zeros(1, np.uint8)
        root, *others = ranks
        if self.rank != root:
            yield Polled(self.mpi.Isend(byte, root, tag).Test)
            yield Polled(self.mpi.Irecv(byte, root, tag).Test, waits_for_peers=True)
            return
        for other in others:
            yield Polled(self.mpi.Irecv(byte, other, tag).Test, waits_for_peers=True)
        for other in others:
            yield Polled(self.mpi.Isend(byte, other, tag).Test)

    def messages(self) -> MpiMessages:
        return MpiMessages(self.mpi)

    def lowest_rank_on_node(self) -> int:
        node = self.mpi.Split_type(MPI.COMM_TYPE_SHARED)  # MPI has no nonblocking form of it
        lowest = node.allreduce(self.rank, op=MPI.MIN)
        node.Free()
        return int(lowest)

    def close(self) -> None:
        self.mpi.Free()


def _tag(title: str) -> int:
    return zlib.crc32(title.encode()) % 2**15
