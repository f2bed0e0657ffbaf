"""This rank's GPU through cupy: a stream for communication, ordered by events. Nothing here waits for the device.

All that allred asks of cupy for communication is in this file: a stand-in for it serves the tests without a GPU.

    lane = device.lane()           before an operation: what the caller's streams hold now
    made = lane.empty(...)         room for what the caller is given
    with lane.enter(): ...         what is enqueued here comes after that
    end = lane.end(kept)           and this is when it is over; `kept` lives at least as long

cupy's pool hands memory that was given back to whatever next allocates on the stream it was allocated on. So what is
allocated inside `enter` is for the communication stream alone, and a result is the caller's stream's.
"""

import functools
import os
import socket
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from allred.gpu.kernels import Kernels
from allred.gpu.places import Place, nccl_variables

Handle = Callable[[], int]  # of another framework's current stream, now


class End:
    """When something on the communication stream is over."""

    def __init__(self, device: "Device", event: Any, handles: Iterable[Handle]) -> None:
        self._device, self._event, self._handles = device, event, handles

    def order(self) -> None:
        """Have what the caller enqueues from now on wait for it; the host does not."""
        for stream in (self._device.current(), *map(self._device.current, self._handles)):
            stream.wait_event(self._event)

    def done(self) -> bool:
        """Whether it is over."""
        return bool(self._event.done)

    def synchronize(self) -> None:
        """Wait for it, on the host."""
        self._event.synchronize()


class Lane:
    """One operation's way over the communication stream. handles: of the caller's streams; None is cupy's current."""

    def __init__(self, device: "Device", handles: Iterable[Handle | None]) -> None:
        callers = [device.current(handle) for handle in handles] or [device.current()]
        self._device, self._caller = device, callers[0]
        self._handles = [handle for handle in handles if handle is not None]
        self._ready = [device.record(stream) for stream in callers]

    def empty(self, wanted: Iterable[tuple[tuple[int, ...], Any]]) -> list[Any]:
        """Room for results, of these shapes and dtypes."""
        with self._caller:
            made = [self._device.xp.empty(shape, dtype) for shape, dtype in wanted]
        self._ready.append(self._device.record(self._caller))  # it may still be in use there by what gave it back
        return made

    def enter(self) -> Any:
        """The communication stream, to be entered: what is enqueued there comes after what the caller's streams held
        when the operation was started."""
        ready, self._ready = self._ready, []
        for event in ready:
            self._device.stream.wait_event(event)
        return self._device.stream

    def end(self, kept: Any) -> End:
        """What was enqueued so far, to be waited for; `kept` is not let go before."""
        end = End(self._device, self._device.record(self._device.stream), self._handles)
        self._device.keep(end, kept)
        return end


class Device:
    """GPU `place.index`, made this thread's current one. One for a process."""

    def __init__(self, place: Place, rank: int) -> None:
        import cupy
        from cupy.cuda import nccl

        self.xp = cupy
        self.nccl = nccl
        self.index = place.index
        self.use()
        os.environ.update(nccl_variables(place, rank, nccl.get_version(), socket.gethostname()))
        self.kernels = Kernels(cupy)
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self._kept: list[tuple[End, Any]] = []

    def use(self) -> None:
        """Make it the calling thread's current one: CUDA would take the first, and a piece of that one's memory."""
        self.xp.cuda.Device(self.index).use()

    def current(self, handle: Handle | None = None) -> Any:
        """cupy's current stream, or another framework's."""
        return self.xp.cuda.get_current_stream() if handle is None else external(handle())

    def record(self, stream: Any) -> Any:
        """An event: what the stream holds now."""
        event = self.xp.cuda.Event(disable_timing=True)
        event.record(stream)
        return event

    def lane(self, handles: Iterable[Handle | None] = ()) -> Lane:
        """Of an operation that comes after all that these streams hold; None is cupy's current one."""
        return Lane(self, list(dict.fromkeys(handles)))

    def communicator(self, size: int, unique_id: Any, rank: int) -> Any:
        """NCCL's; blocks until all ranks are here. In any thread."""
        self.use()
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


@functools.lru_cache
def external(handle: int) -> Any:
    """Another framework's stream, as cupy has streams."""
    import cupy

    if hasattr(cupy.cuda.Stream, "from_external"):  # cupy 14
        return cupy.cuda.Stream.from_external(_External(handle))
    return cupy.cuda.ExternalStream(handle)


class _External:
    """What CUDA's stream protocol asks for."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle
