"""The buckets of an allreduce of arrays on a GPU, and their reduction: pack, allreduce, unpack.

    pack        one kernel copies the tensors of a bucket one after the other, casts, and multiplies by the weight
    allreduce   NCCL, or the host
    unpack      one kernel copies back, casts, divides an average, and checks the results

A large tensor is reduced in slices; each is a bucket. It is not packed, unless it is cast or multiplied: the allreduce
reads the slice from the memory of the tensor. If no kernel is needed at all, a large tensor is reduced without buckets
(`BucketPlan.direct`). The plan depends only on shapes, dtypes and arguments, so it is the same on all ranks.

The check (`NonfiniteFlags`): a result that is not finite is not written, so each rank can still find the NaN or
infinity in its own gradients. All ranks have the same results, so they find the same tensors.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from allred import arrays
from allred.comm.backends.backend import DeviceBackend
from allred.comm.ops import Compression, ReduceOp, narrows
from allred.comm.work import Steps
from allred.fusion import assign_buckets
from allred.gpu.device_arrays import HALF_DTYPES, storage_dtype
from allred.gpu.kernels import ALIGNED_HALVES, LaunchTable
from allred.gpu.streams import Device, StreamLease

BUCKET_BYTES = 2**25  # the fusion buffer on a GPU: large enough for the full speed of NCCL


class ReduceRequest(NamedTuple):
    """The arguments of an allreduce.

    Arguments:
        weight: factor of this rank's arrays before the reduction; None: 1. 16-bit floats with a weight are multiplied
            and summed in float32 and rounded once. A weight of 0 also turns NaN into 0.
        is_single: one array, not a group of one.
        checks: whether unpack skips and flags results that are not finite, see NonfiniteFlags.
        independent: see StreamLease.
    """

    op: ReduceOp
    name: str
    compression: Compression = Compression.none
    in_place: bool = True
    weight: float | None = None
    is_single: bool = False
    checks: bool = False
    independent: bool = False

    @property
    def plan_key(self) -> Any:
        """The arguments that a plan depends on: whether there is a weight, not its value."""
        return self._replace(weight=None, independent=False), self.weight is None


class TensorSlice(NamedTuple):
    """Elements `start` to `stop` - 1 of the tensor at `position` of a group."""

    position: int
    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class DeviceBucket:
    """Slices of tensors that are reduced together.

    dtype: the name of the tensors' dtype. wire_dtype: of the dtype that is reduced. is_packed: if not, the allreduce
    reads the only slice in its tensor.
    """

    slices: list[TensorSlice]
    dtype: str
    wire_dtype: str
    is_inexact: bool
    is_packed: bool

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of the slices in the wire dtype, without padding."""
        return sum(stop - start for _, start, stop in self.slices) * storage_dtype(self.wire_dtype).itemsize


@dataclasses.dataclass(frozen=True)
class BucketPlan:
    """The buckets of a group, and the positions of tensors that are reduced without buckets, by dtype."""

    direct: dict[str, list[int]]
    buckets: list[DeviceBucket]

    @functools.cached_property
    def not_packed(self) -> list[int]:
        """Positions of the tensors that the allreduce reads directly."""
        direct = [position for positions in self.direct.values() for position in positions]
        sliced = [bucket.slices[0].position for bucket in self.buckets if not bucket.is_packed]
        return [*dict.fromkeys(direct + sliced)]


