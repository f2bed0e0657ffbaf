"""The buckets of an allreduce of arrays on a GPU, and how they pass through the fusion buffers.

    pack        one kernel copies the tensors of a bucket one after the other, casts, and multiplies by the weight
    allreduce   NCCL, or the host
    unpack      one kernel copies back, casts, divides an average, and checks the results

A large tensor is reduced in slices; each is a bucket. NCCL reads it where it lies, unless it has to be cast or
multiplied. If nothing is left for the kernels to do, a large tensor is reduced without buffers (`BucketPlan.direct`).
The plan depends on the shapes, dtypes and arguments only, so it is the same on all ranks.

The check (`NonfiniteFlags`): a result that is not finite is not written, so afterwards each rank finds its own numbers
that caused this. All ranks have the same results, so they find the same tensors.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from allred import arrays
from allred.comm.backends.backend import DeviceBackend
from allred.comm.ops import Compression, ReduceOp, narrows
from allred.comm.work import Steps
from allred.fusion import assign_buckets
from allred.gpu.device_arrays import HALF_DTYPES, storage_dtype
from allred.gpu.kernels import LaunchTable
from allred.gpu.streams import Device, StreamLease

_ALIGNED_HALVES = 8  # 16-bit floats of 16 bytes
BUCKET_BYTES = 2**25  # the fusion buffer on a GPU: large enough for the full speed of NCCL


class ReduceRequest(NamedTuple):
    """The arguments of an allreduce.

    weight: see `weighted_allreduce_`. one: a single array, not a group of one. checks: whether results that are not
    finite are not written. independent: see StreamLease.
    """

    op: ReduceOp
    name: str
    compression: Compression
    in_place: bool
    weight: float | None = None
    one: bool = False
    checks: bool = False
    independent: bool = False


class TensorPart(NamedTuple):
    """Elements `start` to `stop` - 1 of the tensor at `position` of a group."""

    position: int
    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class DeviceBucket:
    """Parts of tensors that are reduced together.

    held, moved: the names of the dtypes of the tensors and of the buffer. is_float: whether the tensors are. in_memory:
    whether the allreduce reads the tensor where it lies.
    """

    parts: list[TensorPart]
    held: str
    moved: str
    is_float: bool
    in_memory: bool


@dataclasses.dataclass(frozen=True)
class BucketPlan:
    """The buckets of a group, and the positions of tensors that are reduced without buffers, by dtype."""

    direct: dict[str, list[int]]
    buckets: list[DeviceBucket]

    @property
    def unpacked(self) -> list[int]:
        """Positions of the tensors that the allreduce reads where they lie."""
        in_memory = [bucket.parts[0].position for bucket in self.buckets if bucket.in_memory]
        return [*dict.fromkeys([position for positions in self.direct.values() for position in positions] + in_memory)]


def plan_buckets(
    shapes: Sequence[tuple[int, ...]], dtypes: Sequence[np.dtype[Any]], request: ReduceRequest
) -> BucketPlan:
    counts = [arrays.size_of(shape) for shape in shapes]
    sizes = [count * dtype.itemsize for count, dtype in zip(counts, dtypes, strict=True)]
    direct: dict[str, list[int]] = {}
    buckets = []
    for positions in assign_buckets(sizes, dtypes, BUCKET_BYTES):
        dtype = dtypes[positions[0]]
        held, moved = arrays.name_of(dtype), moved_dtype(dtype, request)
        weighted = request.weight is not None
        idle = held == moved and not weighted and not request.checks and (request.one or not divides(moved, request.op))
        if len(positions) == 1 and idle:
            direct.setdefault(held, []).append(positions[0])
            continue
        in_memory = len(positions) == 1 and held == moved and not weighted
        for parts in _parts(positions, counts, storage_dtype(moved).itemsize):
            buckets.append(DeviceBucket(parts, held, moved, arrays.is_float(dtype), in_memory))
    return BucketPlan(direct, buckets)


def _parts(positions: list[int], counts: Sequence[int], itemsize: int) -> list[list[TensorPart]]:
    if len(positions) > 1:
        return [[TensorPart(position, 0, counts[position]) for position in positions]]
    (position,), step = positions, BUCKET_BYTES // itemsize
    starts = range(0, counts[position], step)
    return [[TensorPart(position, start, min(start + step, counts[position]))] for start in starts]


def moved_dtype(dtype: np.dtype[Any], request: ReduceRequest) -> str:
    """Return the name of the dtype in which tensors of a dtype are reduced."""
    if narrows(dtype, request.compression.value):
        return arrays.DTYPES[request.compression.value]
    weighs = request.weight is not None and arrays.is_float(dtype)
    return arrays.name_of(arrays.accumulator(dtype) if weighs else dtype)


def divides(moved: str, op: ReduceOp) -> bool:
    """Whether an average is divided after the allreduce. 16-bit floats are divided before they are rounded."""
    return op is ReduceOp.AVERAGE and moved not in HALF_DTYPES


class BucketTables(NamedTuple):
    """The tables of a bucket for the kernels. source: None if the bucket is not packed."""

    source: LaunchTable | None
    target: LaunchTable


def tables_of(bucket: DeviceBucket, sources: Sequence[Any], targets: Sequence[Any], device: Device) -> BucketTables:
    """sources, targets: flat arrays of a group."""
    itemsize = storage_dtype(bucket.moved).itemsize
    packed, unpacked = ([there[p][start:stop] for p, start, stop in bucket.parts] for there in (sources, targets))
    source = None if bucket.in_memory else device.kernels.table(packed, itemsize)
    return BucketTables(source, device.unpack_kernels.table(unpacked, itemsize))


class NonfiniteFlags:
    """Whether results are finite: a flag on the GPU for each part of a tensor, and its copy on the host."""

    def __init__(self, device: Device, buckets: Sequence[DeviceBucket]) -> None:
        """The unpacking stream is current."""
        self._positions = [part.position for bucket in buckets for part in bucket.parts]
        count = max(1, len(self._positions))
        self._device, self._flags = device, device.xp.zeros(count, np.uint32)
        self._bytes, self._copy = self._flags.view(np.uint8), device.pinned(4 * count)
        starts = np.cumsum([0, *(len(bucket.parts) for bucket in buckets)]).tolist()
        self.of_buckets = [self._flags[start:] for start in starts[:-1]]
        self._is_clear = True

    def begin(self) -> None:
        """Clear the flags, unless the last reduction has set none. The unpacking stream is current."""
        if not self._is_clear:
            self._flags.fill(0)
        self._is_clear = False

    def end(self) -> None:
        """Copy the flags to the host. The unpacking stream is current."""
        self._device.to_host(self._bytes, self._copy)

    def first(self) -> int:
        """The first position in the group of a tensor whose result is not finite; -1 if all are. The operation must be
        complete: `Work.synchronize`."""
        positions = [
            self._positions[each] for each in np.flatnonzero(self._copy.view(np.uint32)[: len(self._positions)])
        ]
        self._is_clear = not positions
        return min(positions, default=-1)


def reduce_buckets(
    devices: DeviceBackend, size: int, lease: StreamLease, plan: BucketPlan, tables: Sequence[BucketTables],
    flats: dict[int, tuple[Any, Any]], request: ReduceRequest, flags: NonfiniteFlags | None,
) -> Steps[Any]:  # fmt: skip
    """Reduce a group between `size` ranks. flats: for the tensors in `plan.unpacked`, flat arrays: source and target.
    Return the stream on which the work ends."""
    device, op = devices.device, request.op
    packing, communication, unpacking = device.packing, device.stream, device.unpacking
    for name, positions in plan.direct.items():
        pairs = [flats[position] for position in positions]
        devices.sent_bytes += sum(source.nbytes for source, _ in pairs)
        yield from devices.allreduce(lease, pairs, name, op)
    if not plan.buckets:
        return communication
    lease.enter(packing)  # the other streams follow it
    if flags is not None:
        with unpacking:
            flags.begin()
    for number, (bucket, table) in enumerate(zip(plan.buckets, tables, strict=True)):
        slot, count = devices.fusion_buffers.next(), table.target.buffer_elements
        if bucket.moved in HALF_DTYPES:  # parts of the same size for all ranks
            count = -(-count // (size * _ALIGNED_HALVES)) * size * _ALIGNED_HALVES
        with packing:
            slot.begin(count, storage_dtype(bucket.moved))
            source = buffer = slot.elements
            if table.source is not None:
                _pack(device, table.source, bucket, buffer, request)
            else:
                position, start, stop = bucket.parts[0]
                source, buffer = flats[position][0][start:stop], buffer[: stop - start]
            slot.packed.record(packing)
        communication.wait_event(slot.packed)
        divided = divides(bucket.moved, op)
        devices.sent_bytes += source.nbytes
        yield from devices.allreduce(lease, [(source, buffer)], bucket.moved, ReduceOp.SUM if divided else op)
        slot.reduced.record(communication)
        with unpacking:
            unpacking.wait_event(slot.reduced)
            checked = flags.of_buckets[number] if flags is not None and bucket.is_float else None
            divisor = float(size) if divided else None
            device.unpack_kernels.unpack(buffer, table.target, bucket.held, bucket.moved, divisor, checked)
            slot.free.record(unpacking)
    if plan.direct:
        unpacking.wait_event(device.record(communication))
    if flags is not None:
        with unpacking:
            flags.end()
    return unpacking


def _pack(device: Device, table: LaunchTable, bucket: DeviceBucket, buffer: Any, request: ReduceRequest) -> None:
    if request.weight == 0 and not bucket.is_float:  # an integer has weight 1 or 0
        buffer.fill(0)
        return
    device.kernels.pack(table, bucket.held, buffer, bucket.moved, request.weight if bucket.is_float else None)
