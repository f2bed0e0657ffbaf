"""The interfaces of backends: primitives over flat, contiguous arrays of the host (Backend) or of GPUs (DeviceBackend).

Arguments are already checked and the ranks already agree when a primitive is called (communicator.py, group.py). A
primitive is a generator that yields whenever it has to wait (work.py). Counts are elements; for byte arrays, bytes.
Each backend documents whether results are reproducible from run to run.

A communicator has one host backend, which exchanges the headers of all operations, and may have a device backend.
"""

import dataclasses
import itertools
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from allred.arrays import Array, as_bytes
from allred.comm.messages import Messages
from allred.comm.ops import ReduceOp, narrow, widen
from allred.comm.work import Steps, UserCodeError
from allred.errors import AllredError, InputError
from allred.gpu.fusion_buffers import GpuFusionBuffer
from allred.gpu.streams import Completion, Device, StreamLease
from allred.timeline.recorder import Track

if TYPE_CHECKING:
    from allred.native._kernels import Operation, Segment

_LARGE_BYTES = 2**16  # of an array that is sent beside the pickle of an object


@dataclasses.dataclass
class Traffic:
    """Bytes that this rank has contributed to allreduces so far, in their wire dtype: `sent` through buffers, and
    reduced in place, without a copy (allred/arena.py). On several nodes with transport mpi, only what crosses between
    nodes counts; backend single sends nothing."""

    sent: int = 0
    in_place: int = 0


class WithHeader(Protocol):
    """The primitives of a backend that can begin with the exchange of headers. record: the header of this rank."""

    @property
    def number(self) -> int:
        """The number of the last operation that was begun."""

    def begin_exchange(self, record: bytes) -> "Operation": ...
    def begin_allreduce(
        self, record: bytes | None, sources: list[Array], targets: list[Array], op: ReduceOp, wires: list[int],
        checks_finite: bool = False, residual: Array | None = None,
    ) -> "Operation": ...  # fmt: skip
    def begin_broadcast(self, record: bytes | None, data: Array, root: int) -> "Operation": ...
    def begin_allgather(self, record: bytes | None, send: Array, recv: Array, counts: list[int]) -> "Operation": ...
    def begin_reducescatter(
        self, record: bytes | None, flat: Array, out: Array, counts: list[int], op: ReduceOp
    ) -> "Operation": ...


class Backend(ABC):
    """Moves arrays between `size` ranks; this process is number `rank`."""

    name: str
    fuses = False  # whether a group of arrays passes as one stream, without a fusion buffer
    encodes = False  # whether numbers are encoded between hosts, also as int8 and int4, and errors kept (csrc/encode.h)
    weighs = False  # whether a reduction can multiply the arrays of each rank by its weight
    checks_finite = False  # whether a reduction can find results that are not finite, see Communicator.nonfinite
    engine: "Segment | None" = None  # what runs several started operations at once; None: the caller runs one at a time
    fast_path: "Segment | None" = None  # a blocking allreduce of contiguous arrays, with checks, in one call into C
    messages: Messages | None = None  # between two of these ranks; None for one rank, and threads
    with_header: "WithHeader | None" = None  # exchanges headers and moves bytes as one operation, which needs no Python

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.traffic: Traffic | Segment = Traffic()

    def begins_with_header(self, kind: str, wire: int) -> bool:
        """Whether a collective of this kind is one operation with its header. wire: as in `allreduce`."""
        return self.with_header is not None

    def connection_error(self) -> AllredError | None:
        """Return the error if the connection to another host was lost, so that no operation can complete."""
        return None

    @abstractmethod
    def exchange(self, record: bytes) -> Steps[list[bytes]]:
        """Return the records of all ranks in rank order, header.BYTES bytes each."""

    @abstractmethod
    def allreduce(self, flat: Array, op: ReduceOp, wire: int = 0) -> Steps[None]:
        """Reduce `flat` in place. wire: the type in which its numbers are sent, the value of a Compression; 0: none."""

    @abstractmethod
    def broadcast(self, data: Array, root: int) -> Steps[None]:
        """Copy the root's bytes into `data` on every rank."""

    @abstractmethod
    def allgather(self, send: Array, recv: Array, counts: list[int]) -> Steps[None]:
        """Concatenate the bytes of all ranks in `recv`; counts[r] bytes come from rank r."""

    @abstractmethod
    def alltoall(self, send: Array, recv: Array, counts: Array) -> Steps[None]:
        """Send bytes to each rank in rank order and receive from each; counts[i, j] bytes go from rank i to rank j."""

    @abstractmethod
    def reducescatter(self, flat: Array, out: Array, counts: list[int], op: ReduceOp) -> Steps[None]:
        """Reduce `flat`; rank r receives part r, counts[r] elements, in `out`."""

    def allocate(self, count: int, dtype: np.dtype[Any]) -> Array:
        """Zeros that live as long as the backend; it may reduce them without a copy."""
        return np.zeros(count, dtype)

    @property
    def outside(self) -> list[tuple[int, int]]:
        """For each rank: number and bytes of the arrays so far that were in the arena of this rank, but not in its own.
        [] without arenas."""
        return []

    def start_progress_thread(self) -> None:  # noqa: B027  (optional)
        """Start a thread that runs operations while the program computes, if the backend has one. Idempotent."""

    def set_generation(self, generation: int) -> None:  # noqa: B027  (optional)
        """Set the generation of the world in the headers that the backend makes."""

    def let_callers_sleep(self) -> None:  # noqa: B027  (optional)
        """Let a rank that waits sleep where another thread uses its core. Only if each rank of the node has a core."""

    def record(self, track: Track) -> None:  # noqa: B027  (optional)
        """Record operations of the fast path for the timeline."""

    def stop_recording(self) -> None:  # noqa: B027  (optional)
        """Do not record operations any more."""

    def close(self, sound: bool) -> None:  # noqa: B027  (optional)
        """Release all resources; collective. sound: every operation is complete, so that MPI objects can be freed."""

    # Picklable objects. Unpickling can run any code: the ranks of one job trust each other, as everywhere in MPI.

    def allgather_object(self, data: Array) -> Steps[list[Any]]:
        """Return the objects of all ranks in rank order. data: this rank's pickled object."""
        length = np.array([data.nbytes], np.int64)
        lengths = np.empty(self.size, np.int64)
        yield from self.allgather(as_bytes(length), as_bytes(lengths), [length.nbytes] * self.size)
        everything = np.empty(int(lengths.sum()), np.uint8)
        yield from self.allgather(data, everything, lengths.tolist())
        return [unpickle(part) for part in np.split(everything, np.cumsum(lengths)[:-1])]

    def broadcast_object(self, data: Array, root: int) -> Steps[Any]:
        """Return the root's object. data: this rank's pickled object; only the root's is used."""
        return unpickle(*(yield from self.broadcast_pickle([data], root)))

    def broadcast_pickle(self, parts: list[Array], root: int) -> Steps[list[Array]]:
        """Return the root's pickle and its buffers. parts: the result of `pickled_parts`; only the root's is used."""
        lengths = np.array([parts[0].nbytes, len(parts) - 1], np.int64)
        yield from self.broadcast(as_bytes(lengths), root)
        nbytes = [int(lengths[0])]
        if lengths[1]:
            more = np.array([part.nbytes for part in parts[1:]] if self.rank == root else [0] * lengths[1], np.int64)
            yield from self.broadcast(as_bytes(more), root)
            nbytes += more.tolist()
        if self.rank != root:
            parts = [np.empty(count, np.uint8) for count in nbytes]
        for part in parts:
            yield from self.broadcast(part, root)
        return parts


