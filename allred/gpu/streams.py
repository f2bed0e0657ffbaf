"""The GPU of this rank: its binding, and through cupy the communication streams, ordered by events.

A rank is bound to the first GPU it sees that no lower rank of its node uses: GPU `local_rank` if all ranks see the same
GPUs, or the only GPU it sees (`srun --gpus-per-task=1`). The driver (libcuda) lists the GPUs, because importing cupy
takes a second.

Everything that communication uses of cupy is in class Device, so tests without a GPU replace only this. Each
communicator has a Device of its own, and so three streams and tables for the kernels, all on the GPU that was chosen in
init(). No call here blocks the host, except `synchronize`.

    communication stream    NCCL, and all work of operations without buckets
    packing stream          the kernels that pack buckets
    unpacking stream        the kernels that unpack buckets

A new thread uses GPU 0, and cupy has a current stream for each thread and GPU. So each thread makes the GPU current
before it takes a stream.

    lease = device.lease()           before an operation: records the current position of the caller's streams
    out = lease.empty(...)           allocates results
    with lease.enter(): ...          enqueues on the communication stream, after these positions
    with lease.enter(stream): ...    as before, on another of the three streams
    end = lease.end(kept)            completion of this work; keeps `kept` alive until then

`enter` also orders the stream after the ends of earlier operations on the other streams, because two operations may use
the same array, unless the lease is `independent`. Within an operation, its code orders the streams.

cupy's pool reuses freed memory for the next allocation on the same stream. So results are allocated on the caller's
stream. Memory that was allocated on one of the three streams may be used on another if the first one waits for this use
before the memory is freed, or if `end` keeps the memory until then.
"""

import copy
import ctypes
import dataclasses
import functools
import importlib.util
import os
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from allred.errors import InputError
from allred.gpu.kernels import Kernels
from allred.gpu.launch_order import LaunchOrder
from allred.wording import count

_UUID_BYTES = 16
_NOT_READY = 600  # cudaErrorNotReady
_HIGH_PRIORITY = -100  # CUDA replaces it by the highest priority of the GPU
_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


@dataclasses.dataclass(frozen=True)
class VisibleGpus:
    """GPUs that a rank sees.

    Arguments:
        devices: UUID of each GPU, in CUDA's order.
        cupy: whether cupy is installed.
    """

    devices: tuple[str, ...] = ()
    cupy: bool = False


NO_GPUS = VisibleGpus()


@dataclasses.dataclass(frozen=True)
class GpuBinding:
    """GPU of a rank: its CUDA index, and the number of ranks on this node that share it."""

    index: int
    sharing: int = 1


def visible_gpus() -> VisibleGpus:
    cupy = importlib.util.find_spec("cupy") is not None
    return VisibleGpus(_uuids(), cupy) if cupy else NO_GPUS


def _driver() -> Any:
    """The library of the CUDA driver; None if there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _uuids() -> tuple[str, ...]:
    cuda, count = _driver(), ctypes.c_int()
    if cuda is None or cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return ()
    # The older function returns the UUID of the whole GPU for each of its MIG instances.
    get_uuid = getattr(cuda, "cuDeviceGetUuid_v2", None) or cuda.cuDeviceGetUuid
    found = []
    for index in range(count.value):
        uuid = (ctypes.c_ubyte * _UUID_BYTES)()
        if get_uuid(uuid, ctypes.c_int(index)):
            return ()
        found.append(bytes(uuid).hex())
    return tuple(found)


def binding_error(seen: Sequence[VisibleGpus], nodes: Sequence[int], oversubscribe: bool) -> str:
    """Error text if the ranks cannot be bound to a GPU each, else "". seen, nodes: of each rank. oversubscribe: whether
    ranks may share a GPU."""
    for rank, one in enumerate(seen):
        if not one.cupy:
            return f"cupy is not installed on rank {rank}; pip install cupy-cuda12x, or the one for your CUDA"
        if not one.devices:
            return f"rank {rank} sees no GPU; check CUDA_VISIBLE_DEVICES and nvidia-smi on its host"
    for node in dict.fromkeys(nodes):
        here = [rank for rank, name in enumerate(nodes) if name == node]
        devices = {device for rank in here for device in seen[rank].devices}
        if not oversubscribe and any(one.sharing > 1 for one in _bind_node([seen[rank] for rank in here])):
            return (
                f"{len(here)} ranks (rank {here[0]} and others) share a node with {count(len(devices), 'GPU')}; "
                f"start one rank per GPU, or set ALLRED_GPU_OVERSUBSCRIBE=1 to let ranks "
                "share a GPU, which is slow and meant for tests"
            )
    return ""


def bind(seen: Sequence[VisibleGpus], nodes: Sequence[int], rank: int) -> GpuBinding:
    """GPU of a rank, if `binding_error` returned "".

    >>> two = VisibleGpus(("GPU-a", "GPU-b"), cupy=True)
    >>> [bind([two, two], [0, 0], rank).index for rank in range(2)]
    [0, 1]
    >>> [bind([VisibleGpus(("GPU-a",), True), VisibleGpus(("GPU-b",), True)], [0, 0], rank).index for rank in range(2)]
    [0, 0]
    """
    here = [other for other, name in enumerate(nodes) if name == nodes[rank]]
    return _bind_node([seen[other] for other in here])[here.index(rank)]


def _bind_node(seen: Sequence[VisibleGpus]) -> list[GpuBinding]:
    """Bindings of the ranks of one node, in rank order; round robin if there are fewer GPUs than ranks."""
    users: dict[str, int] = {}
    chosen = []
    for one in seen:
        device = min(one.devices, key=lambda name: users.get(name, 0))  # the first GPU with the fewest ranks
        users[device] = users.get(device, 0) + 1
        chosen.append((one.devices.index(device), device))
    return [GpuBinding(index, users[device]) for index, device in chosen]


def nccl_variables(binding: GpuBinding, rank: int, version: int, host: str) -> dict[str, str]:
    """Environment variables that let NCCL run several ranks on one GPU; none if each rank has its own GPU.

    NCCL 2.30 and later have a variable for it. Earlier versions refuse two ranks with one GPU on one host; with
    different host identifiers they communicate through sockets.

    >>> nccl_variables(GpuBinding(0, sharing=2), 1, 22907, "node7")
    {'NCCL_HOSTID': 'node7-1'}
    """
    if binding.sharing == 1:
        return {}
    return {"NCCL_MULTI_RANK_GPU_ENABLE": "1"} if version >= 23000 else {"NCCL_HOSTID": f"{host}-{rank}"}


StreamHandle = Callable[[], int]  # returns the CUDA handle of a framework's current stream


class Completion:
    """Completion of work on one of the three streams. Each call releases what completed work has kept alive."""

    def __init__(self, device: "Device", event: Any, handles: Iterable[StreamHandle]) -> None:
        self._device, self._handles = device, handles
        self.event = event

    def order_callers(self) -> None:
        """Make the callers' streams wait for the work."""
        for stream in (self._device.current(), *map(self._device.current, self._handles)):
            stream.wait_event(self.event)
        self._device.release()

    def done(self) -> bool:
        """Raises the error of CUDA, if it has one."""
        done = self._device.is_complete(self.event)
        if done:
            self._device.release()
        return done

    def synchronize(self) -> None:
        self.event.synchronize()
        self._device.release()


