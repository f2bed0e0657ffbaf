"""`HostStaging`: pinned host memory for arrays on a GPU in mode ps, because parameter servers take host arrays only.

    a step: download gradients (the host waits) -> push and pull -> upload parameters (the caller's stream waits)

All copies run on the communication stream. The memory is kept from step to step.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from allred.arrays import Array
from allred.comm import functions
from allred.comm.device_reduce import adopted
from allred.gpu.device_arrays import Adopted, is_device
from allred.gpu.streams import Completion, Device


class HostStaging:
    """The staging memory of one optimizer. Arrays on the host are passed through."""

    def __init__(self) -> None:
        self._memory: dict[tuple[str, int], Array] = {}
        self._uploaded: Completion | None = None  # the event after which upload memory may be overwritten

    @property
    def _device(self) -> Device:
        devices = functions.current().devices
        assert devices is not None  # else there are no device arrays
        return devices.device

    def download(self, values: Sequence[Any]) -> list[Any]:
        """Return host arrays with the values of arrays on the GPU, valid until the next call."""
        there = self._on_gpu(values)
        hosts = [self._pinned("download", i, there[i]) if i in there else value for i, value in enumerate(values)]
        if there:
            lease = self._device.lease([one.stream for one in there.values()])
            with lease.enter():
                flats = {i: one.flat() for i, one in there.items() if one.nbytes}
                for i, flat in flats.items():
                    self._device.to_host(flat.view(np.uint8), hosts[i].reshape(-1).view(np.uint8))
            lease.end((there, flats)).synchronize()
        return hosts

    def host_targets(self, leaves: Sequence[Any]) -> list[Any]:
        """Return host arrays to write into, for `upload`. Arrays that share memory on the GPU share a target."""
        there = self._on_gpu(leaves)
        if self._uploaded is not None:
            self._uploaded.synchronize()
        found, first = list(leaves), dict[int, Array]()
        for i, one in there.items():
            found[i] = self._pinned("upload", i, one)
            if one.nbytes:
                found[i] = first.setdefault(one.array.data.ptr, found[i])
        return found

    def upload(self, leaves: Sequence[Any], targets: Sequence[Any]) -> None:
        """Copy the results of `host_targets` to the arrays on the GPU."""
        there = {i: one for i, one in self._on_gpu(leaves).items() if one.nbytes}
        if not there:
            return
        lease = self._device.lease([one.stream for one in there.values()])
        with lease.enter():
            for i, one in there.items():
                flat = one.flat()
                self._device.to_device(targets[i].reshape(-1).view(np.uint8), flat.view(np.uint8))
                if not one.array.flags.c_contiguous:
                    one.array[...] = flat.reshape(one.shape)
        self._uploaded = lease.end(there)
        self._uploaded.order()

    def _on_gpu(self, values: Sequence[Any]) -> dict[int, Adopted]:
        """Return the arrays on the GPU by index."""
        found = [i for i, value in enumerate(values) if is_device(value)]
        return {i: adopted(values[i], self._device.index) for i in found}

    def _pinned(self, use: str, index: int, like: Adopted) -> Array:
        """Return pinned memory as an array of the shape and dtype of `like`."""
        key = use, index
        if key not in self._memory or self._memory[key].nbytes < like.nbytes:
            self._memory[key] = self._device.pinned(like.nbytes)
        return self._memory[key][: like.nbytes].view(like.dtype).reshape(like.shape)
