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
    """A buffer, and the events that end its steps: `packed`, `reduced`, and `free` (unpacked)."""

    def __init__(self, device: Device) -> None:
        self.packed, self.reduced, self.free = (device.event() for _ in range(3))
        self._device = device
        self._memory: Any = None  # uint8

    def begin(self, nbytes: int) -> None:
        """Make the packing stream, which is current, wait until the buffer is free; enlarge the buffer if necessary."""
        self._device.packing.wait_event(self.free)
        if self._memory is None or self._memory.size < nbytes:
            self._memory = None  # the pool may need this memory
            self._memory = self._device.xp.empty(nbytes, np.uint8)

    def view(self, count: int, dtype: np.dtype[Any]) -> Any:
        return self._memory[: count * dtype.itemsize].view(dtype)


class GpuFusionBuffers:
    """The two buffers of a communicator."""

    def __init__(self, device: Device) -> None:
        self._turns = itertools.cycle([GpuFusionBuffer(device), GpuFusionBuffer(device)])

    def next(self) -> GpuFusionBuffer:
        return next(self._turns)
