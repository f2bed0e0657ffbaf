"""The backend of several nodes: what the ranks of a node have to say is reduced there first, and crosses once.

An allreduce of a chunk, `slices` being the fewest ranks that any node has:

    1  reduce-scatter in the node: each of its first `slices` ranks has one slice of the node's sum
    2  MPI allreduce of each slice, between the ranks that have it on their nodes
    3  allgather in the node

So every rank's link carries one slice of a sum, not all of everybody's data. Sums come in rank order within a node, and
in MPI's order across: the same on all ranks. Numbers that are to travel as narrower ones do so between nodes, where it
counts: the node's sums, formed in full precision, are what is rounded. Everything but allreduce goes through plain MPI.
"""

from typing import Any

import numpy as np
from mpi4py import MPI

from allred import arrays
from allred.arrays import Array
from allred.cluster.topology import number
from allred.comm.backends.mpi import CHUNK_BYTES, MpiCommunicator
from allred.comm.backends.shm import ShmCommunicator, segment_memory
from allred.comm.backends.single import SingleCommunicator
from allred.comm.communicator import Communicator
from allred.comm.ops import ReduceOp
from allred.comm.work import Steps


class NodesCommunicator(MpiCommunicator):
    """All ranks of `comm`, of which `node` joins those of this node. Both become this object's own."""

    name = "shm"

    def __init__(self, comm: MPI.Intracomm, node: Communicator, slices: int, timeout_s: float) -> None:
        super().__init__(comm, timeout_s)
        self._node = node
        self._slices = slices
        across = comm.Split(node.rank if node.rank < slices else MPI.UNDEFINED, self.rank)
        assert isinstance(across, MPI.Intracomm)
        self._across = None if across == MPI.COMM_NULL else MpiCommunicator(across, timeout_s)

    def close(self) -> None:
        if self._across is not None:
            if self.queue.poisoned:
                self._across.queue.poison(self.queue.poisoned)
            self._across.close()
        self._node.close()
        super().close()

    @property
    def sent_bytes(self) -> int:
        return 0 if self._across is None else self._across.sent_bytes

    def _allreduce(self, flat: Array, op: ReduceOp, wire: int = 0) -> Steps[None]:
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
        yield from self._node._reducescatter(whole, mine, counts, inner_op)
        if self._across is not None:
            yield from self._across._allreduce(mine, inner_op, wire)
            self._finish(mine, op, mine)
        sizes = [count * whole.itemsize for count in counts]
        yield from self._node._allgather(arrays.as_bytes(mine), arrays.as_bytes(whole), sizes)


def connect(comm: MPI.Intracomm, timeout_s: float, nodes: list[int]) -> Communicator:
    """The communicator of all ranks of `comm`, which becomes its own; nodes[r] names the node of rank r.

    Ranks of a node that cannot share memory count as nodes of their own, and if no two ranks share memory it is plain
    MPI. Collective and blocking.
    """
    memory, nodes = _share(comm, nodes)
    world = number(nodes, comm.Get_rank())
    if world.nodes == world.size:
        return MpiCommunicator(comm, timeout_s)
    node: Communicator
    if memory is None:
        node = SingleCommunicator(timeout_s)
    else:
        node = ShmCommunicator(world.local_rank, world.local_size, memory, timeout_s)
    if world.nodes == 1:
        comm.Free()
        return node
    slices = min(nodes.count(name) for name in set(nodes))
    return NodesCommunicator(comm, node, slices, timeout_s)


def _share(comm: MPI.Intracomm, nodes: list[int]) -> tuple[Any, list[int]]:
    """The memory of this rank's node, None if it is alone; and the nodes as they are with respect to memory."""
    name = nodes[comm.Get_rank()]
    node = comm.Split(name, comm.Get_rank())
    memory = segment_memory(node) if node.Get_size() > 1 else None
    alone = comm.allgather(memory is None)
    node.Free()
    return memory, [-1 - rank if alone[rank] else nodes[rank] for rank in range(len(nodes))]
