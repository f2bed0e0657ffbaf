"""The allreduces of a communicator: arrays on the host, which take the fast path in C where they can, and a step.

The fast path is one call into C, which checks plain arrays, makes the header and usually reduces (`Backend.fast_path`).
Everything else takes the general path: the arguments are checked here, and the backend has the primitives.
"""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from allred import arrays
from allred.arrays import Array
from allred.comm import node_memory, ops
from allred.comm.arguments import (
    array_descriptor,
    as_list,
    each_of,
    empty_like,
    group_descriptor,
    memory_conflicts,
    refuse_shared_memory,
    source_and_target,
    wire_code,
)
from allred.comm.backends.backend import Backend, WithHeader
from allred.comm.group import Group
from allred.comm.header import OpDescriptor, quoted
from allred.comm.node_memory import any_shared, is_shared
from allred.comm.ops import Compression, ReduceOp, narrows, wire_of
from allred.comm.work import Steps, Work
from allred.errors import AllredError
from allred.fusion import assign_buckets
from allred.gpu.device_arrays import is_device

if TYPE_CHECKING:
    from allred.comm.device_collectives import DeviceCollectives
    from allred.native._kernels import Operation as CheckedOperation

_NONE = Compression.none
_PACKED_BYTES = 2**20


class Reduction(NamedTuple):
    """Arrays to reduce, each into a target of its shape: the array itself, or a new contiguous one."""

    kind: str  # allreduce, of one array, or grouped_allreduce
    sources: list[Array]
    targets: list[Array]
    op: ReduceOp
    name: str
    compression: Compression
    checks_finite: bool = False
    weight: float | None = None  # of this rank, whose arrays are multiplied by it; None on all ranks: no weights
    residual: Array | None = None  # see `grouped_allreduce_blocking`

    def descriptor(self) -> OpDescriptor:
        """Return the descriptor. Raises InputError if the arguments cannot be used."""
        if self.kind == "allreduce":
            return array_descriptor(self.kind, self.sources[0], self.name, self.op, compression=self.compression)
        return group_descriptor(self.sources, self.name, self.op, self.compression, self.weight)

    def move(self, group: Group, flats: list[Array]) -> Steps[None]:
        """Reduce the arrays between the ranks of a group. flats: the flat targets. Small arrays are packed: each call
        of a backend costs a round trip between hosts."""
        for source, target, flat in zip(self.sources, self.targets, flats, strict=True):
            if source is not target:
                target[...] = source
            if self.weight is not None:
                _weigh(flat, self.weight)
        for bucket in assign_buckets([flat.nbytes for flat in flats], [flat.dtype for flat in flats], _PACKED_BYTES):
            parts = [flats[index] for index in bucket]
            packed = parts[0] if len(parts) == 1 else np.concatenate(parts)
            wire = self.compression.value if narrows(packed.dtype, self.compression.value) else 0
            yield from group.backend.allreduce(packed, self.op, wire)
            start = 0
            for part in parts if len(parts) > 1 else ():
                part[:] = packed[start : start + part.size]
                start += part.size


def _weigh(array: Array, weight: float) -> None:
    """Multiply an array by the weight of this rank, as C does. Weight 0 gives zeros, also for NaN: the mean over no
    samples."""
    if weight == 0:
        array[...] = 0
    elif weight != 1:
        numbers = arrays.view_as_real(array)
        np.multiply(numbers, weight, out=numbers)


