"""The collectives of arrays on GPUs (cupy, torch on CUDA, and others).

The device backend moves the bytes on the communication stream. The allreduce is in device_reduce.py.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import numpy as np

from allred import arrays
from allred.arrays import Array
from allred.comm import header
from allred.comm.arguments import array_descriptor, root_index, splits_of
from allred.comm.device_buckets import ReduceRequest
from allred.comm.device_operation import adopt_on, check_writable, on_gpu, refuse_product
from allred.comm.device_reduce import DeviceReductions, ReductionResult
from allred.comm.ops import Compression, ReduceOp
from allred.comm.work import Steps, Work
from allred.errors import InputError
from allred.gpu.device_arrays import Adopted, real_numbers
from allred.gpu.streams import StreamLease

T = TypeVar("T")


class DeviceCollectives(DeviceReductions):
    """The collectives of a communicator with a device backend. Arguments and results are those of Communicator."""

    def allreduce(self, value: Any, op: ReduceOp, name: str, compression: Compression, in_place: bool) -> Work[Any]:
        return self._arrays([value], ReduceRequest(op, name, compression, in_place, is_single=True))

    def grouped_allreduce(
        self, group: Sequence[Any], op: ReduceOp, name: str, compression: Compression, in_place: bool
    ) -> Work[list[Any]]:
        return self._arrays(group, ReduceRequest(op, name, compression, in_place))

    def _arrays(self, values: Sequence[Any], request: ReduceRequest) -> Work[Any]:
        """As `start`; the result is the arrays."""

        def steps(inner: Steps[ReductionResult]) -> Steps[Any]:
            return (yield from inner).arrays

        kind = "allreduce" if request.is_single else "grouped_allreduce"
        return self._begin(kind, request.name, lambda: steps(self._reduction_steps(values, request)))

    def broadcast(self, value: Any, root: int, name: str, in_place: bool) -> Work[Any]:
        def body(g: Adopted, lease: StreamLease) -> Steps[Any]:
            source = root_index(root, self.communicator.ranks)
            if in_place:
                check_writable([g])
            number = self.communicator.ranks[source]
            descriptor = on_gpu(array_descriptor("broadcast", cast(Array, g), name, root=number))
            group, devices, _ = yield from self._agree(descriptor)
            first = self.communicator.root_in(group, source, descriptor)
            made = [] if in_place else lease.empty([(g.shape, g.array.dtype)])
            with lease.enter():
                flat = g.flat() if in_place else made[0].reshape(-1)
                if not in_place:
                    made[0][...] = g.array
            if flat.size:
                yield from devices.broadcast(lease, flat.view(np.uint8), first)
            with lease.enter():
                if in_place and not g.array.flags.c_contiguous:
                    g.array[...] = flat.reshape(g.array.shape)
            self._end(devices, lease, g, flat)
            return value if in_place else g.to_caller(made[0])

        return self._of_one("broadcast", name, value, body)

    def allgather(self, value: Any, name: str) -> Work[Any]:
        def body(g: Adopted, lease: StreamLease) -> Steps[Any]:
            shape = g.shape or (1,)
            descriptor = array_descriptor("allgather", cast(Array, g), name, shape=("any", *shape[1:]), rows=shape[0])
            _, devices, headers = yield from self._agree(on_gpu(descriptor))
            rows = [header.own_fields(record).rows for record in headers]
            (result,) = lease.empty([((sum(rows), *shape[1:]), g.array.dtype)])
            with lease.enter():
                send = g.flat().view(np.uint8)
            if result.size:
                row_bytes = arrays.size_of(shape[1:]) * g.array.itemsize
                recv = result.reshape(-1).view(np.uint8)
                yield from devices.allgather(lease, send, recv, [count * row_bytes for count in rows])
            self._end(devices, lease, g, result)
            return g.to_caller(result)

        return self._of_one("allgather", name, value, body)

    def reducescatter(self, value: Any, op: ReduceOp, name: str) -> Work[Any]:
        def body(g: Adopted, lease: StreamLease) -> Steps[Any]:
            descriptor = on_gpu(array_descriptor("reducescatter", cast(Array, g), name, op))
            refuse_product(op, g.dtype)
            if not g.shape:
                raise InputError("a 0-d array has no first dimension to split; use allreduce")
            group, devices, _ = yield from self._agree(descriptor)
            self.communicator.require_all(group, descriptor)
            rows = arrays.split_sizes(g.shape[0], self.communicator.size)
            part = arrays.part_of(g.dtype)
            counts = [count * arrays.size_of(g.shape[1:]) * g.dtype.itemsize // part.itemsize for count in rows]
            (result,) = lease.empty([((rows[self.communicator.rank], *g.shape[1:]), g.array.dtype)])
            with lease.enter():
                flat = real_numbers(g.flat())
            if flat.size:
                out = real_numbers(result.reshape(-1))
                yield from devices.reducescatter(lease, flat, out, arrays.name_of(part), counts, op)
            self._end(devices, lease, g, result)
            return g.to_caller(result)

        return self._of_one("reducescatter", name, value, body)

    def alltoall(self, value: Any, splits: Sequence[int] | None, name: str) -> Work[tuple[Any, Array]]:
        def body(g: Adopted, lease: StreamLease) -> Steps[tuple[Any, Array]]:
            shape = g.shape or (1,)
            sent = splits_of(shape[0], splits, self.communicator.size)
            descriptor = on_gpu(array_descriptor("alltoall", cast(Array, g), name, shape=("any", *shape[1:])))
            group, devices, _ = yield from self._agree(descriptor)
            self.communicator.require_all(group, descriptor)
            size, host = self.communicator.size, self.communicator.backend
            matrix = np.empty((size, size), np.int64)
            yield from host.allgather(arrays.as_bytes(sent), arrays.as_bytes(matrix), [sent.nbytes] * size)
            received = matrix[:, self.communicator.rank].copy()
            (result,) = lease.empty([((int(received.sum()), *shape[1:]), g.array.dtype)])
            with lease.enter():
                send = g.flat().view(np.uint8)
            counts = matrix * (arrays.size_of(shape[1:]) * g.array.itemsize)
            if counts.any():
                yield from devices.alltoall(lease, send, result.reshape(-1).view(np.uint8), counts)
            self._end(devices, lease, g, result)
            return g.to_caller(result), received

        return self._of_one("alltoall", name, value, body)

    def _of_one(self, kind: str, name: str, value: Any, body: Callable[[Adopted, StreamLease], Steps[T]]) -> Work[T]:
        def steps() -> Steps[T]:
            given = adopt_on(value, self.devices.device.index)
            return body(given, self.devices.device.lease([given.stream]))

        return self._begin(kind, name, steps)