class StreamLease:
    """Use of the streams of a Device by one operation.

    Arguments:
        handles: of the caller's streams; None stands for cupy's current stream.
        independent: no unfinished operation uses these arrays, so there is no need to wait for other operations.
    """

    def __init__(self, device: "Device", handles: Iterable[StreamHandle | None], independent: bool = False) -> None:
        callers = [device.current(handle) for handle in handles] or [device.current()]
        if any(stream.is_capturing() for stream in callers):
            raise InputError(
                "the current stream captures a CUDA graph, which cannot contain operations of allred, because ranks "
                "compare headers on the host; call it before or after the capture"
            )
        self._device, self._caller, self._independent = device, callers[0], independent
        self._handles = [handle for handle in handles if handle is not None]
        self._ready = [device.record(stream) for stream in callers]
        self._waited_for: dict[int, int] = {}  # for each stream: the number of `_ready` events it already waits for

    def empty(self, wanted: Iterable[tuple[tuple[int, ...], Any]]) -> list[Any]:
        """Allocate results with these shapes and dtypes on the caller's stream."""
        self._device.use()
        with self._caller:
            made = [self._device.empty(shape, dtype) for shape, dtype in wanted]
        self._ready.append(self._device.record(self._caller))  # earlier work there may still use the recycled memory
        return made

    def enter(self, stream: Any = None) -> Any:
        """As `order`, as a context manager that makes the stream current. Default: the communication stream."""
        return self.order(stream or self._device.communication)

    def order(self, stream: Any) -> Any:
        """Order one of the three streams after the positions recorded on the caller's streams. Returns the stream."""
        self._device.use()
        for event in self._ready[self._waited_for.get(stream.ptr, 0) :]:
            stream.wait_event(event)
        self._waited_for[stream.ptr] = len(self._ready)
        if not self._independent:
            self._device.follow_operations(stream)
        return stream

    def end(self, kept: Any, stream: Any = None) -> Completion:
        """Completion of everything enqueued so far on one of the streams, by default the communication stream. `kept`
        stays alive until then."""
        stream = stream or self._device.communication
        end = Completion(self._device, self._device.record(stream), self._handles)
        self._device.record_end(stream, end.event)
        self._device.keep(end.event, kept)
        return end


