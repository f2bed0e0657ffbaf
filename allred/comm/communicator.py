"""The communicator: collectives with checked arguments, on one host backend and, with GPUs, one device backend.

Each method starts an operation and returns its Work; `wait()` returns the result. Operations complete in the order in
which they are started, and an array belongs to the operation until then. On GPUs, an operation on device arrays runs
after the work already enqueued on the caller's current stream; `wait` makes that stream wait, not the host.

Results are the same on every rank, bit for bit, except for the payload of a NaN. Each backend documents whether results
are reproducible from run to run.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from allred import arrays
from allred.arrays import Array
from allred.comm import header, ops
from allred.comm.arguments import (
    array_descriptor,
    result_of,
    root_index,
    splits_of,
    target_of,
)
from allred.comm.backends.backend import Backend, pickled, pickled_parts, unpickle
from allred.comm.group import Group
from allred.comm.header import OpDescriptor, quoted
from allred.comm.host_reduce import HostReductions
from allred.comm.ops import ReduceOp
from allred.comm.point_to_point import PointToPoint
from allred.comm.work import Steps, Work
from allred.errors import InputError
from allred.fusion import FusionBuffer
from allred.gpu.device_arrays import is_device


class Communicator(HostReductions):
    """Collectives of the ranks of `backend`. Arrays may have any layout; a root is one of `ranks`."""

    def __init__(self, backend: Backend, timeout_s: float) -> None:
        super().__init__(backend, timeout_s)
        self.fusion_buffer = FusionBuffer(backend.allocate)  # shared: reductions of optimizers do not run concurrently
        self._point_to_point = PointToPoint(self)

    def broadcast(self, value: Any, root: int = 0, name: str = "", in_place: bool = False) -> Work[Array]:
        """Copy the root's `value` into a new array on every rank, or with `in_place` into `value`. Shape and dtype must
        be the same on all ranks."""
        if self.gpu is not None and is_device(value):
            return self.gpu.broadcast(value, root, name, in_place)

        def steps() -> Steps[Array]:
            target = target_of(value, in_place, refuse_shared=False)
            source = root_index(root, self.ranks)
            descriptor = array_descriptor("broadcast", target, name, root=self.ranks[source])
            flat = arrays.flat(target)
            data = arrays.as_bytes(flat)
            yield from self.agree_and_move(
                descriptor,
                lambda backend, record: backend.begin_broadcast(record, data, source),
                lambda group: group.backend.broadcast(data, self.root_in(group, source, descriptor)),
            )
            arrays.copy_back(target, flat)
            return target

        return self.start("broadcast", name, steps())

    def allgather(self, value: Any, name: str = "", out: Array | None = None) -> Work[Array]:
        """Concatenate the arrays of all ranks along the first dimension in rank order: a new array on every rank. Ranks
        may differ in the first dimension, but not with `out`, a contiguous host array for the result. A 0-d value
        counts as one of shape (1,)."""
        if out is None and self.gpu is not None and is_device(value):
            return self.gpu.allgather(value, name)

        def steps() -> Steps[Array]:
            source = np.atleast_1d(arrays.as_host_array(value))
            count, rest = len(source), source.shape[1:]
            shape = ("any", *rest) if out is None else source.shape
            descriptor = array_descriptor("allgather", source, name, shape=shape, rows=count)
            send, nbytes = arrays.as_bytes(source), source.nbytes
            if out is not None:
                given = result_of(out, (self.size * count, *rest), source.dtype)
                recv = arrays.as_bytes(given)
                send = arrays.apart(send, recv, recv[self.rank * nbytes :])
                yield from self.agree_and_move(
                    descriptor,
                    lambda backend, record: backend.begin_allgather(record, send, recv, [nbytes] * self.size),
                    lambda group: group.backend.allgather(send, recv[: group.size * nbytes], [nbytes] * group.size),
                )
                return given[: self.active.size * count]
            group, headers = yield from self.agree(descriptor)
            rows = [header.own_fields(record).rows for record in headers]
            result = np.empty((sum(rows), *rest), source.dtype)
            row_bytes = arrays.size_of(rest) * source.itemsize
            recv = arrays.as_bytes(result)
            yield from group.backend.allgather(send, recv, [count * row_bytes for count in rows])
            return result

        return self.start("allgather", name, steps())

    def reducescatter(
        self, value: Any, op: ReduceOp = ReduceOp.AVERAGE, name: str = "", out: Array | None = None
    ) -> Work[Array]:
        """Reduce, and return this rank's rows of the result: `out`, a contiguous host array, or a new array. If the
        rows do not divide evenly, the first ranks get one more."""
        op = ops.of(op)
        if out is None and self.gpu is not None and is_device(value):
            return self.gpu.reducescatter(value, op, name)

        def steps() -> Steps[Array]:
            source = arrays.as_host_array(value)
            descriptor = array_descriptor("reducescatter", source, name, op)
            if source.ndim == 0:
                raise InputError("a 0-d array has no first dimension to split; use allreduce")
            rest = source.shape[1:]
            rows = arrays.split_sizes(len(source), self.size)
            result = result_of(out, (rows[self.rank], *rest), source.dtype)
            counts = [count * arrays.size_of(rest) for count in rows]
            flat, part = arrays.flat(source), result.reshape(-1)
            flat = arrays.apart(flat, part, flat[sum(counts[: self.rank]) :])

            def move(group: Group) -> Steps[None]:
                self.require_all(group, descriptor)
                yield from self.backend.reducescatter(flat, part, counts, op)

            yield from self.agree_and_move(
                descriptor, lambda backend, record: backend.begin_reducescatter(record, flat, part, counts, op), move
            )
            return result

        return self.start("reducescatter", name, steps())

    def alltoall(self, value: Any, splits: Sequence[int] | None = None, name: str = "") -> Work[tuple[Array, Array]]:
        """Send rows to every rank and receive rows from every rank: (new array, int64 array of the rows received).
        `splits[r]` rows go to rank r; without it the rows must divide evenly. Rows are received in rank order."""
        if self.gpu is not None and is_device(value):
            return self.gpu.alltoall(value, splits, name)

        def steps() -> Steps[tuple[Array, Array]]:
            source = np.atleast_1d(arrays.as_host_array(value))
            rest = source.shape[1:]
            sent = splits_of(len(source), splits, self.size)
            descriptor = array_descriptor("alltoall", source, name, shape=("any", *rest))
            group, _ = yield from self.agree(descriptor)
            rows = np.empty((group.size, self.size), np.int64)
            yield from group.backend.allgather(arrays.as_bytes(sent), arrays.as_bytes(rows), [sent.nbytes] * group.size)
            matrix, here = np.zeros((self.size, self.size), np.int64), [self.ranks.index(rank) for rank in group.ranks]
            matrix[here] = rows
            if matrix.sum() != matrix[:, here].sum():
                self.require_all(group, descriptor)
            result = np.empty((int(matrix[:, self.rank].sum()), *rest), source.dtype)
            counts = matrix[np.ix_(here, here)] * (arrays.size_of(rest) * source.itemsize)
            yield from group.backend.alltoall(arrays.as_bytes(source), arrays.as_bytes(result), counts)
            return result, matrix[:, self.rank].copy()

        return self.start("alltoall", name, steps())

    def allgather_object(self, value: Any, name: str = "") -> Work[list[Any]]:
        """Return every rank's picklable object, in rank order. An exception while an object is unpickled is raised on
        this rank only, and the communicator can be used afterwards."""

        def steps() -> Steps[list[Any]]:
            data = pickled(value)
            descriptor = OpDescriptor("allgather_object", name, f"allgather_object(){quoted(name)}")
            group, _ = yield from self.agree(descriptor)
            return (yield from group.backend.allgather_object(data))

        return self.start("allgather_object", name, steps())

    def broadcast_object(self, value: Any, root: int = 0, name: str = "") -> Work[Any]:
        """Return the root's picklable object; a copy of it on the other ranks. An exception of unpickling: see
        `allgather_object`."""

        def steps() -> Steps[Any]:
            source = root_index(root, self.ranks)
            parts = pickled_parts(value if self.rank == source else None)
            title = f"broadcast_object(root={self.ranks[source]}){quoted(name)}"
            descriptor = OpDescriptor("broadcast_object", name, title, root=self.ranks[source])
            group, _ = yield from self.agree(descriptor)
            received = yield from group.backend.broadcast_pickle(parts, self.root_in(group, source, descriptor))
            return value if self.rank == source else unpickle(*received)

        return self.start("broadcast_object", name, steps())

    def barrier(self) -> Work[None]:
        """Complete once every rank has started it; only headers are exchanged."""
        descriptor = OpDescriptor("barrier", title="barrier()")
        begun = self.agree_and_move(descriptor, lambda backend, record: backend.begin_exchange(record), _move_nothing)
        return self.start("barrier", "", begun)

    def send(self, value: Any, dest: int, tag: int = 0) -> Work[None]:
        """Send an array to rank `dest`, which receives it with `recv`. Complete when the receiver has posted the last
        receive (point_to_point.py).

        Raises MismatchError or InputError, the same on both ranks, if they differ in dtype or shape or if the array of
        one cannot be used. Collectives may be started before or after in any order.
        """
        return self._point_to_point.send(value, dest, tag)

    def recv(self, array: Array, source: int | None = None, tag: int = 0) -> Work[int]:
        """Receive a message from rank `source` (None: from any rank) in `array`. The result is the sender."""
        return self._point_to_point.recv(array, source, tag)

    def close(self) -> None:
        if not self._point_to_point.close():
            self.queue.poison("messages are not complete")
        super().close()

    def check(
        self, kind: str, title: str, tensors: Sequence[str] = (), settings: str = "", note: int = 0, problem: str = "",
        rows: int = 0,
    ) -> Work[list[header.OwnFields]]:  # fmt: skip
        """Check that all ranks pass the same title, tensors (a line each) and settings. The result is the `rows` and
        `note`, 0 to 2**64 - 1, of every rank of `active`. A `problem` (a sentence) is an InputError on all ranks."""

        def steps() -> Steps[list[header.OwnFields]]:
            described = OpDescriptor(kind, "", title, tuple(tensors), settings, rows=rows, note=note, problem=problem)
            _, headers = yield from self.agree(described)
            return [header.own_fields(record) for record in headers]

        return self.start(kind, "", steps())

    def join(self, first: bool) -> Work[int | None]:
        """Take part in the next operation of the other ranks without data; the result is None.

        If all ranks have joined, the result is the number of the rank that joined last. first: whether this rank joins
        with this operation.
        """

        def steps() -> Steps[int | None]:
            problem = next(iter(self.unfinished.values()), "")
            descriptor = OpDescriptor("join", title="join()", note=first, problem=problem, generation=self.generation)
            if problem:
                yield from self.agree(descriptor)
            headers = yield from self.backend.exchange(self._announce(descriptor))
            if header.agree(headers):
                notes = [header.own_fields(record).note for record in headers]
                return self.ranks[notes.index(1)]
            yield from self.backend.allgather_object(pickled(descriptor))
            return None

        return self.start("join", "", steps())


def _move_nothing(_: Group) -> Steps[None]:
    yield from ()
