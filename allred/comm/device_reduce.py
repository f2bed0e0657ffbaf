"""How device arrays are reduced, most of them in groups: the gradients of a step. And what all their collectives share.

A group travels in buckets: tensors of a dtype are packed one after the other by one kernel and unpacked by one, which
scale and cast on the way. A bucket of one array is reduced where it lies.

Training brings the same group at every step. So what was found out about one (header, buckets, the tables of addresses
that the kernels read) is used again when arrays come that lie where those did, in the same layout: `Known`. It holds
addresses and no array. Who owns the memory now makes no difference to what a kernel has to know.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from allred import arrays
from allred.arrays import Array
from allred.comm.arguments import array_call, group_call
from allred.comm.backends.nccl_guard import Guard
from allred.comm.beside import Beside
from allred.comm.communicator import Communicator, T
from allred.comm.device_arguments import Transport, adopted, buckets, check_writable, on_gpu, refused
from allred.comm.header import Call
from allred.comm.ops import ReduceOp
from allred.comm.work import Steps, Work
from allred.compression import Compression, narrows
from allred.gpu.device import Device, Handle, Lane
from allred.gpu.halves import HALVES, element
from allred.gpu.kernels import Table
from allred.gpu.values import Adopted, layouts

BUCKET_BYTES = 2**25  # a GPU's fusion buffer: large enough that NCCL runs at full speed
_KEPT = 64  # calls, and groups


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Tensors of a group that travel together, by position; of this dtype. source, target: where they are packed from
    and unpacked to, into a buffer of dtype `moved` and from it; None: there is one, which is reduced where it lies."""

    positions: list[int]
    dtype: np.dtype[Any]
    moved: np.dtype[Any]
    source: Table | None
    target: Table | None


@dataclasses.dataclass(frozen=True)
class Known:
    """A group that has come before, to be reduced in place."""

    layouts: list[Any]  # what must be the same
    call: Call
    streams: list[Handle | None]  # of its callers
    buckets: list[Bucket]


class Wanted(NamedTuple):
    """What somebody asks for. weight: see `weighted_allreduce_`. one: an array, which is no group of one."""

    op: ReduceOp
    name: str
    compression: Compression
    in_place: bool
    weight: float | None = None
    one: bool = False