def plan_buckets(
    shapes: Sequence[tuple[int, ...]], dtypes: Sequence[np.dtype[Any]], request: ReduceRequest
) -> BucketPlan:
    """Plan the reduction of tensors with these shapes and dtypes.

    Complex numbers are reduced as twice as many floats, which the slices count.

    >>> shapes, dtypes = [(2**23,), (5,), (7,)], [np.dtype(np.float32)] * 3
    >>> plan_buckets(shapes, dtypes, ReduceRequest(ReduceOp.SUM, "")).direct
    {'float32': [0]}
    >>> [bucket.slices for bucket in plan_buckets(shapes[1:], dtypes[1:], ReduceRequest(ReduceOp.SUM, "")).buckets]
    [[TensorSlice(position=0, start=0, stop=5), TensorSlice(position=1, start=0, stop=7)]]
    """
    counts = [
        arrays.size_of(shape) * dtype.itemsize // arrays.part_of(dtype).itemsize
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    sizes = [count * arrays.part_of(dtype).itemsize for count, dtype in zip(counts, dtypes, strict=True)]
    direct: dict[str, list[int]] = {}
    buckets = []
    for positions in assign_buckets(sizes, dtypes, BUCKET_BYTES):
        dtype = dtypes[positions[0]]
        name, is_inexact = arrays.name_of(arrays.part_of(dtype)), arrays.is_inexact(dtype)
        wire = wire_dtype_of(dtype, request)
        needs_pack = len(positions) > 1 or name != wire or request.weight is not None
        divides_later = divides(wire, request.op) and not request.is_single
        needs_unpack = (request.checks and is_inexact) or divides_later
        if not needs_pack and not needs_unpack:
            direct.setdefault(name, []).append(positions[0])
            continue
        for slices in _slices(positions, counts, storage_dtype(wire).itemsize):
            buckets.append(DeviceBucket(slices, name, wire, is_inexact, needs_pack))
    return BucketPlan(direct, buckets)


def _slices(positions: list[int], counts: Sequence[int], itemsize: int) -> list[list[TensorSlice]]:
    """Return the slices of each bucket. positions: of several tensors, in one bucket, or of one."""
    if len(positions) > 1:
        return [[TensorSlice(position, 0, counts[position]) for position in positions]]
    position, step = positions[0], BUCKET_BYTES // itemsize
    starts = range(0, counts[position], step)
    return [[TensorSlice(position, start, min(start + step, counts[position]))] for start in starts]


def wire_dtype_of(dtype: np.dtype[Any], request: ReduceRequest) -> str:
    """Return the name of the dtype in which tensors of a dtype are reduced."""
    if narrows(dtype, request.compression.value):
        return arrays.DTYPES[request.compression.value]
    weighs = request.weight is not None and arrays.is_inexact(dtype)
    return arrays.name_of(arrays.part_of(arrays.accumulator(dtype) if weighs else dtype))


def divides(wire_dtype: str, op: ReduceOp) -> bool:
    """Whether an average is divided after the allreduce. 16-bit floats are divided before they are rounded."""
    return op is ReduceOp.AVERAGE and wire_dtype not in HALF_DTYPES


class BucketTables(NamedTuple):
    """The tables of a bucket for the kernels. source: None if the bucket is not packed."""

    source: LaunchTable | None
    target: LaunchTable


def tables_of(bucket: DeviceBucket, sources: Sequence[Any], targets: Sequence[Any], device: Device) -> BucketTables:
    """sources, targets: flat arrays of a group."""
    itemsize = storage_dtype(bucket.wire_dtype).itemsize
    read, written = ([there[p][start:stop] for p, start, stop in bucket.slices] for there in (sources, targets))
    source = device.kernels.table(read, itemsize) if bucket.is_packed else None
    return BucketTables(source, device.unpack_kernels.table(written, itemsize))


class NonfiniteFlags:
    """Whether results are finite: a flag on the GPU for each slice of a tensor, and its copy on the host.

    The flags belong to a group at fixed addresses. Read them before the next reduction of this group is started.
    """

    def __init__(self, device: Device, buckets: Sequence[DeviceBucket]) -> None:
        self._positions = [each.position for bucket in buckets for each in bucket.slices]
        count = max(1, len(self._positions))
        self._device, self._flags = device, device.xp.zeros(count, np.uint32)
        self._bytes, self._copy = self._flags.view(np.uint8), device.pinned(4 * count)
        starts = np.cumsum([0, *(len(bucket.slices) for bucket in buckets)]).tolist()
        self.of_buckets = [self._flags[start:] for start in starts[:-1]]

    def clear(self) -> None:
        """The unpacking stream is current, here and in `copy_to_host`."""
        self._flags.fill(0)

    def copy_to_host(self) -> None:
        self._device.to_host(self._bytes, self._copy)

    def first_position(self) -> int:
        """The first position in the group of a tensor whose result is not finite; -1 if all are. The operation must be
        complete: `Work.synchronize`."""
        found = np.flatnonzero(self._copy.view(np.uint32)[: len(self._positions)])
        return min((self._positions[each] for each in found), default=-1)


def reduce_buckets(
    devices: DeviceBackend, size: int, lease: StreamLease, plan: BucketPlan, tables: Sequence[BucketTables],
    flat_arrays: dict[int, tuple[Any, Any]], request: ReduceRequest, flags: NonfiniteFlags | None,
) -> Steps[Any]:  # fmt: skip
    """Reduce a group between `size` ranks. flat_arrays: for each tensor of `plan.not_packed`, (source, target), 1-d.
    Return the stream on which the work ends."""
    device, op = devices.device, request.op
    packing, communication, unpacking = device.packing, device.communication, device.unpacking
    for name, positions in plan.direct.items():
        pairs = [flat_arrays[position] for position in positions]
        devices.count_sent(sum(source.nbytes for source, _ in pairs))
        yield from devices.allreduce(lease, pairs, name, op)
    if not plan.buckets:
        return communication
    lease.order(packing)  # the events of the buffers order the other streams after it
    if flags is not None:
        with unpacking:
            flags.clear()
    for number, (bucket, table) in enumerate(zip(plan.buckets, tables, strict=True)):
        fusion_buffer, count = next(devices.fusion_buffers), table.target.buffer_elements
        if bucket.wire_dtype in HALF_DTYPES:  # parts of the same size for all ranks
            count = -(-count // (size * ALIGNED_HALVES)) * size * ALIGNED_HALVES
        with packing:
            source = target = fusion_buffer.begin(count, storage_dtype(bucket.wire_dtype))
            if table.source is not None:
                _pack(device, table.source, bucket, target, request)
            else:
                position, start, stop = bucket.slices[0]
                source, target = flat_arrays[position][0][start:stop], target[: stop - start]
            fusion_buffer.packed.record(packing)
        communication.wait_event(fusion_buffer.packed)
        divided = divides(bucket.wire_dtype, op)
        devices.count_sent(bucket.nbytes)
        yield from devices.allreduce(lease, [(source, target)], bucket.wire_dtype, ReduceOp.SUM if divided else op)
        fusion_buffer.reduced.record(communication)
        with unpacking:
            unpacking.wait_event(fusion_buffer.reduced)
            checked = flags.of_buckets[number] if flags is not None and bucket.is_inexact else None
            divisor = float(size) if divided else None
            device.unpack_kernels.unpack(target, table.target, bucket.dtype, bucket.wire_dtype, divisor, checked)
            fusion_buffer.unpacked.record(unpacking)
    if plan.direct:
        unpacking.wait_event(device.record(communication))
    if flags is not None:
        with unpacking:
            flags.copy_to_host()
    return unpacking


def _pack(device: Device, table: LaunchTable, bucket: DeviceBucket, buffer: Any, request: ReduceRequest) -> None:
    if request.weight == 0 and not bucket.is_inexact:  # an integer has weight 1 or 0
        buffer.fill(0)
        return
    device.kernels.pack(table, bucket.dtype, buffer, bucket.wire_dtype, request.weight if bucket.is_inexact else None)
