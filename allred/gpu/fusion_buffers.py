"""Two fusion buffers on a GPU: one is packed or unpacked while NCCL reduces the other.

Each step of a bucket has its own stream, so the steps of consecutive buckets overlap, also of different operations:

    packing          pack 0 | pack 1 |          | pack 2 | ...
    communication           | allreduce 0       | allreduce 1 | ...
    unpacking                                   | unpack 0    | unpack 1 ...

The events of a buffer order its steps. An event can be recorded again: who waits for it, waits for the last record.
"""

import itertools
from typing import Any

import numpy as np

from allred.gpu.streams import Device


class GpuFusionBuffer:
    """A buffer, and the events that end its steps: `packed`, `reduced`, and `free` (unpacked). elements: of the current
    bucket."""

    def __init__(self, device: Device) -> None:
        self.packed, self.reduced, self.free = (device.event() for _ in range(3))
        self.elements: Any = None
        self._device = device
        self._memory: Any = None  # uint8
        self._views: dict[Any, Any] = {}  # of the memory, by count and dtype; cupy needs 8 us to make one

    def begin(self, count: int, dtype: np.dtype[Any]) -> None:
        """Begin a bucket. The packing stream, which is current, waits until the buffer is free."""
        self._device.packing.wait_event(self.free)
        self.elements = self._views.get((count, dtype))
        if self.elements is None:
            nbytes = count * dtype.itemsize
            if self._memory is None or self._memory.size < nbytes:
                self._views.clear()
                self._memory = None  # the pool may need this memory
                self._memory = self._device.xp.empty(nbytes, np.uint8)
            self.elements = self._views[count, dtype] = self._memory[:nbytes].view(dtype)


class GpuFusionBuffers:
    """The two buffers of a communicator."""

    def __init__(self, device: Device) -> None:
        self._turns = itertools.cycle([GpuFusionBuffer(device), GpuFusionBuffer(device)])

    def next(self) -> GpuFusionBuffer:
        return next(self._turns)