class Reductions(Beside):
    """Of device arrays, between the ranks of `host`, which becomes this object's own."""

    def __init__(self, host: Communicator, device: Device, transport: Transport, guard: Guard) -> None:
        super().__init__(host)
        self.device = device
        self._transport, self._guard = transport, guard
        self._buffers: dict[Any, Any] = {}  # by dtype
        self._calls: dict[Any, tuple[Call, list[list[int]]]] = {}
        self._known: dict[Any, Known] = {}  # the last one that began with an array there

    def close(self) -> None:
        self._transport.close(self._guard.close() and not self.queue.poisoned)
        self._buffers.clear()
        self._known.clear()
        super().close()

    def weighted_allreduce_(
        self, group: Sequence[Any], op: ReduceOp, name: str, compression: Compression, weight: float | None
    ) -> Work[list[Any]]:
        """Gradients on the GPU: grouped_allreduce_ of them, multiplied by this rank's `weight` where that is not None.

        16-bit floats are weighted in float32, summed as such and rounded once. A weight of 0 makes zeros of NaN too.
        """
        return self._reduction(group, Wanted(op, name, compression, True, weight))

    def _reduction(self, values: Sequence[Any], wanted: Wanted) -> Work[Any]:
        kind = "allreduce" if wanted.one else "grouped_allreduce"
        return self._begin(kind, wanted.name, lambda: self._reduction_steps(values, wanted))

    def _reduction_steps(self, values: Sequence[Any], wanted: Wanted) -> Steps[Any]:
        if not (isinstance(wanted.op, ReduceOp) and isinstance(wanted.compression, Compression)):
            group_call([], wanted.name, wanted.op, wanted.compression)  # raises
        where = layouts(values) if wanted.in_place and not wanted.one else None
        key = (where[0], wanted._replace(weight=None), wanted.weight is None) if where else None
        known = self._known.get(key)
        if known is None or known.layouts != where:
            given = [adopted(value, self.device.index) for value in values]
            if wanted.in_place:
                check_writable(given)
            call, together = self._reduction_call(given, wanted)
            streams = list(dict.fromkeys(one.stream for one in given))
            if not where or not all(one.array.flags.c_contiguous for one in given):
                return self._reduce_given(values, given, self.device.lane(streams), call, together, wanted)
            there = [one.array for one in given]
            chosen = [self._bucket(each, given[each[0]].dtype, there, there, wanted) for each in together]
            known = Known(where, call, streams, chosen)
            if len(self._known) >= _KEPT:
                self._known.clear()
            self._known[key] = known
        flats = [None if one.source else adopted(values[one.positions[0]], self.device.index) for one in known.buckets]
        return self._reduce_known(list(values), flats, known, self.device.lane(known.streams), wanted)

    def _reduce_known(
        self, values: list[Any], flats: list[Adopted | None], known: Known, lane: Lane, wanted: Wanted
    ) -> Steps[list[Any]]:
        """In place, of contiguous arrays that lie there. flats: by bucket, the array that is reduced where it lies,
        looked at before the ranks agree: what is wrong with it then, the others would not hear of."""
        group, _ = yield from self._agreed(known.call)
        for bucket, one in zip(known.buckets, flats, strict=True):
            yield from group._reduce_bucket(lane, bucket, one and one.flat(), wanted)
        self._end(group, lane, values, flats)
        return values

    def _reduce_given(
        self, values: Sequence[Any], given: list[Adopted], lane: Lane, call: Call, together: list[list[int]],
        wanted: Wanted,
    ) -> Steps[Any]:  # fmt: skip
        """Of any layout, in place or not."""
        group, _ = yield from self._agreed(call)
        made = [] if wanted.in_place else lane.empty([(one.shape, one.array.dtype) for one in given])
        with lane.enter():
            sources = [one.flat() for one in given] if wanted.in_place else list(map(_source, given, made))
        targets = sources if wanted.in_place else [new.reshape(-1) for new in made]
        for positions in together:
            first = positions[0]
            bucket = self._bucket(positions, given[first].dtype, sources, targets, wanted)
            if not bucket.source and not wanted.in_place:
                with lane.enter():
                    targets[first][...] = sources[first]
            yield from group._reduce_bucket(lane, bucket, targets[first], wanted)
        with lane.enter():
            for one, flat in zip(given, sources, strict=True):
                if wanted.in_place and not one.array.flags.c_contiguous:
                    one.array[...] = flat.reshape(one.array.shape)
        self._end(group, lane, given, sources, targets)
        results = list(values) if wanted.in_place else [one.give(new) for one, new in zip(given, made, strict=True)]
        return results[0] if wanted.one else results

    def _bucket(
        self, positions: list[int], dtype: np.dtype[Any], sources: list[Any], targets: list[Any], wanted: Wanted
    ) -> Bucket:
        """Tensors of one dtype; several, or those with a weight, pass through the buffer."""
        weighs = wanted.weight is not None and arrays.is_float(dtype)
        moved = arrays.accumulator(dtype) if weighs else element(arrays.name_of(dtype))
        if len(positions) == 1 and not weighs:
            return Bucket(positions, dtype, moved, None, None)
        source, target = (
            self.device.kernels.table([there[i] for i in positions], moved.itemsize) for there in (sources, targets)
        )
        return Bucket(positions, dtype, moved, source, target)

    def _reduce_bucket(self, lane: Lane, bucket: Bucket, flat: Any, wanted: Wanted) -> Steps[None]:
        """flat: the array, where it is one that is reduced where it lies."""
        dtype, moved, op, weight = bucket.dtype, bucket.moved, wanted.op, wanted.weight
        name, kernels = arrays.name_of(dtype), self.device.kernels
        wire = arrays.DTYPES[wanted.compression.value] if narrows(dtype, wanted.compression.value) else ""
        weighs = weight is not None and arrays.is_float(dtype)
        nothing = weight == 0 and not weighs  # integers count whole or, weighted 0, not at all
        if not bucket.source or not bucket.target:
            if nothing:
                with lane.enter():
                    flat.fill(0)
            self._sent_bytes += flat.nbytes // (dtype.itemsize // 2 if wire else 1)
            yield from self._transport.allreduce(lane, flat, name, op, wire)
            return
        carried = moved.name if weighs else name
        divides = op is ReduceOp.AVERAGE and not wire and carried not in HALVES  # by the kernel that unpacks
        with lane.enter():
            buffer = self._buffer(bucket.source.room, moved)
            if nothing:
                buffer.fill(0)
            else:
                kernels.pack(bucket.source, name, buffer, weight if weighs else None)
        inner = ReduceOp.SUM if divides else op
        self._sent_bytes += buffer.nbytes // (dtype.itemsize // 2 if wire else 1)
        yield from self._transport.allreduce(lane, buffer, carried, inner, wire)
        with lane.enter():
            divisor = float(self.size) if divides else 1.0 if weighs else None
            kernels.unpack(buffer, bucket.target, name, divisor)

    def _buffer(self, room: int, dtype: np.dtype[Any]) -> Any:
        """Room for a bucket, with the gaps between tensors; nothing but operations, one after the other, uses it."""
        if dtype not in self._buffers or self._buffers[dtype].size < room:
            self._buffers[dtype] = self.device.xp.zeros(room, dtype)
        return self._buffers[dtype][:room]

    def _reduction_call(self, given: list[Adopted], wanted: Wanted) -> tuple[Call, list[list[int]]]:
        """What the ranks compare, and what travels together; found once for what comes at every step."""
        op, name, compression = wanted.op, wanted.name, wanted.compression
        key = wanted.one, name, op, compression, tuple([(one.shape, one.dtype) for one in given])
        found = self._calls.get(key)
        if found is None:
            if wanted.one:
                call = array_call("allreduce", cast(Array, given[0]), name, op, compression=compression)
            else:
                call = group_call(cast(list[Array], given), name, op, compression)
            found = on_gpu(call), buckets([one.nbytes for one in given], [one.dtype for one in given], BUCKET_BYTES)
            if len(self._calls) >= _KEPT:
                self._calls.clear()
            self._calls[key] = found
        return found

    # What all collectives of device arrays have in common.

    def _begin(self, kind: str, name: str, make: Callable[[], Steps[T]]) -> Work[T]:
        """Start an operation on device arrays. It comes after what the caller's streams hold now. What is wrong with
        the arrays, as `make` finds it, the other ranks are told in place of a header."""
        steps: Steps[T]
        try:
            steps = make()
        except Exception as error:
            steps = refused(error)
        return self._start(kind, name, steps)

    def _agreed(self, call: Call) -> "Steps[tuple[Reductions, list[bytes]]]":
        """The communicator that moves the bytes, of all ranks that have not joined, and their headers; it is ready."""
        moving, headers = yield from self._agree(call)
        group = moving if isinstance(moving, Reductions) else self
        yield from group._transport.ready()
        return group, headers

    def _end(self, group: "Reductions", lane: Lane, *kept: Any) -> None:
        """All of the operation that runs is enqueued: `wait` orders the caller's streams after it."""
        work = self.queue.advancing
        assert work is not None
        work.end = group._guard.watch(lane.end(kept), work.title)


def _source(given: Adopted, made: Any) -> Any:
    """What was given as memory in one piece: its own, or what was made for the result."""
    if given.array.flags.c_contiguous:
        return given.flat()
    made[...] = given.array
    return made.reshape(-1)
