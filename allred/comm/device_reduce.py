"""The allreduce of arrays on GPUs, usually in groups: the gradients of a step; and the common part of all collectives.

A group is reduced in buckets: one kernel packs tensors of a dtype one after the other, one unpacks them; both scale and
cast. A bucket of one array is reduced in place, without packing.

Training reduces the same group at every step. So the header, the buckets and the tables of addresses for the kernels
are kept, and used again for arrays at the same addresses with the same layout: `CachedGroup`. It holds addresses, no
arrays; a kernel does not depend on who owns the memory.

The arrays of such a group are reduced in the order in which their elements lie in memory, without a copy, also in
torch's format channels_last. The headers compare these orders. If ranks differ, all reduce in C order, as they do
arrays with gaps; a rank without a gradient, for example, sends zeros in C order.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from allred import arrays
from allred.arrays import Array
from allred.comm import header
from allred.comm.arguments import array_descriptor, group_descriptor
from allred.comm.backends.backend import DeviceBackend
from allred.comm.group import Group
from allred.comm.header import OpDescriptor
from allred.comm.ops import Compression, ReduceOp, narrows
from allred.comm.work import Polled, Steps, Work
from allred.errors import InputError
from allred.fusion import assign_buckets
from allred.gpu.device_arrays import HALF_DTYPES, Adopted, adopt, is_device, layouts, memory_order, storage_dtype
from allred.gpu.kernels import LaunchTable
from allred.gpu.streams import StreamHandle, StreamLease

T = TypeVar("T")

BUCKET_BYTES = 2**25  # the fusion buffer on a GPU: large enough for the full speed of NCCL
_KEPT = 64  # descriptors, and groups
_ON_GPU = 128  # added to the code of the dtype in the hash of the header


@dataclasses.dataclass(frozen=True)
class DeviceBucket:
    """Tensors of a group that are reduced together.

    positions: their indices in the group; dtype: theirs; moved: the dtype of the buffer. source, target: where they are
    packed from and unpacked to; None: the bucket has one tensor, which is reduced in place.
    """

    positions: list[int]
    dtype: np.dtype[Any]
    moved: np.dtype[Any]
    source: LaunchTable | None
    target: LaunchTable | None


@dataclasses.dataclass(frozen=True)
class CachedGroup:
    """A group that was reduced in place before. streams: the current streams of its owners."""

    layouts: list[Any]  # of the arrays; the cache applies only if these are equal
    descriptor: OpDescriptor  # its note is 0 for arrays in C order, else a hash of the memory orders
    streams: list[StreamHandle | None]
    buckets: list[DeviceBucket]
    orders: list[tuple[int, ...]]  # of the arrays: `memory_order`


class ReduceRequest(NamedTuple):
    """The arguments of an allreduce. weight: see `weighted_allreduce_`. one: a single array, not a group of one."""

    op: ReduceOp
    name: str
    compression: Compression
    in_place: bool
    weight: float | None = None
    one: bool = False


class DeviceReductions:
    """Allreduces of arrays on GPUs, for a communicator with a device backend."""

    def __init__(self, communicator: Group) -> None:
        assert communicator.devices is not None
        self.communicator = communicator
        self.devices = communicator.devices
        self._descriptors: dict[Any, tuple[OpDescriptor, list[list[int]]]] = {}
        self._cache: dict[Any, CachedGroup] = {}  # by the address of the first array

    def weighted_allreduce_(
        self, group: Sequence[Any], op: ReduceOp, name: str, compression: Compression, weight: float | None
    ) -> Work[list[Any]]:
        """grouped_allreduce_ of gradients on GPUs, multiplied by this rank's `weight` before (None: by 1). 16-bit
        floats are multiplied and summed in float32 and rounded once. A weight of 0 also turns NaN into 0."""
        return self._reduction(group, ReduceRequest(op, name, compression, True, weight))

    def _reduction(self, values: Sequence[Any], request: ReduceRequest) -> Work[Any]:
        kind = "allreduce" if request.one else "grouped_allreduce"
        return self._begin(kind, request.name, lambda: self._reduction_steps(values, request))

    def _reduction_steps(self, values: Sequence[Any], request: ReduceRequest) -> Steps[Any]:
        if not (isinstance(request.op, ReduceOp) and isinstance(request.compression, Compression)):
            group_descriptor([], request.name, request.op, request.compression)  # raises
        where = layouts(values) if request.in_place and not request.one else None
        key = (where[0], request._replace(weight=None), request.weight is None) if where else None
        cached = self._cache.get(key)
        if cached is None or cached.layouts != where:
            given = [adopt_on(value, self.devices.device.index) for value in values]
            if request.in_place:
                check_writable(given)
            descriptor, together = self._describe(given, request)
            streams = list(dict.fromkeys(one.stream for one in given))
            orders = [order for one in given if (order := memory_order(one.array)) is not None]
            if not where or len(orders) < len(given):
                lease = self.devices.device.lease(streams)
                return self._reduce_given(values, given, lease, descriptor, together, request)
            there = [one.array for one in given]
            chosen = [self._bucket(each, given[each[0]].dtype, there, there, request) for each in together]
            if any(list(order) != sorted(order) for order in orders):
                descriptor = dataclasses.replace(descriptor, note=header.hash_text(repr(orders)))
            cached = CachedGroup(where, descriptor, streams, chosen, orders)
            if len(self._cache) >= _KEPT:
                self._cache.clear()
            self._cache[key] = cached
        flats = [
            None if one.source else adopt_on(values[one.positions[0]], self.devices.device.index)
            for one in cached.buckets
        ]
        return self._reduce_cached(list(values), flats, cached, self.devices.device.lease(cached.streams), request)

    def _reduce_cached(
        self,
        values: list[Any],
        flats: list[Adopted | None],
        cached: CachedGroup,
        lease: StreamLease,
        request: ReduceRequest,
    ) -> Steps[Any]:
        """Reduce arrays of a cached group in place.

        flats: for each bucket, the array that is reduced without packing, or None. They are checked before the ranks
        agree, because the other ranks would not receive an error after that.
        """
        group, devices, headers = yield from self._agree(cached.descriptor)
        if len({header.rows_and_note(record)[1] for record in headers}) > 1:
            given = [adopt_on(value, self.devices.device.index) for value in values]
            together = [bucket.positions for bucket in cached.buckets]
            return (yield from self._reduce_agreed(group, devices, values, given, lease, together, request))
        for bucket, one in zip(cached.buckets, flats, strict=True):
            flat = one and one.in_memory_order(cached.orders[bucket.positions[0]])
            yield from _reduce_bucket(devices, group.size, lease, bucket, flat, request)
        self._end(devices, lease, values, flats)
        return values

    def _reduce_given(
        self, values: Sequence[Any], given: list[Adopted], lease: StreamLease, descriptor: OpDescriptor,
        together: list[list[int]], request: ReduceRequest,
    ) -> Steps[Any]:  # fmt: skip
        group, devices, _ = yield from self._agree(descriptor)
        return (yield from self._reduce_agreed(group, devices, values, given, lease, together, request))

    def _reduce_agreed(
        self, group: Group, devices: DeviceBackend, values: Sequence[Any], given: list[Adopted], lease: StreamLease,
        together: list[list[int]], request: ReduceRequest,
    ) -> Steps[Any]:  # fmt: skip
        """Reduce arrays of any layout in C order."""
        made = [] if request.in_place else lease.empty([(one.shape, one.array.dtype) for one in given])
        with lease.enter():
            sources = [one.flat() for one in given] if request.in_place else list(map(_source, given, made))
        targets = sources if request.in_place else [new.reshape(-1) for new in made]
        for positions in together:
            first = positions[0]
            bucket = self._bucket(positions, given[first].dtype, sources, targets, request)
            if not bucket.source and not request.in_place:
                with lease.enter():
                    targets[first][...] = sources[first]
            yield from _reduce_bucket(devices, group.size, lease, bucket, targets[first], request)
        with lease.enter():
            for one, flat in zip(given, sources, strict=True):
                if request.in_place and not one.array.flags.c_contiguous:
                    one.array[...] = flat.reshape(one.array.shape)
        self._end(devices, lease, given, sources, targets)
        results = (
            list(values) if request.in_place else [one.to_caller(new) for one, new in zip(given, made, strict=True)]
        )
        return results[0] if request.one else results

    def _bucket(
        self, positions: list[int], dtype: np.dtype[Any], sources: list[Any], targets: list[Any], request: ReduceRequest
    ) -> DeviceBucket:
        """Make a bucket of tensors of one dtype; several tensors, or those with a weight, are packed."""
        weighs = request.weight is not None and arrays.is_float(dtype)
        moved = arrays.accumulator(dtype) if weighs else storage_dtype(arrays.name_of(dtype))
        if len(positions) == 1 and not weighs:
            return DeviceBucket(positions, dtype, moved, None, None)
        source, target = (
            self.devices.device.kernels.table([there[i] for i in positions], moved.itemsize)
            for there in (sources, targets)
        )
        return DeviceBucket(positions, dtype, moved, source, target)

    def _describe(self, given: list[Adopted], request: ReduceRequest) -> tuple[OpDescriptor, list[list[int]]]:
        """Return the descriptor and the buckets, from a cache if the same call was made before."""
        op, name, compression = request.op, request.name, request.compression
        key = request.one, name, op, compression, tuple([(one.shape, one.dtype) for one in given])
        found = self._descriptors.get(key)
        if found is None:
            if request.one:
                descriptor = array_descriptor("allreduce", cast(Array, given[0]), name, op, compression=compression)
            else:
                descriptor = group_descriptor(cast(list[Array], given), name, op, compression)
            found = (
                on_gpu(descriptor),
                assign_buckets([one.nbytes for one in given], [one.dtype for one in given], BUCKET_BYTES),
            )
            if len(self._descriptors) >= _KEPT:
                self._descriptors.clear()
            self._descriptors[key] = found
        return found

    # The common part of all device collectives.

    def _begin(self, kind: str, name: str, make: Callable[[], Steps[T]]) -> Work[T]:
        """Start an operation on device arrays, after the work already enqueued on the caller's streams. If `make` finds
        arguments that cannot be used, the header says so to the other ranks."""
        steps: Steps[T]
        try:
            steps = make()
        except Exception as error:
            steps = _refused(error)
        queue = self.communicator.queue
        turn = self.devices.device.launches.take(lambda: queue.poisoned)
        try:
            return self.communicator.start(kind, name, steps, turn)
        except BaseException:
            turn.end()
            raise

    def _agree(self, descriptor: OpDescriptor) -> Steps[tuple[Group, DeviceBackend, list[bytes]]]:
        """Exchange headers, and wait until the operation may be launched. Return the group that runs it, the device
        backend of the group, and the headers."""
        group, headers = yield from self.communicator.agree(descriptor)
        work = self.communicator.queue.advancing
        assert work is not None
        assert work.turn is not None
        assert group.devices is not None
        if not work.turn.has_come():
            yield Polled(work.turn.has_come, waits_for_peers=True)
        yield from group.devices.ready()
        return group, group.devices, headers

    def _end(self, devices: DeviceBackend, lease: StreamLease, *kept: Any) -> None:
        """The current operation is enqueued: `wait` orders the caller's streams after it. kept: memory that it uses."""
        work = self.communicator.queue.advancing
        assert work is not None
        work.end = devices.watch(lease.end(kept), work.title)


