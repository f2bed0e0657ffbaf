"""Backend mpi: plain mpi4py. The readable reference, and the fallback when no faster backend can be used.

Arrays pass in chunks through staging buffers of the backend: an MPI operation cannot be cancelled, so after a timeout
or Ctrl-C MPI may go on writing, and it must not write into the user's arrays. The buffers are small and kept for the
life of the backend; no count reaches 2**31.

16-bit floats are reduced in float32 and rounded once. Compressed float32 and float64 are sent as 16-bit floats in an
all-to-all; each rank sums its part in rank order, rounds once, and sends the result to all ranks in the same dtype.

Other sums have the order that MPI chooses for a chunk of this size and this number of ranks: the same on all ranks with
both MPIs, and the same from run to run in the tests, which the MPI standard only recommends.
"""

import functools
from typing import Any

import numpy as np
from mpi4py import MPI

from allred import arrays, native
from allred.arrays import Array
from allred.comm import header, ops
from allred.comm.backends.backend import Backend
from allred.comm.backends.mpi_messages import MpiMessages
from allred.comm.ops import ReduceOp, narrow, widen
from allred.comm.work import Polled, Steps

CHUNK_BYTES = 2**20

_OPERATORS: dict[ReduceOp, tuple[MPI.Op, Any]] = {  # of MPI and of numpy
    ReduceOp.AVERAGE: (MPI.SUM, np.add),
    ReduceOp.SUM: (MPI.SUM, np.add),
    ReduceOp.MIN: (MPI.MIN, np.minimum),
    ReduceOp.MAX: (MPI.MAX, np.maximum),
    ReduceOp.PRODUCT: (MPI.PROD, np.multiply),
}


