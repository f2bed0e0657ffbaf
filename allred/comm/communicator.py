"""The communicator: collectives with checked arguments, on one host backend and, with GPUs, one device backend.

Each method starts an operation and returns its Work; `wait()` returns the result. Operations complete in the order in
which they are started, and an array belongs to the operation until then. On GPUs, an operation on device arrays runs
after the work already enqueued on the caller's current stream; `wait` makes that stream wait, not the host.

Results are the same on every rank, bit for bit, except for the payload of a NaN. Each backend documents whether results
are reproducible from run to run.
"""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from allred import arrays
from allred.arrays import Array
from allred.comm import header, node_memory
from allred.comm.arguments import (
    array_descriptor,
    as_list,
    each_of,
    empty_like,
    memory_conflicts,
    refuse_shared_memory,
    result_of,
    root_index,
    source_and_target,
    splits_of,
    target_of,
    wire_code,
)
from allred.comm.backends.backend import Backend, WithHeader, pickled, pickled_parts, unpickle
from allred.comm.device_collectives import DeviceCollectives
from allred.comm.group import Group
from allred.comm.header import OpDescriptor, quoted
from allred.comm.node_memory import any_shared, is_shared
from allred.comm.ops import Compression, ReduceOp
from allred.comm.point_to_point import PointToPoint
from allred.comm.reduction import Reduction
from allred.comm.work import Steps, Work
from allred.errors import AllredError, InputError
from allred.fusion import FusionBuffer
from allred.gpu.device_arrays import is_device

if TYPE_CHECKING:
    from allred.native._kernels import Operation as CheckedOperation

_NONE = Compression.none


