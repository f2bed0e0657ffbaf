"""The allreduce of arrays on GPUs, usually in groups: the gradients of a step.

Training reduces the same group at every step. So the header, the buckets and the tables of addresses for the kernels
are kept, and used again for arrays at the same addresses with the same layout: `CachedReduction`. It holds addresses,
no arrays; a kernel does not depend on who owns the memory.

Such arrays are reduced in memory order, without a copy. This includes torch's channels_last. The ranks compare the
memory orders. If they differ, all reduce in C order, as they do arrays with gaps; a rank without a gradient, for
example, sends zeros in C order.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from allred.arrays import Array
from allred.comm import header
from allred.comm.arguments import array_descriptor, group_descriptor
from allred.comm.backends.backend import DeviceBackend
from allred.comm.device_buckets import (
    BucketPlan,
    BucketTables,
    NonfiniteFlags,
    ReduceRequest,
    plan_buckets,
    reduce_buckets,
    tables_of,
)
from allred.comm.device_operation import DeviceOperations, adopt_on, check_writable, on_gpu, refuse_product
from allred.comm.group import Group
from allred.comm.header import OpDescriptor
from allred.comm.ops import Compression, ReduceOp
from allred.comm.work import Steps, Work
from allred.gpu.device_arrays import Adopted, layouts, memory_order, real_numbers
from allred.gpu.streams import StreamHandle, StreamLease

_KEPT = 1024  # descriptors, and groups: early buckets of a step (modes/overlap.py) are a group each


@dataclasses.dataclass
class CachedReduction:
    """An allreduce in place of arrays that were reduced before. streams: functions that
    return the current stream of each framework; None: cupy's."""

    layouts: list[Any]  # of the arrays; the cache applies only if these are equal
    descriptor: OpDescriptor  # its note is 0 for arrays in C order, else a hash of the memory orders
    streams: list[StreamHandle | None]
    plan: BucketPlan
    tables: list[BucketTables]
    orders: list[tuple[int, ...]]  # of the arrays: `memory_order`
    flags: NonfiniteFlags | None = None


class PreparedReduction(NamedTuple):
    """A cached allreduce before the ranks agree on it.

    not_packed: the arrays of `BucketPlan.not_packed`. They are checked before the ranks agree, because the other ranks
    would not receive an error after that.
    """

    arrays: Sequence[Any]
    cached: CachedReduction
    not_packed: list[Adopted]
    request: ReduceRequest

    @property
    def hash(self) -> int:
        """Hash of the memory orders and of `checks`, which must be equal on all ranks, as the tensors and options."""
        return header.mix(self.cached.descriptor.note, self.request.checks)


class ReductionResult(NamedTuple):
    """The arrays, and the flags of a reduction with `checks`."""

    arrays: Any
    flags: NonfiniteFlags | None


class DeviceReductions(DeviceOperations):
    """Allreduces of arrays on GPUs."""

    def __init__(self, communicator: Group) -> None:
        super().__init__(communicator)
        self._descriptors: dict[Any, tuple[OpDescriptor, BucketPlan]] = {}
        self._cache: dict[Any, CachedReduction] = {}  # by the layout of the first array, and the request

    def start(self, arrays: Sequence[Any], request: ReduceRequest) -> Work[ReductionResult]:
        kind = "allreduce" if request.is_single else "grouped_allreduce"
        return self._begin(kind, request.name, lambda: self._reduction_steps(arrays, request))

    def prepare(self, arrays: Sequence[Any], request: ReduceRequest) -> PreparedReduction | None:
        """Prepare a reduction in place without a weight, so that the ranks can agree on it in the header exchange of
        another operation. None if it needs an exchange of its own, for example for an error."""
        try:
            return self._find_or_cache(arrays, request)
        except Exception:  # also of CUDA; `start` meets it again, and sends it to the other ranks
            return None

    def start_prepared(self, prepared: PreparedReduction) -> Work[ReductionResult]:
        """Start a prepared reduction. The preceding header exchange has compared it on all ranks (`hash`)."""

        def steps(lease: StreamLease) -> Steps[ReductionResult]:
            group = self.communicator.begin_without_header(prepared.cached.descriptor)
            devices = yield from self._wait_for_turn(group)
            return (yield from self._reduce_in_memory_order(group, devices, lease, prepared))

        name = prepared.request.name
        return self._begin("grouped_allreduce", name, lambda: steps(self._lease(prepared)), agreed=True)

    def _reduction_steps(self, arrays: Sequence[Any], request: ReduceRequest) -> Steps[ReductionResult]:
        if not (isinstance(request.op, ReduceOp) and isinstance(request.compression, Compression)):
            group_descriptor([], request.name, request.op, request.compression)  # raises
        if (prepared := self._find_or_cache(arrays, request)) is not None:
            return self._agree_and_reduce(prepared, self._lease(prepared))
        given = self._adopt(arrays, request)
        lease = self.devices.device.lease([one.stream for one in given], request.independent)
        return self._agree_and_reduce_in_c_order(arrays, given, lease, *self._describe(given, request), request)

    def _adopt(self, arrays: Sequence[Any], request: ReduceRequest) -> list[Adopted]:
        given = [adopt_on(value, self.devices.device.index) for value in arrays]
        if request.in_place:
            check_writable(given)
        return given

    def _lease(self, prepared: PreparedReduction) -> StreamLease:
        return self.devices.device.lease(prepared.cached.streams, prepared.request.independent)

    def _find_or_cache(self, arrays: Sequence[Any], request: ReduceRequest) -> PreparedReduction | None:
        """Find the reduction in the cache, or add it. None if it cannot be cached."""
        where = layouts(arrays) if request.in_place and not request.is_single else None
        if not where:
            return None
        key = where[0], request.plan_key
        cached = self._cache.get(key)
        if cached is None or cached.layouts != where:
            given = self._adopt(arrays, request)
            orders = [order for one in given if (order := memory_order(one.array)) is not None]
            if len(orders) < len(given):
                return None
            cached = self._new_reduction(where, given, orders, request)
            _add(self._cache, key, cached)
        not_packed = [adopt_on(arrays[position], self.devices.device.index) for position in cached.plan.not_packed]
        return PreparedReduction(arrays, cached, not_packed, request)

    def _new_reduction(
        self, where: list[Any], given: list[Adopted], orders: list[tuple[int, ...]], request: ReduceRequest
    ) -> CachedReduction:
        descriptor, plan = self._describe(given, request)
        if any(list(order) != sorted(order) for order in orders):
            descriptor = dataclasses.replace(descriptor, note=header.hash_text(repr(orders)))
        flat = [real_numbers(one.in_memory_order(order)) for one, order in zip(given, orders, strict=True)]
        tables = [tables_of(bucket, flat, flat, self.devices.device) for bucket in plan.buckets]
        streams = list(dict.fromkeys(one.stream for one in given))
        return CachedReduction(where, descriptor, streams, plan, tables, orders)

    def _agree_and_reduce(self, prepared: PreparedReduction, lease: StreamLease) -> Steps[ReductionResult]:
        group, devices, headers = yield from self._agree(prepared.cached.descriptor)
        if len({header.own_fields(record).note for record in headers}) > 1:
            arrays, plan, request = prepared.arrays, prepared.cached.plan, prepared.request
            given = [adopt_on(value, self.devices.device.index) for value in arrays]  # as checked before: no error
            return (yield from self._reduce_in_c_order(group, devices, arrays, given, lease, plan, request))
        return (yield from self._reduce_in_memory_order(group, devices, lease, prepared))

    def _reduce_in_memory_order(
        self, group: Group, devices: DeviceBackend, lease: StreamLease, prepared: PreparedReduction
    ) -> Steps[ReductionResult]:
        arrays, cached, not_packed, request = prepared
        if request.checks and cached.flags is None:
            cached.flags = self._new_flags(cached.plan)
        flat_arrays = {}
        for position, one in zip(cached.plan.not_packed, not_packed, strict=True):
            flat = real_numbers(one.in_memory_order(cached.orders[position]))
            flat_arrays[position] = flat, flat
        stream = yield from reduce_buckets(
            devices, group.size, lease, cached.plan, cached.tables, flat_arrays, request, cached.flags
        )
        self._end(devices, lease, arrays, flat_arrays, cached, stream=stream)
        return ReductionResult(list(arrays), cached.flags)

    def _new_flags(self, plan: BucketPlan) -> NonfiniteFlags:
        device = self.devices.device
        device.use()
        with device.unpacking:
            return NonfiniteFlags(device, plan.buckets)

    def _agree_and_reduce_in_c_order(
        self, arrays: Sequence[Any], given: list[Adopted], lease: StreamLease, descriptor: OpDescriptor,
        plan: BucketPlan, request: ReduceRequest,
    ) -> Steps[ReductionResult]:  # fmt: skip
        group, devices, _ = yield from self._agree(descriptor)
        return (yield from self._reduce_in_c_order(group, devices, arrays, given, lease, plan, request))

    def _reduce_in_c_order(
        self, group: Group, devices: DeviceBackend, arrays: Sequence[Any], given: list[Adopted], lease: StreamLease,
        plan: BucketPlan, request: ReduceRequest,
    ) -> Steps[ReductionResult]:  # fmt: skip
        """Reduce arrays of any layout. Those with gaps are copied on the packing stream and back on the last stream."""
        device, in_place = self.devices.device, request.in_place
        made = [] if in_place else lease.empty([(one.shape, one.array.dtype) for one in given])
        with lease.enter(device.packing):
            sources = [real_numbers(one.flat()) if in_place else _source(one, made[i]) for i, one in enumerate(given)]
        targets = sources if in_place else [real_numbers(new.reshape(-1)) for new in made]
        flat_arrays = {position: (sources[position], targets[position]) for position in plan.not_packed}
        if plan.direct:
            device.communication.wait_event(device.record(device.packing))
        tables = [tables_of(bucket, sources, targets, device) for bucket in plan.buckets]
        flags = self._new_flags(plan) if request.checks else None
        stream = yield from reduce_buckets(devices, group.size, lease, plan, tables, flat_arrays, request, flags)
        with lease.enter(stream):
            for one, flat in zip(given, sources, strict=True):
                if in_place and not one.array.flags.c_contiguous:
                    one.array[...] = flat.view(one.array.dtype).reshape(one.array.shape)
        self._end(devices, lease, given, sources, targets, flags, stream=stream)
        results = list(arrays) if in_place else [one.to_caller(new) for one, new in zip(given, made, strict=True)]
        return ReductionResult(results[0] if request.is_single else results, flags)

    def _describe(self, given: list[Adopted], request: ReduceRequest) -> tuple[OpDescriptor, BucketPlan]:
        """Return the descriptor and the plan, from a cache if the same call was made before."""
        op, name, compression = request.op, request.name, request.compression
        key = request.plan_key, tuple([(one.shape, one.dtype) for one in given])
        found = self._descriptors.get(key)
        if found is None:
            if request.is_single:
                descriptor = array_descriptor("allreduce", cast(Array, given[0]), name, op, compression=compression)
            else:
                descriptor = group_descriptor(cast(list[Array], given), name, op, compression)
            for one in given:
                refuse_product(op, one.dtype)
            plan = plan_buckets([one.shape for one in given], [one.dtype for one in given], request)
            found = on_gpu(descriptor), plan
            _add(self._descriptors, key, found)
        return found


def _add(cache: dict[Any, Any], key: Any, value: Any) -> None:
    """Add an entry, and remove the oldest one if there are too many."""
    cache.pop(key, None)
    if len(cache) >= _KEPT:
        cache.pop(next(iter(cache)))
    cache[key] = value


def _source(given: Adopted, made: Any) -> Any:
    """Return the numbers as a flat array: a view if `given` is contiguous, else a copy in `made`."""
    if given.array.flags.c_contiguous:
        return real_numbers(given.flat())
    made[...] = given.array
    return real_numbers(made.reshape(-1))
