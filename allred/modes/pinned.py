"""Arrays on a GPU in mode ps: parameter servers take host arrays, so others in pinned memory stand for them there.

    a step: gradients down, which the host waits for -> push, pull -> parameters up, which the caller's stream waits for

All pass on the communication stream, each at the speed of the GPU's link, in memory that is kept from step to step.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from allred.arrays import Array
from allred.comm import functions
from allred.comm.device_arguments import adopted
from allred.gpu.device_arrays import Adopted, is_device
from allred.gpu.streams import Completion, Device


class Pinned:
    """Of one optimizer. What is on the host already stands for itself."""

    def __init__(self) -> None:
        self._memory: dict[tuple[str, int], Array] = {}
        self._up: Completion | None = None  # when the parameters' memory may be written to again

    @property
    def _device(self) -> Device:
        devices = functions.current().devices
        assert devices is not None  # else there are no device arrays
        return devices.device

    def down(self, values: Sequence[Any]) -> list[Any]:
        """Host arrays with the values of those on the GPU; until the next call."""
        there = self._there(values)
        hosts = [self._of("down", i, there[i]) if i in there else value for i, value in enumerate(values)]
        if there:
            lease = self._device.lease([one.stream for one in there.values()])
            with lease.enter():
                flats = {i: one.flat() for i, one in there.items() if one.nbytes}
                for i, flat in flats.items():
                    self._device.to_host(flat.view(np.uint8), hosts[i].reshape(-1).view(np.uint8))
            lease.end((there, flats)).synchronize()
        return hosts

    def twins(self, leaves: Sequence[Any]) -> list[Any]:
        """Host arrays to write values into that `up` brings to the GPU. Those on the same memory have one together."""
        there = self._there(leaves)
        if self._up is not None:
            self._up.synchronize()
        found, first = list(leaves), dict[int, Array]()
        for i, one in there.items():
            found[i] = self._of("up", i, one)
            if one.nbytes:
                found[i] = first.setdefault(one.array.data.ptr, found[i])
        return found

    def up(self, leaves: Sequence[Any], twins: Sequence[Any]) -> None:
        """Give those on the GPU the values of their twins."""
        there = {i: one for i, one in self._there(leaves).items() if one.nbytes}
        if not there:
            return
        lease = self._device.lease([one.stream for one in there.values()])
        with lease.enter():
            for i, one in there.items():
                flat = one.flat()
                self._device.to_device(twins[i].reshape(-1).view(np.uint8), flat.view(np.uint8))
                if not one.array.flags.c_contiguous:
                    one.array[...] = flat.reshape(one.shape)
        self._up = lease.end(there)
        self._up.order()

    def _there(self, values: Sequence[Any]) -> dict[int, Adopted]:
        """Those on the GPU, by position."""
        found = [i for i, value in enumerate(values) if is_device(value)]
        return {i: adopted(values[i], self._device.index) for i in found}

    def _of(self, way: str, index: int, like: Adopted) -> Array:
        """Pinned memory as an array like one on the GPU."""
        key = way, index
        if key not in self._memory or self._memory[key].nbytes < like.nbytes:
            self._memory[key] = self._device.pinned(like.nbytes)
        return self._memory[key][: like.nbytes].view(like.dtype).reshape(like.shape)