class Device:
    """GPU `binding.index`, made current in the calling thread, with the streams of one communicator.

    launches: the launch order of the operations of all communicators.
    """

    def __init__(self, binding: GpuBinding, rank: int) -> None:
        import cupy
        from cupy.cuda import nccl

        self.xp = cupy
        self.nccl = nccl
        self.index = binding.index
        self._gpu = cupy.cuda.Device(binding.index)
        self.use()
        os.environ.update(nccl_variables(binding, rank, nccl.get_version(), socket.gethostname()))
        self.launches = LaunchOrder()
        self._add_streams()
        self.kernels.compile()  # in an operation an error would be this rank's alone

    def _add_streams(self) -> None:
        self.kernels, self.unpack_kernels = Kernels(self.xp), Kernels(self.xp)  # a table is used on one stream only
        self.communication, self.packing, self.unpacking = (
            self.xp.cuda.Stream(non_blocking=True, priority=_HIGH_PRIORITY) for _ in range(3)
        )
        # For each stream: the last operation's event of every other stream that it does not wait for yet.
        self._unseen_ends: dict[int, dict[int, Any]] = {each.ptr: {} for each in self.streams}
        self._kept: deque[tuple[Any, Any]] = deque()  # oldest first: (event, what is in use until then)
        self._lock = threading.Lock()  # of `_kept`: the thread of the guard releases too

    @property
    def streams(self) -> tuple[Any, Any, Any]:
        return self.communication, self.packing, self.unpacking

    def sibling(self) -> "Device":
        """Return the same GPU for another communicator, with streams and kernel tables of its own."""
        self.use()
        made = copy.copy(self)
        made._add_streams()
        return made

    def record_end(self, stream: Any, event: Any) -> None:
        """Record the end of an operation on a stream, for `follow_operations`."""
        for ptr, ends in self._unseen_ends.items():
            if ptr != stream.ptr:
                ends[stream.ptr] = event

    def follow_operations(self, stream: Any) -> None:
        """Order a stream after the operations that were enqueued on the other streams."""
        ends = self._unseen_ends[stream.ptr]
        while ends:
            stream.wait_event(ends.popitem()[1])

    def synchronize(self) -> None:
        """Wait for the streams."""
        for stream in self.streams:
            stream.synchronize()

    def use(self) -> None:
        """Make this GPU current in the calling thread. By default CUDA would use GPU 0 and allocate memory on it."""
        self._gpu.use()

    def use_in_watching_thread(self) -> None:
        """As `use`, in a thread that queries events at any time. While another thread captures a CUDA graph, as torch
        does by default, a query in a thread of the default mode is an error, and ends the capture."""
        self.use()
        if (cuda := _driver()) is not None:
            cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_THREAD_LOCAL)))

    def current(self, handle: StreamHandle | None = None) -> Any:
        """cupy's current stream, or another framework's."""
        self.use()
        return self.xp.cuda.get_current_stream() if handle is None else external_stream(handle())

    def event(self) -> Any:
        self.use()
        return self.xp.cuda.Event(disable_timing=True)

    def record(self, stream: Any) -> Any:
        event = self.event()
        event.record(stream)
        return event

    def lease(self, handles: Iterable[StreamHandle | None] = (), independent: bool = False) -> StreamLease:
        """Lease for an operation that follows the work on these streams; None is cupy's current stream."""
        return StreamLease(self, list(dict.fromkeys(handles)), independent)

    def communicator(self, size: int, unique_id: Any, rank: int) -> Any:
        """NCCL communicator. Blocks until all ranks have called it; any thread may call it."""
        self.use()
        return self.nccl.NcclCommunicator(size, unique_id, rank)

    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> Any:
        """Allocate an array on the current stream. If the GPU has no memory left, torch first returns the memory that
        its allocator keeps for new tensors."""
        try:
            return self.xp.empty(shape, dtype)
        except MemoryError:
            if (torch := sys.modules.get("torch")) is None or not torch.cuda.is_initialized():
                raise
            torch.cuda.empty_cache()
        return self.xp.empty(shape, dtype)

    def pinned(self, count: int) -> Any:
        memory = self.xp.cuda.alloc_pinned_memory(max(count, 1))
        return np.frombuffer(memory, np.uint8, max(count, 1))

    def to_host(self, source: Any, target: Any) -> None:
        """Enqueue a copy of bytes from the GPU to pinned memory on the current stream."""
        source.get(stream=self.xp.cuda.get_current_stream(), out=target, blocking=False)

    def to_device(self, source: Any, target: Any) -> None:
        """Enqueue a copy of bytes from pinned memory to the GPU on the current stream."""
        target.set(source, stream=self.xp.cuda.get_current_stream())

    def is_complete(self, event: Any) -> bool:
        """Whether the GPU has reached an event. Raises CUDARuntimeError if the GPU has failed. (`Event.done` of cupy is
        false then.)"""
        runtime = self.xp.cuda.runtime
        status = runtime.eventQuery(event.ptr)
        if status not in (0, _NOT_READY):
            raise runtime.CUDARuntimeError(status)
        return bool(status == 0)

    def keep(self, event: Any, what: Any) -> None:
        """Keep `what` alive until the GPU has reached the event."""
        with self._lock:
            self._kept.append((event, what))
        self.release()

    def keep_until_idle(self, what: Any) -> None:
        """Keep `what` alive until the GPU has finished all work on the three streams so far."""
        for stream in self.streams:
            self.keep(self.record(stream), what)

    def release(self) -> None:
        """Release what the GPU does not use any more."""
        released = []
        with self._lock:
            while self._kept and self.is_complete(self._kept[0][0]):
                released.append(self._kept.popleft())
        released.clear()  # after the lock: it may run code of the program


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
