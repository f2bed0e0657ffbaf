"""Fusion buffer on a GPU. A communicator has two: one is packed or unpacked while NCCL reduces the other.

Pack, allreduce and unpack each have a stream, so they overlap for consecutive buckets, also of different operations:

    packing          pack 0 | pack 1      |             | pack 2      | ...
    communication           | allreduce 0 | allreduce 1 | allreduce 2 | ...
    unpacking                             | unpack 0    | unpack 1    | ...

Events order the use of a buffer. They are recorded again for each bucket; `wait_event` waits for the last record made
before the call.
"""

from typing import Any

import numpy as np

from allred.gpu.streams import Device

_MAX_VIEWS = 64


class GpuFusionBuffer:
    """A fusion buffer. packed, reduced, unpacked: events recorded after pack, allreduce and unpack."""

    def __init__(self, device: Device) -> None:
        self.packed, self.reduced, self.unpacked = (device.event() for _ in range(3))
        self._device = device
        self._memory: Any = None  # uint8
        self._views: dict[Any, Any] = {}  # of the memory, by count and dtype; cupy needs 8 us to make one

    def begin(self, count: int, dtype: np.dtype[Any]) -> Any:
        """Return `count` elements for a bucket. The packing stream is current; it waits until the buffer is free."""
        self._device.packing.wait_event(self.unpacked)
        elements = self._views.get((count, dtype))
        if elements is None:
            nbytes = count * dtype.itemsize
            grows = self._memory is None or self._memory.size < nbytes
            if grows or len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            if grows:
                self._memory = None  # the pool may need this memory
                self._memory = self._device.empty(nbytes, np.uint8)
            elements = self._views[count, dtype] = self._memory[:nbytes].view(dtype)
        return elements
