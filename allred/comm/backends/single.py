"""The backend of a world of one: nothing moves, everything else (checks, results, errors) is as with many ranks."""

import numpy as np

from allred.arrays import Array
from allred.comm.communicator import Communicator, T
from allred.comm.ops import ReduceOp
from allred.comm.work import Steps, Work
from allred.compression import narrow, widen
from allred.errors import InputError


class SingleCommunicator(Communicator):
    """One rank alone. Every operation is complete when it is started."""

    name = "single"
    fuses = True  # nothing to copy into a buffer for

    def __init__(self, timeout_s: float) -> None:
        super().__init__(rank=0, size=1, timeout_s=timeout_s)

    def _exchange(self, record: bytes) -> Steps[list[bytes]]:
        yield from ()
        return [record]

    def _allreduce(self, flat: Array, op: ReduceOp, wire: int = 0) -> Steps[None]:
        yield from ()
        if wire:  # rounded, as it would be among others
            halves = np.empty(flat.size, np.uint16)
            narrow(flat, halves, wire)
            widen(halves, flat, wire)

    def _broadcast(self, data: Array, root: int) -> Steps[None]:
        yield from ()

    def _allgather(self, send: Array, recv: Array, counts: list[int]) -> Steps[None]:
        yield from ()
        recv[:] = send

    def _alltoall(self, send: Array, recv: Array, counts: Array) -> Steps[None]:
        yield from ()
        recv[:] = send

    def _reducescatter(self, flat: Array, out: Array, counts: list[int], op: ReduceOp) -> Steps[None]:
        yield from ()
        out[:] = flat


class NoCollectives(SingleCommunicator):
    """What a parameter server has, and a client: collectives are the workers' alone."""

    name = "none"

    def __init__(self, timeout_s: float, is_client: bool = False) -> None:
        super().__init__(timeout_s)
        self._is_client = is_client

    def _start(self, kind: str, name: str, body: Steps[T]) -> Work[T]:
        body.close()
        if self._is_client:
            raise InputError(
                f"{kind} was called by a client, and collectives are among the workers. Call it in a function that all "
                "of them run: session.start(function) for each"
            )
        raise InputError(
            f"{kind} was called by a parameter server, and collectives are among the workers. A server goes through "
            "the script up to allred.distributed(...), where it serves: make the optimizer before that call, or make "
            "the call only where allred.rank() < allred.size()"
        )
