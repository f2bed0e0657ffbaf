"""The GPU of this rank through cupy: a stream for communication, ordered by events. No call here blocks the host.

Everything that communication uses of cupy is in this file, so tests without a GPU replace only this.

    lease = device.lease()           before an operation: records the current position of the caller's streams
    out = lease.empty(...)           allocates results
    with lease.enter(): ...          enqueues on the communication stream, after these positions
    end = lease.end(kept)            completion of this work; keeps `kept` alive until then

cupy's pool reuses freed memory for the next allocation on the same stream. So memory that is allocated inside `enter`
may be used on the communication stream only, and results are allocated on the caller's stream.
"""

import functools
import os
import socket
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from allred.gpu.binding import GpuBinding, nccl_variables
from allred.gpu.kernels import Kernels

StreamHandle = Callable[[], int]  # returns the CUDA handle of a framework's current stream


class Completion:
    """Completion of work on the communication stream."""

    def __init__(self, device: "Device", event: Any, handles: Iterable[StreamHandle]) -> None:
        self._device, self._event, self._handles = device, event, handles

    def order(self) -> None:
        for stream in (self._device.current(), *map(self._device.current, self._handles)):
            stream.wait_event(self._event)

    def done(self) -> bool:
        return bool(self._event.done)

    def synchronize(self) -> None:
        self._event.synchronize()


class StreamLease:
    """Use of the communication stream by one operation. handles: of the caller's streams; None stands for cupy's
    current stream."""

    def __init__(self, device: "Device", handles: Iterable[StreamHandle | None]) -> None:
        callers = [device.current(handle) for handle in handles] or [device.current()]
        self._device, self._caller = device, callers[0]
        self._handles = [handle for handle in handles if handle is not None]
        self._ready = [device.record(stream) for stream in callers]

    def empty(self, wanted: Iterable[tuple[tuple[int, ...], Any]]) -> list[Any]:
        """Allocate results with these shapes and dtypes on the caller's stream."""
        with self._caller:
            made = [self._device.xp.empty(shape, dtype) for shape, dtype in wanted]
        self._ready.append(self._device.record(self._caller))  # earlier work there may still use the recycled memory
        return made

    def enter(self) -> Any:
        """Communication stream as a context manager, ordered after the positions recorded on the caller's streams."""
        ready, self._ready = self._ready, []
        for event in ready:
            self._device.stream.wait_event(event)
        return self._device.stream

    def end(self, kept: Any) -> Completion:
        """Completion of everything enqueued so far. `kept` stays alive until then."""
        end = Completion(self._device, self._device.record(self._device.stream), self._handles)
        self._device.keep(end, kept)
        return end


class Device:
    """GPU `binding.index`, made current in the calling thread. One object per process."""

    def __init__(self, binding: GpuBinding, rank: int) -> None:
        import cupy
        from cupy.cuda import nccl

        self.xp = cupy
        self.nccl = nccl
        self.index = binding.index
        self.use()
        os.environ.update(nccl_variables(binding, rank, nccl.get_version(), socket.gethostname()))
        self.kernels = Kernels(cupy)
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self._kept: list[tuple[Completion, Any]] = []

    def use(self) -> None:
        """Make this GPU current in the calling thread. By default CUDA would use GPU 0 and allocate memory on it."""
        self.xp.cuda.Device(self.index).use()

    def current(self, handle: StreamHandle | None = None) -> Any:
        """cupy's current stream, or another framework's."""
        return self.xp.cuda.get_current_stream() if handle is None else external_stream(handle())

    def record(self, stream: Any) -> Any:
        event = self.xp.cuda.Event(disable_timing=True)
        event.record(stream)
        return event

    def lease(self, handles: Iterable[StreamHandle | None] = ()) -> StreamLease:
        """Lease for an operation that follows the work on these streams; None is cupy's current stream."""
        return StreamLease(self, list(dict.fromkeys(handles)))

    def communicator(self, size: int, unique_id: Any, rank: int) -> Any:
        """NCCL communicator. Blocks until all ranks have called it; any thread may call it."""
        self.use()
        return self.nccl.NcclCommunicator(size, unique_id, rank)

    def pinned(self, count: int) -> Any:
        memory = self.xp.cuda.alloc_pinned_memory(max(count, 1))
        return np.frombuffer(memory, np.uint8, max(count, 1))

    def to_host(self, source: Any, target: Any) -> None:
        """Enqueue a copy of bytes from the GPU to pinned memory on the current stream."""
        source.get(stream=self.xp.cuda.get_current_stream(), out=target, blocking=False)

    def to_device(self, source: Any, target: Any) -> None:
        """Enqueue a copy of bytes from pinned memory to the GPU on the current stream."""
        target.set(source, stream=self.xp.cuda.get_current_stream())

    def keep(self, end: Completion, what: Any) -> None:
        while self._kept and self._kept[0][0].done():
            self._kept.pop(0)
        self._kept.append((end, what))


@functools.lru_cache
def external_stream(handle: int) -> Any:
    """cupy stream object for another framework's CUDA stream."""
    import cupy

    if hasattr(cupy.cuda.Stream, "from_external"):  # cupy 14
        return cupy.cuda.Stream.from_external(_CudaStream(handle))
    return cupy.cuda.ExternalStream(handle)


class _CudaStream:
    """Object with CUDA's stream protocol."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle
