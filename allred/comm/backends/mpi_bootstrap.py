"""A Bootstrap that uses MPI: the ranks that a launcher started."""

import zlib
from collections.abc import Sequence

import numpy as np
from mpi4py import MPI

from allred import world
from allred.comm.backends.mpi_messages import MpiMessages
from allred.comm.bootstrap import Bootstrap
from allred.comm.work import Polled, Steps, WorkQueue

_abandoned: list[WorkQueue] = []  # MPI may still use the memory of their operations


class MpiBootstrap(Bootstrap):
    """The Bootstrap of the ranks of `comm`, which it owns."""

    mpi: MPI.Intracomm

    def __init__(self, comm: MPI.Intracomm, launcher_ends_job: bool = True) -> None:
        super().__init__(comm.Get_rank(), comm.Get_size())
        self.mpi, self.launcher_ends_job = comm, launcher_ends_job

    def allgather(self, value: bytes) -> list[bytes]:
        queue = WorkQueue(world.config().timeout_s)
        try:
            return queue.start("an exchange of all ranks", self._allgather(value)).wait()
        except BaseException:
            _abandoned.append(queue)
            raise

    def _allgather(self, value: bytes) -> Steps[list[bytes]]:
        sizes = np.empty(self.size, np.int64)
        yield Polled(self.mpi.Iallgather(np.array([len(value)], np.int64), sizes).Test, waits_for_peers=True)
        whole = np.empty(int(sizes.sum()), np.uint8)
        parts = [whole, sizes.tolist()]
        yield Polled(self.mpi.Iallgatherv(np.frombuffer(value, np.uint8), parts).Test, waits_for_peers=True)
        return [part.tobytes() for part in np.split(whole, np.cumsum(sizes)[:-1])]

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
