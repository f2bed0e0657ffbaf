"""The interface of a device backend: the primitives of backend.py over flat, contiguous arrays on GPUs.

A communicator may own one next to its host backend; the host backend exchanges the headers of all operations.
"""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from allred.arrays import Array
from allred.comm.backends.nccl_guard import Guard
from allred.comm.ops import ReduceOp
from allred.comm.work import Steps
from allred.gpu.streams import Device, StreamLease


class DeviceBackend(ABC):
    """Moves arrays on GPUs between ranks. A primitive enqueues its work on `lease`, a communication stream.

    A primitive never holds the lease while it waits for the host.
    """

    name: str

    def __init__(self, device: Device, guard: Guard) -> None:
        self.device = device
        self.guard = guard
        self.sent_bytes = 0  # contributed to allreduces so far, in their wire dtype
        self._buffers: dict[Any, Any] = {}  # by dtype

    def ready(self) -> Steps[None]:
        """Connect to the other ranks, if necessary. Collective."""
        yield from ()

    @abstractmethod
    def allreduce(self, lease: StreamLease, flat: Any, name: str, op: ReduceOp, wire: str) -> Steps[None]:
        """Reduce in place. name: the dtype (arrays of bfloat16 are uint16); wire: the 16-bit dtype to send, or ""."""

    @abstractmethod
    def broadcast(self, lease: StreamLease, data: Any, root: int) -> Steps[None]:
        """Copy the root's bytes into `data` on every rank."""

    @abstractmethod
    def allgather(self, lease: StreamLease, send: Any, recv: Any, counts: list[int]) -> Steps[None]:
        """Concatenate the bytes of all ranks in `recv`; counts[r] bytes come from rank r."""

    @abstractmethod
    def alltoall(self, lease: StreamLease, send: Any, recv: Any, counts: Array) -> Steps[None]:
        """Send bytes to each rank in rank order and receive from each; counts[i, j] bytes go from rank i to rank j."""

    @abstractmethod
    def reducescatter(
        self, lease: StreamLease, flat: Any, out: Any, name: str, counts: list[int], op: ReduceOp
    ) -> Steps[None]:
        """Reduce `flat`; rank r receives part r, counts[r] elements, in `out`. name: as in `allreduce`."""

    @abstractmethod
    def _release(self, sound: bool) -> None:
        """Release what the backend holds. sound: every operation is complete."""

    def buffer(self, count: int, dtype: np.dtype[Any]) -> Any:
        """Return the fusion buffer, `count` elements of `dtype`. Only one operation uses it at a time."""
        if dtype not in self._buffers or self._buffers[dtype].size < count:
            self._buffers[dtype] = self.device.xp.zeros(count, dtype)
        return self._buffers[dtype][:count]

    def close(self, poisoned: bool) -> None:
        """Wait until the GPU has finished, unless that cannot happen any more, and release everything. Collective."""
        self._release(self.guard.close() and not poisoned)
        self._buffers.clear()