class HostReductions(Group):
    """The allreduces of the ranks of `backend`. gpu: reduces arrays on GPUs.

    nonfinite: after a reduction with checks_finite, the position of the first result that is not finite, or -1.
    samples: after `step_allreduce`, of all ranks.
    """

    def __init__(self, backend: Backend, timeout_s: float) -> None:
        super().__init__(backend, timeout_s)
        self.gpu: DeviceCollectives | None = None
        self.fast_path = backend.fast_path
        self.nonfinite, self.samples = -1, 0

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
        op = ops.of(op)
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
        yield from self._complete(begun, Reduction("allreduce", [value], [target], *reduction))
        work.ranks = self.active.size
        return target

    def allreduce_blocking(
        self, value: Any, in_place: bool, op: ReduceOp, name: str, compression: Compression = _NONE
    ) -> Array:
        """Start `allreduce` and wait for the result; takes the fast path of the backend if possible."""
        if type(value) is float and not in_place:
            value = np.array(value)
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
                        self._complete_now(begun, Reduction("allreduce", [value], [target], op, name, compression))
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
        residual: Array | None = None,
    ) -> Work[list[Array]]:
        """Reduce a list of arrays as one operation. Other arguments: see `grouped_allreduce_blocking`."""
        op = ops.of(op)
        if self.gpu is not None and any(map(is_device, group)):
            return self.gpu.grouped_allreduce(group, op, name, compression, in_place)

        steps = self._grouped_allreduce(group, in_place, op, name, compression, checks_finite, weight, residual)
        return self.start("grouped_allreduce", name, steps)

    def checked_allreduce_(
        self, group: Sequence[Any], op: ReduceOp, name: str, compression: Compression, residual: Array | None = None
    ) -> Work[int]:
        """As `grouped_allreduce` in place with `checks_finite`. The result is the value for `nonfinite`."""

        def steps() -> Steps[int]:
            yield from self._grouped_allreduce(group, True, op, name, compression, True, None, residual)
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
        residual: Array | None = None,
    ) -> list[Array]:
        """Start `grouped_allreduce` and wait for the results; see `allreduce_blocking`.

        checks_finite: set `nonfinite`, the same on all ranks; blocks of a result that are not finite are not written.
        Only if the backend `checks_finite` and no rank has joined.
        weight: of this rank, whose arrays are multiplied by it before they are reduced; None on all ranks: no weights.
        Only if the backend `weighs`, for Sum and Average; of arrays that are not float32 or float64, 0 and 1 only.
        residual: float32, a number for each element of the group, initially zeros: the errors of compression, which
        are added in the next call with an equal group. Only if the backend `encodes`.
        """
        usable = self.queue.idle and not self.checks_places and not (in_place and any_shared(group))
        if self.fast_path is not None and type(group) is list and usable:
            targets: list[Any] = (
                group if in_place else [empty_like(value) for value in group if type(value) is np.ndarray]
            )
            if len(targets) == len(group):
                try:
                    wire = wire_code(compression)
                    begun = self.fast_path.grouped_allreduce(
                        group, targets, op, name, wire, checks_finite, weight, residual
                    )
                    if begun is True:
                        self.nonfinite = self.fast_path.nonfinite
                        return targets
                    if begun is not None:
                        reduction = Reduction(
                            "grouped_allreduce", group, targets, op, name, compression, checks_finite, weight, residual
                        )
                        self._complete_now(begun, reduction)
                        return targets
                except BaseException as error:
                    self._poison_if_pending(error)
                    raise
        if self.queue.track is not None:
            self.queue.track.call("grouped_allreduce")
        return self.grouped_allreduce(group, op, name, compression, in_place, checks_finite, weight, residual).wait()

    def step_allreduce(
        self, values: list[Array], op: ReduceOp, title: str, wire: int, checks_finite: bool, agreed: int, window: int,
        samples: int, residual: Array | None = None,
    ) -> bool:  # fmt: skip
        """Reduce the gradients of a step in place, if all ranks are in this step with equal `agreed` and `window`, 0 to
        2**64 - 1. Collective with `check("step")` on other ranks. Returns False if not; then nothing has changed, and
        the ranks call `check("step")`.

        wire, checks_finite: see `grouped_allreduce_blocking`; as the dtypes, part of `agreed`. residual: see there.
        samples: of this rank; an average is weighted by them if the ranks differ. Sets `nonfinite` and `samples`.
        """
        fast, queue, start = self.fast_path, self.queue, time.perf_counter()
        if fast is None or not queue.idle or self.checks_places or self._active is not None:
            return False
        waited_s, peers_s = queue.waited_s, queue.waited_for_peers_s
        try:
            begun = fast.step_allreduce(values, op, title, wire, checks_finite, agreed, window, samples, residual)
            if begun is None or (begun is not True and not self._complete_step(begun, title)):
                return False
        except BaseException as error:
            self._poison_if_pending(error)
            raise
        done = fast if begun is True else begun
        self.nonfinite, self.samples = done.nonfinite, done.samples
        queue.waited_for_peers_s = peers_s + done.waited_ns * 1e-9
        queue.waited_s = waited_s + time.perf_counter() - start  # includes the copies of this rank
        return True

    def _complete_step(self, operation: "CheckedOperation", title: str) -> bool:
        """Wait for a step that the fast path began. Return whether the ranks agreed."""

        def steps() -> Steps[bool]:
            yield from self.finish(operation, lambda: OpDescriptor("step_allreduce", title=title))
            return operation.headers_agree

        return self.queue.start(f"grouped_allreduce{quoted(title)}", steps()).wait()  # as C records it

    def _poison_if_pending(self, error: BaseException) -> None:
        """Poison the queue if an exception of this rank alone leaves an allreduce of the fast path pending."""
        if not isinstance(error, AllredError) and self.fast_path is not None and self.fast_path.pending:
            self.queue.poison(f"an allreduce was cut short by {type(error).__name__}")

    def _complete(self, operation: "CheckedOperation", reduction: Reduction) -> Steps[None]:
        """Complete an allreduce of contiguous arrays that the fast path began; repeat it if some ranks have joined."""
        group = yield from self.finish(operation, reduction.descriptor)
        if reduction.checks_finite:
            self.nonfinite = operation.nonfinite
        if group is not self:
            yield from reduction.move(group, [arrays.flat(target) for target in reduction.targets])

    def _complete_now(self, operation: "CheckedOperation", reduction: Reduction) -> None:
        """Run `_complete`, and wait for it."""
        self.queue.start(f"{reduction.kind}{quoted(reduction.name)}", self._complete(operation, reduction)).wait()

    def complete_grouped(self, operation: "CheckedOperation", targets: list[Array], op: ReduceOp, name: str) -> None:
        """Wait for a grouped allreduce in place that C began."""
        try:
            self._complete_now(operation, Reduction("grouped_allreduce", targets, targets, op, name, _NONE))
        except BaseException as error:
            self._poison_if_pending(error)
            raise

    def _reduce(self, reduction: Reduction) -> Steps[None]:
        descriptor, (_, sources, targets, op, _, compression, checks_finite, _, residual) = (
            reduction.descriptor(),
            reduction,
        )
        flats = [arrays.flat(target) for target in targets]
        every = list(zip(sources, targets, flats, strict=True))
        begun: list[CheckedOperation] = []

        def begin(backend: WithHeader, record: bytes) -> "CheckedOperation":
            given = [flat if source is target else arrays.flat(source) for source, target, flat in every]
            wires = [wire_of(source, compression, self.backend.encodes) for source in sources]
            begun.append(backend.begin_allreduce(record, given, flats, op, wires, checks_finite, residual))
            return begun[0]

        yield from self.agree_and_move(descriptor, begin, lambda group: reduction.move(group, flats), compression.value)
        if checks_finite:
            self.nonfinite = begun[0].nonfinite
        for _, target, flat in every:
            arrays.copy_back(target, flat)
