"""The allreduce of arrays on GPUs, usually in groups: the gradients of a step.

Training reduces the same group at every step. So the header, the buckets and the tables of addresses for the kernels
are kept, and used again for arrays at the same addresses with the same layout: `CachedGroup`. It holds addresses, no
arrays; a kernel does not depend on who owns the memory.

The arrays of such a group are reduced in the order in which their elements lie in memory, without a copy, also in
torch's format channels_last. The ranks compare these orders. If they differ, all reduce in C order, as they do arrays
with gaps; a rank without a gradient, for example, sends zeros in C order.
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
from allred.comm.device_operation import DeviceOperations, adopt_on, check_writable, on_gpu
from allred.comm.group import Group
from allred.comm.header import OpDescriptor
from allred.comm.ops import Compression, ReduceOp
from allred.comm.work import Steps, Work
from allred.errors import InputError
from allred.gpu.device_arrays import Adopted, layouts, memory_order
from allred.gpu.streams import StreamHandle, StreamLease

_KEPT = 64  # descriptors, and groups


@dataclasses.dataclass
class CachedGroup:
    """A group that was reduced in place before. streams: the current streams of its owners."""

    layouts: list[Any]  # of the arrays; the cache applies only if these are equal
    descriptor: OpDescriptor  # its note is 0 for arrays in C order, else a hash of the memory orders
    streams: list[StreamHandle | None]
    plan: BucketPlan
    tables: list[BucketTables]
    unpacked: list[int]  # see BucketPlan
    orders: list[tuple[int, ...]]  # of the arrays: `memory_order`
    flags: NonfiniteFlags | None = None


class PreparedReduction(NamedTuple):
    """An allreduce in place of a cached group, before the ranks agree.

    unpacked: the arrays in `group.unpacked`. They are checked before the ranks agree, because the other ranks would not
    receive an error after that."""

    values: Sequence[Any]
    group: CachedGroup
    unpacked: list[Adopted]
    request: ReduceRequest


class ReductionResult(NamedTuple):
    """The arrays, and the flags of a reduction with `checks`."""

    values: Any
    flags: NonfiniteFlags | None


class DeviceReductions(DeviceOperations):
    """Allreduces of arrays on GPUs."""

    def __init__(self, communicator: Group) -> None:
        super().__init__(communicator)
        self._descriptors: dict[Any, tuple[OpDescriptor, BucketPlan]] = {}
        self._cache: dict[Any, CachedGroup] = {}  # by the address of the first array

    def weighted_allreduce_(
        self, group: Sequence[Any], op: ReduceOp, name: str, compression: Compression, weight: float | None,
        checks: bool = False, independent: bool = False,
    ) -> Work[ReductionResult]:  # fmt: skip
        """grouped_allreduce_ of gradients on GPUs, multiplied by this rank's `weight` before (None: by 1).

        16-bit floats with a weight are multiplied and summed in float32 and rounded once. A weight of 0 also turns NaN
        into 0. checks: results that are not finite are not written, see NonfiniteFlags. independent: see StreamLease.
        """
        request = ReduceRequest(op, name, compression, True, weight, checks=checks, independent=independent)
        return self._begin("grouped_allreduce", name, lambda: self._reduction_steps(group, request))

    def prepare(
        self, group: Sequence[Any], op: ReduceOp, name: str, compression: Compression, checks: bool
    ) -> PreparedReduction | None:
        """Prepare `weighted_allreduce_` without a weight, so that the ranks can agree on it in the header exchange of
        another operation. None if it needs an exchange of its own, for example for an error."""
        try:
            return self._prepare(group, ReduceRequest(op, name, compression, True, checks=checks))
        except InputError:
            return None

    def reduce_prepared(self, prepared: PreparedReduction) -> Work[ReductionResult]:
        """Reduce what `prepare` returned. The header exchange of the operation before has shown that all ranks do the
        same, with arrays in the same memory order."""
        return self._begin("grouped_allreduce", prepared.request.name, lambda: self._prepared_steps(prepared), True)

    def _prepared_steps(self, prepared: PreparedReduction) -> Steps[ReductionResult]:
        lease = self._lease(prepared)
        group = self.communicator.begin_without_header(prepared.group.descriptor)
        devices = yield from self._wait_for_turn(group)
        return (yield from self._reduce_prepared(group, devices, lease, prepared))

    def _reduction(self, values: Sequence[Any], request: ReduceRequest) -> Work[Any]:
        kind = "allreduce" if request.one else "grouped_allreduce"

        def steps(inner: Steps[ReductionResult]) -> Steps[Any]:
            return (yield from inner).values

        return self._begin(kind, request.name, lambda: steps(self._reduction_steps(values, request)))

    def _reduction_steps(self, values: Sequence[Any], request: ReduceRequest) -> Steps[ReductionResult]:
        if not (isinstance(request.op, ReduceOp) and isinstance(request.compression, Compression)):
            group_descriptor([], request.name, request.op, request.compression)  # raises
        if (prepared := self._prepare(values, request)) is not None:
            return self._agree_and_reduce(prepared, self._lease(prepared))
        given = self._adopt(values, request)
        lease = self.devices.device.lease([one.stream for one in given], request.independent)
        return self._reduce_given(values, given, lease, *self._describe(given, request), request)

    def _adopt(self, values: Sequence[Any], request: ReduceRequest) -> list[Adopted]:
        given = [adopt_on(value, self.devices.device.index) for value in values]
        if request.in_place:
            check_writable(given)
        return given

    def _lease(self, prepared: PreparedReduction) -> StreamLease:
        return self.devices.device.lease(prepared.group.streams, prepared.request.independent)

    def _prepare(self, values: Sequence[Any], request: ReduceRequest) -> PreparedReduction | None:
        """Find the group in the cache, or add it. None if it cannot be cached."""
        where = layouts(values) if request.in_place and not request.one else None
        if not where:
            return None
        key = where[0], request._replace(weight=None), request.weight is None
        cached = self._cache.get(key)
        if cached is None or cached.layouts != where:
            given = self._adopt(values, request)
            orders = [order for one in given if (order := memory_order(one.array)) is not None]
            if len(orders) < len(given):
                return None
            cached = self._new_group(where, given, orders, request)
            if len(self._cache) >= _KEPT:
                self._cache.clear()
            self._cache[key] = cached
        unpacked = [adopt_on(values[position], self.devices.device.index) for position in cached.unpacked]
        return PreparedReduction(values, cached, unpacked, request)

    def _new_group(
        self, where: list[Any], given: list[Adopted], orders: list[tuple[int, ...]], request: ReduceRequest
    ) -> CachedGroup:
        descriptor, plan = self._describe(given, request)
        if any(list(order) != sorted(order) for order in orders):
            descriptor = dataclasses.replace(descriptor, note=header.hash_text(repr(orders)))
        flats = [one.in_memory_order(order) for one, order in zip(given, orders, strict=True)]
        tables = [tables_of(bucket, flats, flats, self.devices.device) for bucket in plan.buckets]
        streams = list(dict.fromkeys(one.stream for one in given))
        return CachedGroup(where, descriptor, streams, plan, tables, plan.unpacked, orders)

    def _agree_and_reduce(self, prepared: PreparedReduction, lease: StreamLease) -> Steps[ReductionResult]:
        group, devices, headers = yield from self._agree(prepared.group.descriptor)
        if len({header.own_fields(record).note for record in headers}) > 1:
            values, request = prepared.values, prepared.request
            given = [adopt_on(value, self.devices.device.index) for value in values]
            return (
                yield from self._reduce_in_c_order(group, devices, values, given, lease, prepared.group.plan, request)
            )
        return (yield from self._reduce_prepared(group, devices, lease, prepared))

    def _reduce_prepared(
        self, group: Group, devices: DeviceBackend, lease: StreamLease, prepared: PreparedReduction
    ) -> Steps[ReductionResult]:
        values, cached, unpacked, request = prepared
        if request.checks and cached.flags is None:
            cached.flags = self._new_flags(lease, cached.plan)
        flats = {
            position: (flat := one.in_memory_order(cached.orders[position]), flat)
            for position, one in zip(cached.unpacked, unpacked, strict=True)
        }
        stream = yield from reduce_buckets(
            devices, group.size, lease, cached.plan, cached.tables, flats, request, cached.flags
        )
        self._end(devices, lease, values, flats, cached, stream=stream)
        return ReductionResult(list(values), cached.flags)

    def _new_flags(self, lease: StreamLease, plan: BucketPlan) -> NonfiniteFlags:
        with lease.enter(self.devices.device.unpacking):
            return NonfiniteFlags(self.devices.device, plan.buckets)

    def _reduce_given(
        self, values: Sequence[Any], given: list[Adopted], lease: StreamLease, descriptor: OpDescriptor,
        plan: BucketPlan, request: ReduceRequest,
    ) -> Steps[ReductionResult]:  # fmt: skip
        group, devices, _ = yield from self._agree(descriptor)
        return (yield from self._reduce_in_c_order(group, devices, values, given, lease, plan, request))

    def _reduce_in_c_order(
        self, group: Group, devices: DeviceBackend, values: Sequence[Any], given: list[Adopted], lease: StreamLease,
        plan: BucketPlan, request: ReduceRequest,
    ) -> Steps[ReductionResult]:  # fmt: skip
        """Reduce arrays of any layout. Those with gaps are copied on the packing stream and back on the last stream."""
        device, in_place = self.devices.device, request.in_place
        made = [] if in_place else lease.empty([(one.shape, one.array.dtype) for one in given])
        with lease.enter(device.packing):
            sources = [one.flat() for one in given] if in_place else list(map(_source, given, made))
        targets = sources if in_place else [new.reshape(-1) for new in made]
        flats = {position: (sources[position], targets[position]) for position in plan.unpacked}
        if plan.direct:
            device.stream.wait_event(device.record(device.packing))
        tables = [tables_of(bucket, sources, targets, device) for bucket in plan.buckets]
        flags = self._new_flags(lease, plan) if request.checks else None
        stream = yield from reduce_buckets(devices, group.size, lease, plan, tables, flats, request, flags)
        with lease.enter(stream):
            for one, flat in zip(given, sources, strict=True):
                if in_place and not one.array.flags.c_contiguous:
                    one.array[...] = flat.reshape(one.array.shape)
        self._end(devices, lease, given, sources, targets, flags, stream=stream)
        results = list(values) if in_place else [one.to_caller(new) for one, new in zip(given, made, strict=True)]
        return ReductionResult(results[0] if request.one else results, flags)

    def _describe(self, given: list[Adopted], request: ReduceRequest) -> tuple[OpDescriptor, BucketPlan]:
        """Return the descriptor and the plan, from a cache if the same call was made before."""
        op, name, compression = request.op, request.name, request.compression
        key = request._replace(weight=None), request.weight is None, tuple([(one.shape, one.dtype) for one in given])
        found = self._descriptors.get(key)
        if found is None:
            if request.one:
                descriptor = array_descriptor("allreduce", cast(Array, given[0]), name, op, compression=compression)
            else:
                descriptor = group_descriptor(cast(list[Array], given), name, op, compression)
            plan = plan_buckets([one.shape for one in given], [one.dtype for one in given], request)
            found = on_gpu(descriptor), plan
            if len(self._descriptors) >= _KEPT:
                self._descriptors.clear()
            self._descriptors[key] = found
        return found


def _source(given: Adopted, made: Any) -> Any:
    """Return the elements as a flat array: a view if `given` is contiguous, else a copy in `made`."""
    if given.array.flags.c_contiguous:
        return given.flat()
    made[...] = given.array
    return made.reshape(-1)