class MpiBackend(Backend):
    """All ranks of the mpi4py communicator `comm`. The backend owns `comm`: no other code may use it."""

    name = "mpi"

    def __init__(self, comm: MPI.Intracomm) -> None:
        super().__init__(comm.Get_rank(), comm.Get_size())
        self._comm, self.messages = comm, MpiMessages(comm)
        self._owned: list[Array] = []  # MPI may read and write their memory at any time
        self._stage = self.allocate(CHUNK_BYTES, np.dtype(np.uint8))
        self._back_stage = self.allocate(CHUNK_BYTES, np.dtype(np.uint8))
        self._records = self.allocate(self.size * header.BYTES, np.dtype(np.uint8))
        self._record = self.allocate(header.BYTES, np.dtype(np.uint8))

    def allocate(self, count: int, dtype: np.dtype[Any]) -> Array:
        array = np.zeros(count, dtype)
        self._owned.append(array)
        return array

    def close(self, sound: bool) -> None:
        if sound:
            self._comm.Free()

    def exchange(self, record: bytes) -> Steps[list[bytes]]:
        self._record[:] = np.frombuffer(record, np.uint8)
        yield Polled(self._comm.Iallgather(self._record, self._records).Test, waits_for_peers=True)
        data = self._records.tobytes()
        return [data[start : start + header.BYTES] for start in range(0, len(data), header.BYTES)]

    def allreduce(self, flat: Array, op: ReduceOp, wire: int = 0) -> Steps[None]:
        if wire:
            yield from self._allreduce_narrow(flat, op, wire)
            return
        moved, chunk = self._moved(flat.dtype)
        mpi_op = self._mpi_op(op, moved)
        for start in range(0, flat.size, chunk):
            part = flat[start : start + chunk]
            is_owned = any(part.base is owned for owned in self._owned)
            stage = part if moved == flat.dtype and is_owned else self._stage.view(moved)[: part.size]
            if stage is not part:
                stage[:] = part
            self.traffic.sent += stage.nbytes
            yield Polled(self._comm.Iallreduce(MPI.IN_PLACE, stage, mpi_op).Test)
            self._finish(stage, op, part)

    def _allreduce_narrow(self, flat: Array, op: ReduceOp, wire: int) -> Steps[None]:
        halves, back = self._stage.view(np.uint16), self._back_stage.view(np.uint16)
        chunk = halves.size // self.size * self.size
        for start in range(0, flat.size, chunk):
            part = flat[start : start + chunk]
            share = -(-part.size // self.size)
            narrow(part, halves[: part.size], wire)
            halves[part.size : self.size * share] = 0
            self.traffic.sent += 2 * part.size
            yield Polled(self._comm.Ialltoall(halves[: self.size * share], back[: self.size * share]).Test)
            rows = list(back[: self.size * share].reshape(self.size, share))
            native.reduce(rows, halves[:share], wire, ops.CODES[op], self.size)
            yield Polled(self._comm.Iallgather(halves[:share], back[: self.size * share]).Test)
            widen(back[: part.size], part, wire)

    def reducescatter(self, flat: Array, out: Array, counts: list[int], op: ReduceOp) -> Steps[None]:
        moved, chunk = self._moved(flat.dtype)
        mpi_op = self._mpi_op(op, moved)
        chunk = max(1, min(chunk // self.size, max(counts)))
        starts = np.cumsum([0, *counts])
        for start in range(0, max(counts), chunk):
            stage = self._stage.view(moved)[: self.size * chunk].reshape(self.size, chunk)
            stage[:] = 0  # the parts may have different lengths
            for rank, count in enumerate(counts):
                part = flat[starts[rank] + start : starts[rank] + min(start + chunk, count)]
                stage[rank, : part.size] = part
            mine = self._back_stage.view(moved)[:chunk]
            yield Polled(self._comm.Ireduce_scatter_block(stage, mine, mpi_op).Test)
            part = out[start : start + chunk]
            self._finish(mine[: part.size], op, part)

    def broadcast(self, data: Array, root: int) -> Steps[None]:
        for start in range(0, data.size, CHUNK_BYTES):
            part = data[start : start + CHUNK_BYTES]
            stage = self._stage[: part.size]
            if self.rank == root:
                stage[:] = part
            yield Polled(self._comm.Ibcast(stage, root).Test)
            if self.rank != root:
                part[:] = stage

    def allgather(self, send: Array, recv: Array, counts: list[int]) -> Steps[None]:
        # One round moves up to `chunk` bytes of every rank.
        chunk = max(1, CHUNK_BYTES // self.size)
        starts = np.cumsum([0, *counts])
        for start in range(0, max(counts), chunk):
            mine = send[start : start + chunk]
            self._stage[: mine.size] = mine
            now = [min(max(count - start, 0), chunk) for count in counts]
            where = [rank * chunk for rank in range(self.size)]
            yield Polled(
                self._comm.Iallgatherv(self._stage[: mine.size], [self._back_stage, now, where, MPI.BYTE]).Test
            )
            for rank, count in enumerate(now):
                to = starts[rank] + start
                recv[to : to + count] = self._back_stage[where[rank] : where[rank] + count]

    def alltoall(self, send: Array, recv: Array, counts: Array) -> Steps[None]:
        # One round moves up to `chunk` bytes between every pair of ranks.
        chunk = max(1, CHUNK_BYTES // self.size)
        to, come = counts[self.rank], counts[:, self.rank]
        send_starts, recv_starts = np.cumsum([0, *to]), np.cumsum([0, *come])
        where = [rank * chunk for rank in range(self.size)]
        for start in range(0, int(counts.max()), chunk):
            out, back = (np.clip(side - start, 0, chunk).tolist() for side in (to, come))
            for rank, count in enumerate(out):
                part = send_starts[rank] + start
                self._stage[where[rank] : where[rank] + count] = send[part : part + count]
            yield Polled(
                self._comm.Ialltoallv(
                    [self._stage, out, where, MPI.BYTE], [self._back_stage, back, where, MPI.BYTE]
                ).Test
            )
            for rank, count in enumerate(back):
                part = recv_starts[rank] + start
                recv[part : part + count] = self._back_stage[where[rank] : where[rank] + count]

    def _moved(self, dtype: np.dtype[Any]) -> tuple[np.dtype[Any], int]:
        """Return the dtype that MPI reduces, and its number of elements in a chunk."""
        moved = np.dtype(np.uint8) if arrays.name_of(dtype) == "bool" else arrays.accumulator(dtype)
        return moved, CHUNK_BYTES // moved.itemsize

    def _finish(self, reduced: Array, op: ReduceOp, target: Array) -> None:
        """Divide if the operation is an average, and store the result in `target`."""
        if op is ReduceOp.AVERAGE:
            numbers = arrays.view_as_real(reduced)
            np.divide(numbers, self.size, out=numbers)
        elif op in (ReduceOp.MIN, ReduceOp.MAX) and arrays.is_inexact(reduced.dtype):
            np.add(reduced, 0.0, out=reduced)  # -0.0 == 0.0: the result must not depend on the order
        self._put(reduced, target)

    def _put(self, reduced: Array, target: Array) -> None:
        if reduced is not target:
            with np.errstate(over="ignore"):  # float32 to float16 may give inf, as float16 arithmetic does
                target[...] = reduced

    def _mpi_op(self, op: ReduceOp, wire: np.dtype[Any]) -> MPI.Op:
        """Return the MPI operator; a numpy one if MPI leaves NaN undefined or Open MPI saturates small integers."""
        small_integer = wire.kind in "iu" and wire.itemsize <= 2
        if not (op in (ReduceOp.MIN, ReduceOp.MAX) and arrays.is_inexact(wire)) and not small_integer:
            return _OPERATORS[op][0]
        return _numpy_op(op, wire)


@functools.cache  # shared by all communicators: mpi4py allows 32 per process
def _numpy_op(op: ReduceOp, wire: np.dtype[Any]) -> MPI.Op:
    function = _OPERATORS[op][1]

    def reduce(incoming: Any, both: Any, _: MPI.Datatype) -> None:
        out = np.frombuffer(both, wire)
        function(np.frombuffer(incoming, wire), out, out=out)

    return MPI.Op.Create(reduce, commute=True)