def unpickle(data: Array, *buffers: Array) -> Any:
    """Return the object of a pickle. For the end of an operation. Raises UserCodeError."""
    try:
        return pickle.loads(data.data, buffers=buffers)
    except Exception as error:  # of any class: code of the user
        raise UserCodeError(error) from error


def pickled(value: Any) -> Array:
    return _pickle(value, None)


def pickled_parts(value: Any) -> list[Array]:
    """Return the pickle of an object, and the memory of its large arrays, which is not copied into the pickle."""
    buffers: list[Array] = []

    def is_in_pickle(buffer: pickle.PickleBuffer) -> bool:
        memory = buffer.raw()
        if memory.nbytes >= _LARGE_BYTES:
            buffers.append(np.frombuffer(memory, np.uint8))
        return memory.nbytes < _LARGE_BYTES

    return [_pickle(value, is_in_pickle), *buffers]


def _pickle(value: Any, callback: Callable[[pickle.PickleBuffer], Any] | None) -> Array:
    try:
        return np.frombuffer(pickle.dumps(value, pickle.HIGHEST_PROTOCOL, buffer_callback=callback), np.uint8)
    except Exception as error:
        raise InputError(f"a {type(value).__name__} cannot be pickled ({error})") from error


class DeviceBackend(ABC):
    """Moves arrays on GPUs between ranks. A primitive enqueues its work on the communication stream of `lease`.

    It never holds the stream while it waits for the host.
    """

    name: str

    def __init__(self, device: Device) -> None:
        self.device = device
        self.sent_bytes = 0  # contributed to allreduces so far, in their wire dtype
        self.fusion_buffers = itertools.cycle([GpuFusionBuffer(device), GpuFusionBuffer(device)])

    def count_sent(self, nbytes: int) -> None:
        """Add bytes to `sent_bytes`."""
        self.sent_bytes += nbytes

    def ready(self) -> Steps[None]:
        """Connect to the other ranks, if necessary. Collective."""
        yield from ()

    @abstractmethod
    def allreduce(self, lease: StreamLease, pairs: Sequence[tuple[Any, Any]], name: str, op: ReduceOp) -> Steps[None]:
        """Reduce flat arrays. pairs: (source, target); both may be the same. name: their dtype (arrays of bfloat16 are
        uint16)."""

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

    def watch(self, end: Completion, title: str) -> Completion:
        """Watch an operation that is enqueued, so that it does not wait forever. Return the end to wait for."""
        return end

    @abstractmethod
    def close(self, sound: bool) -> None:
        """Release all resources; collective. sound: every operation is complete or will be, so that it can wait."""


class SingleBackend(Backend):
    """One rank. Every operation completes when it is started."""

    name = "single"
    fuses = True  # there is nothing to copy into a fusion buffer for

    def __init__(self) -> None:
        super().__init__(rank=0, size=1)

    def exchange(self, record: bytes) -> Steps[list[bytes]]:
        yield from ()
        return [record]

    def allreduce(self, flat: Array, op: ReduceOp, wire: int = 0) -> Steps[None]:
        yield from ()
        if wire:  # round as several ranks do
            halves = np.empty(flat.size, np.uint16)
            narrow(flat, halves, wire)
            widen(halves, flat, wire)

    def broadcast(self, data: Array, root: int) -> Steps[None]:
        yield from ()

    def allgather(self, send: Array, recv: Array, counts: list[int]) -> Steps[None]:
        yield from ()
        recv[:] = send

    def alltoall(self, send: Array, recv: Array, counts: Array) -> Steps[None]:
        yield from ()
        recv[:] = send

    def reducescatter(self, flat: Array, out: Array, counts: list[int], op: ReduceOp) -> Steps[None]:
        yield from ()
        out[:] = flat