class Communicator(Group):
    """Collectives of the ranks of `backend`. Arrays may have any layout; a root is one of `ranks`."""

    def __init__(self, backend: Backend, timeout_s: float) -> None:
        super().__init__(backend, timeout_s)
        self.gpu: DeviceCollectives | None = None
        self.fusion_buffer = FusionBuffer(backend.allocate)  # shared: reductions of optimizers do not run concurrently
        self.nonfinite = -1  # position of the first result of the last reduction with checks_finite that is not finite
        self._point_to_point = PointToPoint(self)
        self.samples = 0  # of all ranks in the last `step_allreduce`
        self.fast_path = backend.fast_path

    def allreduce(
        self,
        value: Any,
        op: ReduceOp = ReduceOp.AVERAGE,
        name: str = "",
        compression: Compression = _NONE,
        in_place: bool = False,
    ) -> Work[Array]:
        """Reduce `value` (an array or a number) over all ranks. The result is a new array of the same shape and dtype;
        with `in_place` it is `value`, a writable array."""
        if self.gpu is not None and is_device(value):
            return self.gpu.allreduce(value, op, name, compression, in_place)

        if self._takes_fast_path(value, in_place) and type(name) is str and self.queue.track is None:
            return self.queue.start(
                f"allreduce{quoted(name) if name else ''}", self._fast_allreduce(value, in_place, op, name, compression)
            )
        return self.start("allreduce", name, self._general_allreduce(value, in_place, op, name, compression))

    def _takes_fast_path(self, value: Any, in_place: bool) -> bool:
        """Whether C may check the array. It looks at more than this does."""
        usable = type(value) is np.ndarray and not (in_place and node_memory.ranges and is_shared(value))
        return usable and self.fast_path is not None and not self.checks_places

    def _general_allreduce(self, value: Any, in_place: bool, *reduction: Any) -> Steps[Array]:
        """reduction: the other fields of `Reduction`."""
        source, target = source_and_target(value, in_place)
        yield from self._reduce(Reduction("allreduce", [source], [target], *reduction))
        return target

    def _fast_allreduce(self, value: Array, in_place: bool, *reduction: Any) -> Steps[Array]:
        """As `_general_allreduce`; C checks the array, where it can, and makes the header."""
        op, name, compression = reduction
        fast, work, target = self.fast_path, self.queue.advancing, value if in_place else empty_like(value)
        assert fast is not None
        assert work is not None
        wire = 0 if compression is _NONE else wire_code(compression)
        begun = None if target is None else fast.start_allreduce(value, target, op, name, wire)
        if begun is None or target is None:
            return (yield from self.announcing("allreduce", name, self._general_allreduce(value, in_place, *reduction)))
        given = Reduction("allreduce", [value], [target], *reduction)
        work.described = given.descriptor, lambda: fast.number
        yield begun
        if begun.headers_agree:
            self._active, work.ranks = None, self.size
        else:
            yield from self._repeat(given)
        return target

    def _repeat(self, reduction: Reduction) -> Steps[None]:
        """Reduce contiguous arrays after headers differ, if the reason is that some ranks have joined."""
        group, _ = yield from self._resolve(reduction.descriptor())
        assert self.queue.advancing is not None
        self.queue.advancing.ranks = group.size
        yield from reduction.move(group, [arrays.flat(target) for target in reduction.targets])

    def allreduce_blocking(
        self, value: Any, in_place: bool, op: ReduceOp, name: str, compression: Compression = _NONE
    ) -> Array:
        """Start `allreduce` and wait for the result; takes the fast path of the backend if possible."""
        if self._takes_fast_path(value, in_place) and self.queue.idle:
            assert self.fast_path is not None
            target = value if in_place else empty_like(value)
            if target is not None:
                try:
                    if compression is _NONE:
                        begun = self.fast_path.allreduce(value, target, op, name)
                    else:
                        begun = self.fast_path.allreduce(value, target, op, name, wire_code(compression))
                    if begun is True:
                        return target
                    if begun is not None:
                        self._complete(begun, Reduction("allreduce", [value], [target], op, name, compression))
                        return target
                except BaseException as error:
                    self._poison_if_pending(error)
                    raise
        if self.queue.track is not None:
            self.queue.track.call("allreduce")
        return self.allreduce(value, op, name, compression, in_place).wait()

    def grouped_allreduce(
        self,
        group: Sequence[Any],
        op: ReduceOp = ReduceOp.AVERAGE,
        name: str = "",
        compression: Compression = _NONE,
        in_place: bool = False,
        checks_finite: bool = False,
        weight: float | None = None,
    ) -> Work[list[Array]]:
        """Reduce a list of arrays as one operation. checks_finite, weight: see `grouped_allreduce_blocking`."""
        if self.gpu is not None and any(map(is_device, group)):
            return self.gpu.grouped_allreduce(group, op, name, compression, in_place)

        steps = self._grouped_allreduce(group, in_place, op, name, compression, checks_finite, weight)
        return self.start("grouped_allreduce", name, steps)

    def checked_allreduce_(self, group: Sequence[Any], op: ReduceOp, name: str, compression: Compression) -> Work[int]:
        """As `grouped_allreduce` in place with `checks_finite`. The result is the value for `nonfinite`."""

        def steps() -> Steps[int]:
            yield from self._grouped_allreduce(group, True, op, name, compression, True)
            return self.nonfinite

        return self.start("grouped_allreduce", name, steps())

    def _grouped_allreduce(self, group: Sequence[Any], in_place: bool, *reduction: Any) -> Steps[list[Array]]:
        """reduction: the other fields of `Reduction`."""
        pairs = each_of(as_list(group), lambda value: source_and_target(value, in_place))
        sources, targets = [source for source, _ in pairs], [target for _, target in pairs]
        if in_place:
            refuse_shared_memory(memory_conflicts(targets))
        yield from self._reduce(Reduction("grouped_allreduce", sources, targets, *reduction))
        return targets

    def grouped_allreduce_blocking(
        self,
        group: Sequence[Any],
        in_place: bool,
        op: ReduceOp,
        name: str,
        compression: Compression = _NONE,
        checks_finite: bool = False,
        weight: float | None = None,
    ) -> list[Array]:
        """Start `grouped_allreduce` and wait for the results; see `allreduce_blocking`.

        checks_finite: set `nonfinite`, the same on all ranks; blocks of a result that are not finite are not written.
        Only if the backend `checks_finite` and no rank has joined.
        weight: of this rank, whose arrays are multiplied by it before they are reduced; None on all ranks: no weights.
        Only if the backend `weighs`, for Sum and Average; of arrays that are not float32 or float64, 0 and 1 only.
        """
        usable = self.queue.idle and not self.checks_places and not (in_place and any_shared(group))
        if self.fast_path is not None and type(group) is list and usable:
            targets: list[Any] = (
                group if in_place else [empty_like(value) for value in group if type(value) is np.ndarray]
            )
            if len(targets) == len(group):
                try:
                    wire = wire_code(compression)
                    begun = self.fast_path.grouped_allreduce(group, targets, op, name, wire, checks_finite, weight)
                    if begun is True:
                        self.nonfinite = self.fast_path.nonfinite
                        return targets
                    if begun is not None:
                        reduction = Reduction(
                            "grouped_allreduce", group, targets, op, name, compression, checks_finite, weight
                        )
                        self._complete(begun, reduction)
                        return targets
                except BaseException as error:
                    self._poison_if_pending(error)
                    raise
        if self.queue.track is not None:
            self.queue.track.call("grouped_allreduce")
        return self.grouped_allreduce(group, op, name, compression, in_place, checks_finite, weight).wait()

    def step_allreduce(
        self, values: list[Array], op: ReduceOp, title: str, wire: int, checks_finite: bool, agreed: int, window: int,
        samples: int,
    ) -> bool:  # fmt: skip
        """Reduce the gradients of a step in place, if all ranks are in this step with equal `agreed` and `window`, 0 to
        2**64 - 1. Collective with `check("step")` on other ranks. Returns False if not; then nothing has changed, and
        the ranks call `check("step")`.

        wire, checks_finite: see `grouped_allreduce_blocking`; as the dtypes, part of `agreed`. samples: of this rank;
        an average is weighted by them if the ranks differ. Sets `nonfinite` and `samples`.
        """
        fast = self.fast_path
        if fast is None or not self.queue.idle or self.checks_places or self._active is not None:
            return False
        start = time.perf_counter()
        try:
            begun = fast.step_allreduce(values, op, title, wire, checks_finite, agreed, window, samples)
            if begun is not True:
                return begun is not None and self._complete_step(begun, title)
        except BaseException as error:
            self._poison_if_pending(error)
            raise
        self.nonfinite, self.samples = fast.nonfinite, fast.samples
        self.queue.waited_for_peers_s += fast.waited_ns * 1e-9
        self.queue.waited_s += time.perf_counter() - start
        return True

    def _complete_step(self, operation: "CheckedOperation", title: str) -> bool:
        """Wait for a step that the fast path began. Return whether the ranks agreed."""

        def steps() -> Steps[bool]:
            yield from self.finish(operation, lambda: OpDescriptor("step_allreduce", title=title))
            self.nonfinite, self.samples = operation.nonfinite, operation.samples
            return operation.headers_agree

        return self.queue.start(f"grouped_allreduce{quoted(title)}", steps()).wait()  # as C records it

    def _poison_if_pending(self, error: BaseException) -> None:
        """Poison the queue if an exception of this rank alone leaves an allreduce of the fast path pending."""
        if not isinstance(error, AllredError) and self.fast_path is not None and self.fast_path.pending:
            self.queue.poison(f"an allreduce was cut short by {type(error).__name__}")

    def _complete(self, operation: "CheckedOperation", reduction: Reduction) -> None:
        """Wait for an allreduce of contiguous arrays that the fast path began; repeat it if some ranks have joined."""

        def steps() -> Steps[None]:
            group = yield from self.finish(operation, reduction.descriptor)
            self.nonfinite = operation.nonfinite
            if group is not self:
                yield from reduction.move(group, [arrays.flat(target) for target in reduction.targets])

        self.queue.start(f"{reduction.kind}{quoted(reduction.name)}", steps()).wait()

    def _reduce(self, reduction: Reduction) -> Steps[None]:
        descriptor, (_, sources, targets, op, _, compression, checks_finite, _) = reduction.descriptor(), reduction
        flats = [arrays.flat(target) for target in targets]
        every = list(zip(sources, targets, flats, strict=True))
        begun: list[CheckedOperation] = []

        def begin(backend: WithHeader, record: bytes) -> "CheckedOperation":
            given = [flat if source is target else arrays.flat(source) for source, target, flat in every]
            begun.append(backend.begin_allreduce(record, given, flats, op, compression.value, checks_finite))
            return begun[0]

        yield from self.agree_and_move(descriptor, begin, lambda group: reduction.move(group, flats), compression.value)
        if checks_finite:
            self.nonfinite = begun[0].nonfinite
        for _, target, flat in every:
            arrays.copy_back(target, flat)

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
            given = None if out is None else result_of(out, (self.size * count, *rest), source.dtype)
            group, headers = yield from self.agree(descriptor)
            rows = [header.own_fields(record).rows for record in headers]
            result = np.empty((sum(rows), *rest), source.dtype) if given is None else given[: sum(rows)]
            row_bytes = arrays.size_of(rest) * source.itemsize
            send, recv = arrays.as_bytes(source), arrays.as_bytes(result)
            yield from group.backend.allgather(send, recv, [count * row_bytes for count in rows])
            return result

        return self.start("allgather", name, steps())

    def reducescatter(
        self, value: Any, op: ReduceOp = ReduceOp.AVERAGE, name: str = "", out: Array | None = None
    ) -> Work[Array]:
        """Reduce, and return this rank's rows of the result: `out`, a contiguous host array, or a new array. If the
        rows do not divide evenly, the first ranks get one more."""
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
            descriptor = OpDescriptor("join", title="join()", note=first, problem=problem)
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
