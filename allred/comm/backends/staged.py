"""Backend staged: arrays on GPUs through the host: copied to pinned memory, moved by the host backend, copied back.

Used where NCCL cannot connect nodes (ALLRED_NCCL_CROSS=mpi). Sums are formed in shared memory within a node and by MPI
between nodes. Every array crosses the PCIe link of its GPU twice, and the host waits for the first copy.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from allred import arrays
from allred.comm.backends.backend import Backend, DeviceBackend
from allred.comm.ops import ReduceOp
from allred.comm.work import Polled, Steps
from allred.gpu.streams import Device, StreamLease


class StagedBackend(DeviceBackend):
    """Copies through `host`, the host backend of the same ranks."""

    name = "staged"

    def __init__(self, host: Backend, device: Device) -> None:
        super().__init__(device)
        self._host = host
        self._stages: list[Any] = []  # free pinned memory, smallest first

    def count_sent(self, nbytes: int) -> None:
        """The host backend counts them."""

    def close(self, sound: bool) -> None:
        if sound:
            self.device.synchronize()
        self._stages.clear()

    def allreduce(self, lease: StreamLease, pairs: Sequence[tuple[Any, Any]], name: str, op: ReduceOp) -> Steps[None]:
        for source, target in pairs:
            stage = yield from self._down(lease, source)
            yield from self._host.allreduce(_typed(stage, source, name), op)
            self._up(lease, stage, target)

    def broadcast(self, lease: StreamLease, data: Any, root: int) -> Steps[None]:
        stage = yield from self._down(lease, data)
        yield from self._host.broadcast(stage[: data.nbytes], root)
        self._up(lease, stage, data)

    def allgather(self, lease: StreamLease, send: Any, recv: Any, counts: list[int]) -> Steps[None]:
        stage = yield from self._down(lease, send)
        back = self._take(recv.nbytes)
        yield from self._host.allgather(stage[: send.nbytes], back[: recv.nbytes], counts)
        self._free(stage)
        self._up(lease, back, recv)

    def alltoall(self, lease: StreamLease, send: Any, recv: Any, counts: arrays.Array) -> Steps[None]:
        stage = yield from self._down(lease, send)
        back = self._take(recv.nbytes)
        yield from self._host.alltoall(stage[: send.nbytes], back[: recv.nbytes], counts)
        self._free(stage)
        self._up(lease, back, recv)

    def reducescatter(
        self, lease: StreamLease, flat: Any, out: Any, name: str, counts: list[int], op: ReduceOp
    ) -> Steps[None]:
        stage = yield from self._down(lease, flat)
        back = self._take(out.nbytes)
        yield from self._host.reducescatter(_typed(stage, flat, name), _typed(back, out, name), counts, op)
        self._free(stage)
        self._up(lease, back, out)

    def _down(self, lease: StreamLease, source: Any) -> Steps[Any]:
        """Copy a contiguous device array to pinned memory, and wait for the copy. Return the memory."""
        stage = self._take(source.nbytes)
        with lease.enter():
            self.device.to_host(source.view(np.uint8), stage[: source.nbytes])
            end = lease.end(source)
        yield Polled(end.done)
        return stage

    def _up(self, lease: StreamLease, stage: Any, target: Any) -> None:
        """Enqueue the copy back. The next use of the stage is ordered after it, on the same stream."""
        with lease.enter():
            self.device.to_device(stage[: target.nbytes], target.view(np.uint8))
            lease.end((stage, target))
        self._free(stage)

    def _take(self, nbytes: int) -> Any:
        fitting = next((stage for stage in self._stages if stage.nbytes >= nbytes), None)
        if fitting is None:
            return self.device.pinned(nbytes)
        self._stages = [stage for stage in self._stages if stage is not fitting]
        return fitting

    def _free(self, stage: Any) -> None:
        self._stages = sorted([*self._stages, stage], key=lambda one: int(one.nbytes))[-2:]


def _typed(stage: Any, like: Any, name: str) -> arrays.Array:
    found: arrays.Array = stage[: like.nbytes].view(arrays.dtype_of(name))
    return found
