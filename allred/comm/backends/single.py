"""Backend single: one rank. Nothing moves; checks, results and errors are those of several ranks."""

import numpy as np

from allred.arrays import Array
from allred.comm.backends.backend import Backend
from allred.comm.ops import ReduceOp
from allred.comm.work import Steps
from allred.compression import narrow, widen


class SingleBackend(Backend):
    """One rank. Every operation completes when it is started."""

    name = "single"
    fuses = True  # there is nothing to copy into a fusion buffer for

    def __init__(self) -> None:
        super().__init__(rank=0, size=1)

    def exchange(self, record: bytes) -> Steps[list[bytes]]:
        yield from ()
        return [record]

    def allreduce(self, flat: Array, op: ReduceOp, wire: int = 0) -> Steps[None]:
        yield from ()
        if wire:  # round as several ranks do
            halves = np.empty(flat.size, np.uint16)
            narrow(flat, halves, wire)
            widen(halves, flat, wire)

    def broadcast(self, data: Array, root: int) -> Steps[None]:
        yield from ()

    def allgather(self, send: Array, recv: Array, counts: list[int]) -> Steps[None]:
        yield from ()
        recv[:] = send

    def alltoall(self, send: Array, recv: Array, counts: Array) -> Steps[None]:
        yield from ()
        recv[:] = send

    def reducescatter(self, flat: Array, out: Array, counts: list[int], op: ReduceOp) -> Steps[None]:
        yield from ()
        out[:] = flat
