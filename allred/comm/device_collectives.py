"""The backend of device arrays: cupy's, torch's on CUDA, and others', which may come beside host arrays.

It stands on a host backend, over which host arrays go as ever, and the headers and order of all operations: so ranks
that disagree, one with an array on the GPU and one without, say, are told so as everywhere. Once they agree the bytes
go through a transport on a stream of its own: NCCL, or the host (staged.py). An operation's `wait` orders the caller's
stream after it, and the host goes on.

Here are the collectives, as users call them; how arrays are reduced is in device_reduce.py.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from allred import arrays
from allred.arrays import Array
from allred.comm import header
from allred.comm.arguments import array_call, index_of, splits_of
from allred.comm.communicator import T
from allred.comm.device_arguments import adopted, check_writable, on_gpu
from allred.comm.device_reduce import Reductions, Wanted
from allred.comm.ops import ReduceOp
from allred.comm.work import Steps, Work
from allred.compression import Compression
from allred.errors import InputError
from allred.gpu.device import Lane
from allred.gpu.values import Adopted, is_device

_PLAIN = Compression.none


class NcclCommunicator(Reductions):
    """The ranks of `host`, which becomes this object's own."""

    name = "nccl"

    def allreduce(
        self, value: Any, op: ReduceOp = ReduceOp.AVERAGE, name: str = "", compression: Compression = _PLAIN
    ) -> Work[Any]:
        if not is_device(value):
            return self._host.allreduce(value, op, name, compression)
        return self._reduction([value], Wanted(op, name, compression, in_place=False, one=True))

    def allreduce_(
        self, array: Any, op: ReduceOp = ReduceOp.AVERAGE, name: str = "", compression: Compression = _PLAIN
    ) -> Work[Any]:
        if not is_device(array):
            return self._host.allreduce_(array, op, name, compression)
        return self._reduction([array], Wanted(op, name, compression, in_place=True, one=True))

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
        return self._reduction(group, Wanted(op, name, compression, in_place=False))

    def grouped_allreduce_(
        self,
        group: Sequence[Any],
        op: ReduceOp = ReduceOp.AVERAGE,
        name: str = "",
        compression: Compression = _PLAIN,
    ) -> Work[list[Any]]:
        if not any(map(is_device, group)):
            return self._host.grouped_allreduce_(group, op, name, compression)
        return self._reduction(group, Wanted(op, name, compression, in_place=True))

    def grouped_allreduce_now(
        self, group: Sequence[Any], in_place: bool, op: ReduceOp, name: str, compression: Compression = _PLAIN
    ) -> list[Any]:
        if not any(map(is_device, group)):
            return self._host.grouped_allreduce_now(group, in_place, op, name, compression)
        return super().grouped_allreduce_now(group, in_place, op, name, compression)

    def broadcast(self, value: Any, root: int = 0, name: str = "") -> Work[Any]:
        if not is_device(value):
            return self._host.broadcast(value, root, name)
        return self._cast_on_gpu(value, root, name, in_place=False)

    def broadcast_(self, array: Any, root: int = 0, name: str = "") -> Work[Any]:
        if not is_device(array):
            return self._host.broadcast_(array, root, name)
        return self._cast_on_gpu(array, root, name, in_place=True)

    def _cast_on_gpu(self, value: Any, root: int, name: str, in_place: bool) -> Work[Any]:
        def body(g: Adopted, lane: Lane) -> Steps[Any]:
            source = index_of(root, self.ranks)
            if in_place:
                check_writable([g])
            call = on_gpu(array_call("broadcast", cast(Array, g), name, root=self.ranks[source]))
            group, _ = yield from self._agreed(call)
            first = self._root_in(group, source, call)
            made = [] if in_place else lane.empty([(g.shape, g.array.dtype)])
            with lane.enter():
                flat = g.flat() if in_place else made[0].reshape(-1)
                if not in_place:
                    made[0][...] = g.array
            if flat.size:
                yield from group._transport.broadcast(lane, flat.view(np.uint8), first)
            with lane.enter():
                if in_place and not g.array.flags.c_contiguous:
                    g.array[...] = flat.reshape(g.array.shape)
            self._end(group, lane, g, flat)
            return value if in_place else g.give(made[0])

        return self._of_one("broadcast", name, value, body)

    def allgather(self, value: Any, name: str = "") -> Work[Any]:
        if not is_device(value):
            return self._host.allgather(value, name)

        def body(g: Adopted, lane: Lane) -> Steps[Any]:
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
            self._end(group, lane, g, result)
            return g.give(result)

        return self._of_one("allgather", name, value, body)

    def reducescatter(self, value: Any, op: ReduceOp = ReduceOp.AVERAGE, name: str = "") -> Work[Any]:
        if not is_device(value):
            return self._host.reducescatter(value, op, name)

        def body(g: Adopted, lane: Lane) -> Steps[Any]:
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
            self._end(group, lane, g, result)
            return g.give(result)

        return self._of_one("reducescatter", name, value, body)

    def alltoall(self, value: Any, splits: Sequence[int] | None = None, name: str = "") -> Work[tuple[Any, Array]]:
        if not is_device(value):
            return self._host.alltoall(value, splits, name)

        def body(g: Adopted, lane: Lane) -> Steps[tuple[Any, Array]]:
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
            self._end(self, lane, g, result)
            return g.give(result), received

        return self._of_one("alltoall", name, value, body)

    def _of_one(self, kind: str, name: str, value: Any, body: Callable[[Adopted, Lane], Steps[T]]) -> Work[T]:
        """Start an operation on one array."""

        def steps() -> Steps[T]:
            given = adopted(value, self.device.index)
            return body(given, self.device.lane([given.stream]))

        return self._begin(kind, name, steps)
