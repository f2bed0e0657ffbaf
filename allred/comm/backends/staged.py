"""Device arrays through the host: copied to pinned memory, moved as host arrays are, and copied back.

What serves where NCCL cannot cross between nodes (ALLRED_NCCL_CROSS=mpi). Within a node the sums are then shared
memory's, between nodes MPI's, each GPU's whole array passes its PCIe link twice, and the host waits for the first copy.
"""

from typing import Any

import numpy as np

from allred import arrays
from allred.comm.communicator import Communicator
from allred.comm.ops import ReduceOp
from allred.comm.work import Steps, linger
from allred.gpu.device import Device, End, Lane


class Until:
    """The end of something on the GPU, as what a host waits for."""

    peers, moves = False, 0

    def __init__(self, end: End) -> None:
        self._end = end

    def done(self) -> bool:
        return self._end.done()

    def linger(self) -> bool:
        return linger(self.done)


class StagedTransport:
    """Over `host`, which moves host arrays between the same ranks."""

    name = "staged"

    def __init__(self, host: Communicator, device: Device) -> None:
        self._host, self._device = host, device
        self._stages: list[Any] = []  # pinned memory that is free, smallest first

    def ready(self) -> Steps[None]:
        yield from ()

    def close(self, well: bool) -> None:
        if well:
            self._device.stream.synchronize()
        self._stages.clear()

    def allreduce(self, lane: Lane, flat: Any, name: str, op: ReduceOp, wire: str) -> Steps[None]:
        stage = yield from self._down(lane, flat)
        code = arrays.DTYPES.index(wire) if wire else 0
        yield from self._host._allreduce(_typed(stage, flat, name), op, code)
        self._up(lane, stage, flat)

    def broadcast(self, lane: Lane, data: Any, root: int) -> Steps[None]:
        stage = yield from self._down(lane, data)
        yield from self._host._broadcast(stage[: data.nbytes], root)
        self._up(lane, stage, data)

    def allgather(self, lane: Lane, send: Any, recv: Any, counts: list[int]) -> Steps[None]:
        stage = yield from self._down(lane, send)
        back = self._take(recv.nbytes)
        yield from self._host._allgather(stage[: send.nbytes], back[: recv.nbytes], counts)
        self._free(stage)
        self._up(lane, back, recv)

    def alltoall(self, lane: Lane, send: Any, recv: Any, counts: arrays.Array) -> Steps[None]:
        stage = yield from self._down(lane, send)
        back = self._take(recv.nbytes)
        yield from self._host._alltoall(stage[: send.nbytes], back[: recv.nbytes], counts)
        self._free(stage)
        self._up(lane, back, recv)

    def reducescatter(self, lane: Lane, flat: Any, out: Any, name: str, counts: list[int], op: ReduceOp) -> Steps[None]:
        stage = yield from self._down(lane, flat)
        back = self._take(out.nbytes)
        yield from self._host._reducescatter(_typed(stage, flat, name), _typed(back, out, name), counts, op)
        self._free(stage)
        self._up(lane, back, out)

    def _down(self, lane: Lane, source: Any) -> Steps[Any]:
        """The bytes of a contiguous device array in pinned memory, once they are there."""
        stage = self._take(source.nbytes)
        with lane.enter():
            self._device.to_host(source.view(np.uint8), stage[: source.nbytes])
            end = lane.end(source)
        yield Until(end)
        return stage

    def _up(self, lane: Lane, stage: Any, target: Any) -> None:
        """Enqueue the way back. The next use of the stage comes behind it, on the same stream."""
        with lane.enter():
            self._device.to_device(stage[: target.nbytes], target.view(np.uint8))
            lane.end((stage, target))
        self._free(stage)

    def _take(self, nbytes: int) -> Any:
        """Pinned memory of so many bytes or more."""
        fitting = next((stage for stage in self._stages if stage.nbytes >= nbytes), None)
        if fitting is None:
            return self._device.pinned(nbytes)
        self._stages = [stage for stage in self._stages if stage is not fitting]
        return fitting

    def _free(self, stage: Any) -> None:
        self._stages = sorted([*self._stages, stage], key=lambda one: int(one.nbytes))[-2:]


def _typed(stage: Any, like: Any, name: str) -> arrays.Array:
    """Pinned bytes as the host's array of a dtype."""
    found: arrays.Array = stage[: like.nbytes].view(arrays.dtype_of(name))
    return found