def adopt_on(value: Any, index: int) -> Adopted:
    """Return `value` as an array on this rank's GPU, whose index is `index`. Raises InputError if it is elsewhere."""
    if not is_device(value):
        kind = f"{type(value).__module__}.{type(value).__name__}"
        raise InputError(f"the group has arrays on the GPU and on the host ({kind}); reduce them in two calls")
    found = adopt(value)
    if (there := found.array.data.device_id) != index:
        raise InputError(
            f"the array is on GPU {there}, but allred.init() has bound this rank to GPU {index} (numbers "
            "of the GPUs that this process sees); create the array there, or move it"
        )
    return found


def check_writable(given: list[Adopted]) -> None:
    """Raise InputError if an array cannot be reduced in place: it is read-only, or shares memory with another."""
    if not all(one.writable for one in given):
        raise InputError(
            "the array is read-only (all arrays of some frameworks are); use the form without the underscore"
        )
    some = [one.array for one in given if one.array.size]
    whole = [array for array in some if memory_order(array) is not None]
    if len({array.data.ptr for array in some}) < len(some) or (
        len(whole) > 1 and arrays.ranges_overlap([array.data.ptr for array in whole], [array.nbytes for array in whole])
    ):
        raise InputError("the same memory is in the group twice, and would be reduced twice")


