"""The backend of device arrays: cupy's, torch's on CUDA, and others', which may come beside host arrays.

It stands on a host backend, over which host arrays go as ever, and the headers and order of all operations: so ranks
that disagree, one with an array on the GPU and one without, say, are told so as everywhere. Once they agree the bytes
go through a transport on a stream of its own: NCCL, or the host (staged.py). An operation's `wait` orders the caller's
stream after it, and the host goes on.

A group travels in buckets: tensors of a dtype are packed one after the other by one kernel and unpacked by one, which
scale and cast on the way. A bucket of one array is reduced where it lies.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from allred import arrays
from allred.arrays import Array
from allred.comm import header
from allred.comm.base import Communicator, T
from allred.comm.beside import Beside
from allred.comm.calls import array_call, group_call, index_of, splits_of
from allred.comm.header import Call
from allred.comm.nccl_calls import Transport, adopted, buckets, check_writable, on_gpu, refused
from allred.comm.nccl_guard import Guard
from allred.comm.nccl_wire import HALVES, element
from allred.comm.ops import ReduceOp
from allred.comm.work import Steps, Work
from allred.compression import Compression, narrows
from allred.errors import InputError
from allred.gpu.device import Device, Lane
from allred.gpu.kernels import starts
from allred.gpu.values import Adopted, is_device

BUCKET_BYTES = 2**25  # a GPU's fusion buffer: large enough that NCCL runs at full speed
_PLAIN = Compression.none
_KEPT = 64  # calls


class NcclCommunicator(Beside):
    """The ranks of `host`, which becomes this object's own."""

    name = "nccl"

    def __init__(self, host: Communicator, device: Device, transport: Transport, guard: Guard) -> None:
        super().__init__(host)
        self.device = device
        self._transport, self._guard = transport, guard
        self._buffers: dict[Any, Any] = {}  # by dtype
        self._calls: dict[Any, tuple[Call, list[list[int]]]] = {}

    def close(self) -> None:
        self._transport.close(self._guard.close() and not self.queue.poisoned)
        self._buffers.clear()
        super().close()

    def allreduce(
        self, value: Any, op: ReduceOp = ReduceOp.AVERAGE, name: str = "", compression: Compression = _PLAIN
    ) -> Work[Any]:
        if not is_device(value):
            return self._host.allreduce(value, op, name, compression)
        return self._begin("allreduce", name, [value], self._reduction([value], False, op, name, compression, one=True))

    def allreduce_(
        self, array: Any, op: ReduceOp = ReduceOp.AVERAGE, name: str = "", compression: Compression = _PLAIN
    ) -> Work[Any]:
        if not is_device(array):
            return self._host.allreduce_(array, op, name, compression)
        return self._begin("allreduce", name, [array], self._reduction([array], True, op, name, compression, one=True))

    def allreduce_now(
        self, value: Any, in_place: bool, op: ReduceOp, name: str, compression: Compression = _PLAIN
    ) -> Any:
        if not is_device(value):
            return self._host.allreduce_now(value, in_place, op, name, compression)
        return super().allreduce_now(value, in_place, op, name, compression)

    def grouped_allreduce(
        self,
        group: Sequence[Any],
        op: ReduceOp = ReduceOp.AVERAGE,
        name: str = "",
        compression: Compression = _PLAIN,
    ) -> Work[list[Any]]:
        if not any(map(is_device, group)):
            return self._host.grouped_allreduce(group, op, name, compression)
        return self._begin("grouped_allreduce", name, group, self._reduction(group, False, op, name, compression))

    def grouped_allreduce_(
        self,
        group: Sequence[Any],
        op: ReduceOp = ReduceOp.AVERAGE,
        name: str = "",
        compression: Compression = _PLAIN,
    ) -> Work[list[Any]]:
        if not any(map(is_device, group)):
            return self._host.grouped_allreduce_(group, op, name, compression)
        return self._begin("grouped_allreduce", name, group, self._reduction(group, True, op, name, compression))

    def grouped_allreduce_now(
        self, group: Sequence[Any], in_place: bool, op: ReduceOp, name: str, compression: Compression = _PLAIN
    ) -> list[Any]:
        if not any(map(is_device, group)):
            return self._host.grouped_allreduce_now(group, in_place, op, name, compression)
        return super().grouped_allreduce_now(group, in_place, op, name, compression)

    def weighted_allreduce_(
        self, group: Sequence[Any], op: ReduceOp, name: str, compression: Compression, weight: float | None
    ) -> Work[list[Any]]:
        """Gradients on the GPU: grouped_allreduce_ of them, multiplied by this rank's `weight` where that is not None.

        16-bit floats are weighted in float32, summed as such and rounded once. A weight of 0 makes zeros of NaN too.
        """
        return self._begin(
            "grouped_allreduce", name, group, self._reduction(group, True, op, name, compression, weight)
        )

    def _reduction(
        self, values: Sequence[Any], in_place: bool, op: ReduceOp, name: str, compression: Compression,
        weight: float | None = None, one: bool = False,
    ) -> Callable[[list[Adopted], Lane], Steps[Any]]:  # fmt: skip
        def body(given: list[Adopted], lane: Lane) -> Steps[Any]:
            if in_place:
                check_writable(given)
            call, together = self._reduction_call(given, op, name, compression, one)
            group, _ = yield from self._agreed(call)
            made = [] if in_place else lane.empty([(g.shape, g.array.dtype) for g in given])
            with lane.enter():
                flats = [g.flat() for g in given] if in_place else _copies(given, made)
            for bucket in together:
                chosen = [flats[i] for i in bucket]
                yield from group._reduce_bucket(lane, chosen, given[bucket[0]].dtype, op, compression, weight)
            with lane.enter():
                for g, flat in zip(given, flats, strict=True):
                    if in_place and not g.array.flags.c_contiguous:
                        g.array[...] = flat.reshape(g.array.shape)
            self._end(group, lane, given, flats)
            results = list(values)
            if not in_place:
                results = [g.give(new) for g, new in zip(given, made, strict=True)]
            return results[0] if one else results

        return body

    def _reduce_bucket(
        self, lane: Lane, flats: list[Any], dtype: np.dtype[Any], op: ReduceOp, compression: Compression,
        weight: float | None,
    ) -> Steps[None]:  # fmt: skip
        """Tensors of one dtype; several, or those with a weight, through the buffer."""
        name, size, kernels = arrays.name_of(dtype), self.size, self.device.kernels
        wire = arrays.DTYPES[compression.value] if narrows(dtype, compression.value) else ""
        if weight is not None and not arrays.is_float(dtype):  # which counts whole or, weighted 0, not at all
            if not weight:
                with lane.enter():
                    for flat in flats:
                        flat.fill(0)
            weight = None
        if len(flats) == 1 and weight is None:
            self._sent_bytes += flats[0].nbytes // (dtype.itemsize // 2 if wire else 1)
            yield from self._transport.allreduce(lane, flats[0], name, op, wire)
            return
        moved = arrays.accumulator(dtype) if weight is not None else element(name)
        carried = moved.name if weight is not None else name
        divides = op is ReduceOp.AVERAGE and not wire and carried not in HALVES  # by the kernel that unpacks
        with lane.enter():
            buffer = self._buffer([flat.size for flat in flats], moved)
            kernels.pack(flats, name, buffer, weight)
        inner = ReduceOp.SUM if divides else op
        self._sent_bytes += buffer.nbytes // (dtype.itemsize // 2 if wire else 1)
        yield from self._transport.allreduce(lane, buffer, carried, inner, wire)
        with lane.enter():
            divisor = float(size) if divides else None if weight is None else 1.0
            kernels.unpack(buffer, flats, name, divisor)

    def _buffer(self, counts: list[int], dtype: np.dtype[Any]) -> Any:
        """Room for a bucket, with the gaps between tensors; nothing but operations, one after the other, uses it."""
        room = starts(counts, dtype.itemsize)[-1]
        if dtype not in self._buffers or self._buffers[dtype].size < room:
            self._buffers[dtype] = self.device.xp.zeros(room, dtype)
        return self._buffers[dtype][:room]

    def _reduction_call(
        self, given: list[Adopted], op: ReduceOp, name: str, compression: Compression, one: bool
    ) -> tuple[Call, list[list[int]]]:
        """What the ranks compare, and what travels together; found once for what comes at every step."""
        if not (isinstance(op, ReduceOp) and isinstance(compression, Compression)):
            group_call([], name, op, compression)  # raises
        key = one, name, op, compression, tuple([(g.shape, g.dtype) for g in given])
        found = self._calls.get(key)
        if found is None:
            if one:
                call = array_call("allreduce", cast(Array, given[0]), name, op, compression=compression)
            else:
                call = group_call(cast(list[Array], given), name, op, compression)
            found = on_gpu(call), buckets([g.nbytes for g in given], [g.dtype for g in given], BUCKET_BYTES)
            if len(self._calls) >= _KEPT:
                self._calls.clear()
            self._calls[key] = found
        return found

    def broadcast(self, value: Any, root: int = 0, name: str = "") -> Work[Any]:
        if not is_device(value):
            return self._host.broadcast(value, root, name)
        return self._cast_on_gpu(value, root, name, in_place=False)

    def broadcast_(self, array: Any, root: int = 0, name: str = "") -> Work[Any]:
        if not is_device(array):
            return self._host.broadcast_(array, root, name)
        return self._cast_on_gpu(array, root, name, in_place=True)

    def _cast_on_gpu(self, value: Any, root: int, name: str, in_place: bool) -> Work[Any]:
        def body(given: list[Adopted], lane: Lane) -> Steps[Any]:
            (g,) = given
            source = index_of(root, self.ranks)
            if in_place:
                check_writable(given)
            call = on_gpu(array_call("broadcast", cast(Array, g), name, root=self.ranks[source]))
            group, _ = yield from self._agreed(call)
            first = self._root_in(group, source, call)
            made = [] if in_place else lane.empty([(g.shape, g.array.dtype)])
            with lane.enter():
                (flat,) = [g.flat()] if in_place else _copies(given, made)
            if flat.size:
                yield from group._transport.broadcast(lane, flat.view(np.uint8), first)
            with lane.enter():
                if in_place and not g.array.flags.c_contiguous:
                    g.array[...] = flat.reshape(g.array.shape)
            self._end(group, lane, given, flat)
            return value if in_place else g.give(made[0])

        return self._begin("broadcast", name, [value], body)

    def allgather(self, value: Any, name: str = "") -> Work[Any]:
        if not is_device(value):
            return self._host.allgather(value, name)

        def body(given: list[Adopted], lane: Lane) -> Steps[Any]:
            (g,) = given
            shape = g.shape or (1,)
            call = array_call("allgather", cast(Array, g), name, shape=("any", *shape[1:]), rows=shape[0])
            group, headers = yield from self._agreed(on_gpu(call))
            rows = [header.rows_and_note(record)[0] for record in headers]
            (result,) = lane.empty([((sum(rows), *shape[1:]), g.array.dtype)])
            with lane.enter():
                send = g.flat().view(np.uint8)
            if result.size:
                row_bytes = arrays.size_of(shape[1:]) * g.array.itemsize
                recv = result.reshape(-1).view(np.uint8)
                yield from group._transport.allgather(lane, send, recv, [count * row_bytes for count in rows])
            self._end(group, lane, given, result)
            return g.give(result)

        return self._begin("allgather", name, [value], body)

    def reducescatter(self, value: Any, op: ReduceOp = ReduceOp.AVERAGE, name: str = "") -> Work[Any]:
        if not is_device(value):
            return self._host.reducescatter(value, op, name)

        def body(given: list[Adopted], lane: Lane) -> Steps[Any]:
            (g,) = given
            call = on_gpu(array_call("reducescatter", cast(Array, g), name, op))
            if not g.shape:
                raise InputError("a 0-d array has no first dimension to split; use allreduce")
            group, _ = yield from self._agreed(call)
            self._require_all(group, call)
            rows = arrays.split_sizes(g.shape[0], self.size)
            counts = [count * arrays.size_of(g.shape[1:]) for count in rows]
            (result,) = lane.empty([((rows[self.rank], *g.shape[1:]), g.array.dtype)])
            with lane.enter():
                flat = g.flat()
            if flat.size:
                out = result.reshape(-1)
                yield from self._transport.reducescatter(lane, flat, out, arrays.name_of(g.dtype), counts, op)
            self._end(group, lane, given, result)
            return g.give(result)

        return self._begin("reducescatter", name, [value], body)

    def alltoall(self, value: Any, splits: Sequence[int] | None = None, name: str = "") -> Work[tuple[Any, Array]]:
        if not is_device(value):
            return self._host.alltoall(value, splits, name)

        def body(given: list[Adopted], lane: Lane) -> Steps[tuple[Any, Array]]:
            (g,) = given
            shape = g.shape or (1,)
            sent = splits_of(shape[0], splits, self.size)
            call = on_gpu(array_call("alltoall", cast(Array, g), name, shape=("any", *shape[1:])))
            group, _ = yield from self._agreed(call)
            self._require_all(group, call)
            matrix = np.empty((self.size, self.size), np.int64)
            yield from self._host._allgather(arrays.as_bytes(sent), arrays.as_bytes(matrix), [sent.nbytes] * self.size)
            received = matrix[:, self.rank].copy()
            (result,) = lane.empty([((int(received.sum()), *shape[1:]), g.array.dtype)])
            with lane.enter():
                send = g.flat().view(np.uint8)
            counts = matrix * (arrays.size_of(shape[1:]) * g.array.itemsize)
            if counts.any():
                yield from self._transport.alltoall(lane, send, result.reshape(-1).view(np.uint8), counts)
            self._end(self, lane, given, result)
            return g.give(result), received

        return self._begin("alltoall", name, [value], body)

    def _begin(
        self, kind: str, name: str, values: Sequence[Any], body: Callable[[list[Adopted], Lane], Steps[T]]
    ) -> Work[T]:
        """Start an operation on device arrays. It comes after what the caller's streams hold now. What is wrong with
        the arrays the other ranks are told in place of a header."""
        steps: Steps[T]
        try:
            given = [adopted(value, self.device.index) for value in values]
            steps = body(given, self.device.lane([one.stream for one in given]))
        except Exception as error:
            steps = refused(error)
        return self._start(kind, name, steps)

    def _agreed(self, call: Call) -> "Steps[tuple[NcclCommunicator, list[bytes]]]":
        """The communicator that moves the bytes, of all ranks that have not joined, and their headers; it is ready."""
        moving, headers = yield from self._agree(call)
        group = moving if isinstance(moving, NcclCommunicator) else self
        yield from group._transport.ready()
        return group, headers

    def _end(self, group: "NcclCommunicator", lane: Lane, *kept: Any) -> None:
        """All of the operation that runs is enqueued: `wait` orders the caller's streams after it."""
        work = self.queue.advancing
        assert work is not None
        work.end = group._guard.watch(lane.end(kept), work.title)


def _copies(given: list[Adopted], made: list[Any]) -> list[Any]:
    """What was given, in the memory that was made for it; flat."""
    for one, new in zip(given, made, strict=True):
        new[...] = one.array
    return [new.reshape(-1) for new in made]
