"""Messages over MPI."""

from typing import Any

from mpi4py import MPI

from allred.arrays import Array
from allred.comm.messages import Messages
from allred.comm.work import Pending, Polled, spin_wait

_abandoned: list[Any] = []  # MPI may still use their memory: its operations cannot be cancelled


class MpiMessages(Messages):
    """Messages between the ranks of `comm`, which the caller owns."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        super().__init__(comm.Get_rank(), comm.Get_size())
        self._comm = comm
        self.last_tag = comm.Get_attr(MPI.TAG_UB) or 0

    def send(self, data: Array, peer: int, tag: int, synchronous: bool = False) -> Pending:
        return Polled((self._comm.Issend if synchronous else self._comm.Isend)(data, peer, tag).Test)

    def receive(self, buffer: Array, peer: int, tag: int, waits_for_peers: bool = True) -> "_MpiReceive":
        return _MpiReceive(self._comm.Irecv(buffer, MPI.ANY_SOURCE if peer < 0 else peer, tag), waits_for_peers)

    def close(self, incomplete: list[Any]) -> None:
        _abandoned.extend(incomplete)


class _MpiReceive:
    progress_count = 0
    sender = -1

    def __init__(self, request: MPI.Request, waits_for_peers: bool) -> None:
        self._request, self.waits_for_peers = request, waits_for_peers

    def done(self) -> bool:
        status = MPI.Status()  # the next test of a complete request would clear it
        if self.sender < 0 and self._request.Test(status):
            self.sender = status.Get_source()
        return self.sender >= 0

    def spin_wait(self) -> bool:
        return spin_wait(self.done)