def on_gpu(descriptor: OpDescriptor) -> OpDescriptor:
    """Mark the operation as one on device arrays: the header of a rank with a host array differs."""
    marked = None
    if descriptor.arrays is not None:
        marked = tuple((code | _ON_GPU, shape) for code, shape in descriptor.arrays)
    return dataclasses.replace(descriptor, title=f"{descriptor.title} on the GPU", arrays=marked)


def _reduce_bucket(
    devices: DeviceBackend, size: int, lease: StreamLease, bucket: DeviceBucket, flat: Any, request: ReduceRequest
) -> Steps[None]:
    """Reduce a bucket between `size` ranks. flat: the array of a bucket without packing."""
    dtype, moved, op, weight = bucket.dtype, bucket.moved, request.op, request.weight
    name, kernels = arrays.name_of(dtype), devices.device.kernels
    wire = arrays.DTYPES[request.compression.value] if narrows(dtype, request.compression.value) else ""
    weighs = weight is not None and arrays.is_float(dtype)
    nothing = weight == 0 and not weighs  # an integer has weight 1 or 0
    if not bucket.source or not bucket.target:
        if nothing:
            with lease.enter():
                flat.fill(0)
        devices.sent_bytes += flat.nbytes // (dtype.itemsize // 2 if wire else 1)
        yield from devices.allreduce(lease, flat, name, op, wire)
        return
    carried = moved.name if weighs else name
    divides = op is ReduceOp.AVERAGE and not wire and carried not in HALF_DTYPES  # the kernel that unpacks divides
    with lease.enter():
        buffer = devices.buffer(bucket.source.buffer_elements, moved)
        if nothing:
            buffer.fill(0)
        else:
            kernels.pack(bucket.source, name, buffer, weight if weighs else None)
    inner = ReduceOp.SUM if divides else op
    devices.sent_bytes += buffer.nbytes // (dtype.itemsize // 2 if wire else 1)
    yield from devices.allreduce(lease, buffer, carried, inner, wire)
    with lease.enter():
        divisor = float(size) if divides else 1.0 if weighs else None
        kernels.unpack(buffer, bucket.target, name, divisor)


def _source(given: Adopted, made: Any) -> Any:
    """Return the elements as a flat array: a view if `given` is contiguous, else a copy in `made`."""
    if given.array.flags.c_contiguous:
        return given.flat()
    made[...] = given.array
    return made.reshape(-1)


def _refused(error: Exception) -> Steps[Any]:
    """Raise `error` as the first step of an operation, so that the other ranks receive it in the header."""
    yield from ()
    raise error
