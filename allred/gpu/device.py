"""This rank's GPU through cupy: a stream for communication, ordered by events. Nothing here waits for the device.

All that allred asks of cupy for communication is in this file: a stand-in for it serves the tests without a GPU.

    lane = device.lane()           before an operation: what the caller's streams hold now
    with lane.enter(): ...         what is enqueued here comes after that
    end = lane.end(kept)           and this is when it is over; `kept` lives at least as long
"""

import contextlib
import os
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from allred.gpu.kernels import Kernels
from allred.gpu.places import Place, nccl_variables


class End:
    """When something on the communication stream is over."""

    def __init__(self, event: Any, callers: Sequence[Any]) -> None:
        self._event, self._callers = event, callers

    def order(self) -> None:
        """Have what the caller enqueues from now on wait for it; the host does not."""
        import cupy

        for stream in (cupy.cuda.get_current_stream(), *self._callers):
            stream.wait_event(self._event)

    def done(self) -> bool:
        """Whether it is over."""
        return bool(self._event.done)

    def synchronize(self) -> None:
        """Wait for it, on the host."""
        self._event.synchronize()


class Lane:
    """One operation's way over the communication stream."""

    def __init__(self, device: "Device", callers: Sequence[Any]) -> None:
        import cupy

        self._device, self._callers = device, callers
        self._ready = [_recorded(stream) for stream in (cupy.cuda.get_current_stream(), *callers)]

    @contextlib.contextmanager
    def enter(self) -> Iterator[Any]:
        """Enqueue on the communication stream: after what the caller's streams held when the operation was started,
        and hold now, since memory that is allocated here may have been given back by what runs there."""
        import cupy

        stream = self._device.stream
        ready, self._ready = self._ready, []
        for event in (*ready, _recorded(cupy.cuda.get_current_stream())):
            stream.wait_event(event)
        with stream:
            yield stream

    def end(self, kept: Any) -> End:
        """What was enqueued so far, to be waited for; `kept` is not let go before."""
        end = End(_recorded(self._device.stream), self._callers)
        self._device.keep(end, kept)
        return end


class Device:
    """GPU `place.index`, made this thread's current one. One for a process."""

    def __init__(self, place: Place, rank: int) -> None:
        import cupy
        from cupy.cuda import nccl

        cupy.cuda.Device(place.index).use()
        os.environ.update(nccl_variables(place, rank, nccl.get_version(), socket.gethostname()))
        self.xp = cupy
        self.nccl = nccl
        self.kernels = Kernels(cupy)
        self.index = place.index
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self._kept: list[tuple[End, Any]] = []

    def lane(self, handles: Sequence[int | None] = ()) -> Lane:
        """Of an operation that comes after all that these streams, of other frameworks, and cupy's current one hold."""
        import cupy

        others = [cupy.cuda.ExternalStream(handle) for handle in set(handles) if handle is not None]
        return Lane(self, others)

    def communicator(self, size: int, unique_id: Any, rank: int) -> Any:
        """NCCL's; blocks until all ranks are here. In any thread."""
        self.xp.cuda.Device(self.index).use()
        return self.nccl.NcclCommunicator(size, unique_id, rank)

    def pinned(self, count: int) -> Any:
        """Host memory, bytes, that the GPU copies from and to by itself."""
        memory = self.xp.cuda.alloc_pinned_memory(max(count, 1))
        return np.frombuffer(memory, np.uint8, max(count, 1))

    def to_host(self, source: Any, target: Any) -> None:
        """Enqueue a copy of bytes to pinned memory on the current stream."""
        source.get(stream=self.xp.cuda.get_current_stream(), out=target, blocking=False)

    def to_device(self, source: Any, target: Any) -> None:
        """Enqueue a copy of bytes from pinned memory on the current stream."""
        target.set(source, stream=self.xp.cuda.get_current_stream())

    def keep(self, end: End, what: Any) -> None:
        """Hold on to memory until that is over."""
        while self._kept and self._kept[0][0].done():
            self._kept.pop(0)
        self._kept.append((end, what))


def _recorded(stream: Any) -> Any:
    import cupy

    event = cupy.cuda.Event(disable_timing=True)
    event.record(stream)
    return event
