"""Backend shm_mpi, of several nodes: ranks of a node reduce in shared memory first; each sum crosses the network once.

An allreduce of a chunk, where `slices` is the smallest number of ranks of any node:

    1  reduce-scatter in the node: each of its first `slices` ranks gets one slice of the node's sum
    2  MPI allreduce of each slice, between the ranks of all nodes that have it
    3  allgather in the node

Each rank's link carries one slice of a sum instead of the data of all ranks. Sums have rank order within a node and the
order of MPI between nodes: the same on all ranks. Compression applies between nodes: the sums of a node have full
precision and are rounded before they are sent. All primitives except allreduce use plain MPI.
"""

import numpy as np
from mpi4py import MPI

from allred import arrays
from allred.arrays import Array
from allred.comm.backends.backend import Backend
from allred.comm.backends.mpi import CHUNK_BYTES, MpiBackend
from allred.comm.ops import ReduceOp
from allred.comm.work import Steps


class ShmMpiBackend(MpiBackend):
    """All ranks of `comm`; `node` connects those of this node. The backend owns both."""

    name = "shm_mpi"

    def __init__(self, comm: MPI.Intracomm, node: Backend, slices: int) -> None:
        super().__init__(comm)
        self._node = node
        self._slices = slices
        across = comm.Split(node.rank if node.rank < slices else MPI.UNDEFINED, self.rank)
        assert isinstance(across, MPI.Intracomm)
        self._across = None if across == MPI.COMM_NULL else MpiBackend(across)
        if self._across is not None:
            self.traffic = self._across.traffic

    def close(self, sound: bool) -> None:
        if self._across is not None:
            self._across.close(sound)
        self._node.close(sound)
        super().close(sound)

    def allreduce(self, flat: Array, op: ReduceOp, wire: int = 0) -> Steps[None]:
        moved = arrays.accumulator(flat.dtype)
        chunk = self._slices * CHUNK_BYTES // moved.itemsize
        inner_op = ReduceOp.SUM if op is ReduceOp.AVERAGE else op
        for start in range(0, flat.size, chunk):
            part = flat[start : start + chunk]
            whole = part if moved == flat.dtype else part.astype(moved)
            yield from self._reduce_chunk(whole, inner_op, op, wire)
            self._put(whole, part)

    def _reduce_chunk(self, whole: Array, inner_op: ReduceOp, op: ReduceOp, wire: int) -> Steps[None]:
        counts = arrays.split_sizes(whole.size, self._slices) + [0] * (self._node.size - self._slices)
        mine = np.empty(counts[self._node.rank], whole.dtype)
        yield from self._node.reducescatter(whole, mine, counts, inner_op)
        if self._across is not None:
            yield from self._across.allreduce(mine, inner_op, wire)
            self._finish(mine, op, mine)
        sizes = [count * whole.itemsize for count in counts]
        yield from self._node.allgather(arrays.as_bytes(mine), arrays.as_bytes(whole), sizes)
