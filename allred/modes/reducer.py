"""`Reducer`: the reduction of gradients over the ranks, and the header exchange that precedes it.

    negotiate: all ranks pass the same tensors and settings -> weight -> pack -> allreduce -> unpack, for each bucket

A backend that reduces a group of arrays as one stream (`fuses`) needs no buckets, and may weight them (`weighs`).

In the header exchange the ranks also share a `StepHeader`. A rank whose gradients cannot be used says so there, and all
ranks raise the same error before any gradient is changed.
"""

import functools
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from allred import arena, arrays, native, nest, world
from allred.arrays import Array
from allred.comm import functions, ops
from allred.comm.arguments import memory_conflicts
from allred.comm.communicator import Communicator
from allred.comm.device_buckets import ReduceRequest
from allred.comm.device_reduce import PreparedReduction, ReductionResult
from allred.comm.group import Group
from allred.comm.header import OwnFields
from allred.comm.ops import Compression, ReduceOp
from allred.comm.work import Work
from allred.errors import InputError
from allred.fusion import Plan, Tensor
from allred.gpu import device_arrays as gpu
from allred.modes.error_feedback import ErrorFeedback
from allred.modes.options import StepInput, StepOptions
from allred.modes.steady_step import SteadyStep
from allred.modes.step_header import LARGEST_SAMPLES, OVERLAPPED, Agreement, MoreFlags, StepHeader
from allred.timeline.recorder import span
from allred.wording import named


class Reducer:
    """Averages or sums lists of gradients over the ranks of a communicator. `title`: prefix of errors."""

    def __init__(self, options: StepOptions, title: str, more_flags: MoreFlags | None = None) -> None:
        self._op, self._compression = options.op, options.compression
        self.errors = ErrorFeedback() if options.keeps_residuals else None
        self.weight: float | None = None  # of this rank in the last reduction, as in Agreement
        self.samples = 0  # of all ranks in the last reduction; 0 if they were not counted
        self.overlapped = False  # whether a rank had passed gradients to opt.reduce() before the last negotiation
        self._title, self._options, self.more_flags = title, options, more_flags
        self._plans: dict[tuple[int, tuple[Tensor, ...]], Plan] = {}
        self._last: tuple[Sequence[Tensor], Plan] | None = None  # the list of tensors of the last plan
        self.steady: SteadyStep | None = None  # after a step that all ranks may repeat
        self.negotiated: Sequence[Tensor] = ()  # the list of tensors of the last negotiation

    # Plan and header exchange.

    @property
    def bucket_bytes(self) -> int:
        own = self._options.bucket_bytes
        return own if isinstance(own, int) else world.config().bucket_bytes  # StepOptions has converted text

    def plan(self, tensors: Sequence[Tensor]) -> Plan:
        """Return the plan for `tensors`, a list that is not changed afterwards. Plans are cached."""
        bucket_bytes = self.bucket_bytes
        if self._last is not None and self._last[0] is tensors and self._last[1].bucket_bytes == bucket_bytes:
            return self._last[1]
        key = bucket_bytes, tuple(tensors)
        if key not in self._plans:
            if len(self._plans) >= 16:  # if shapes change at every step, do not keep all plans
                self._plans.clear()
            self._plans[key] = Plan(key[1], bucket_bytes)
            arena.learn(tensor.elements * tensor.dtype.itemsize for tensor in tensors)
        self._last = tensors, self._plans[key]
        return self._plans[key]

    def drop_residuals(self) -> None:
        """Drop the residuals of compression. Called on all ranks, between steps."""
        if self.errors is not None:
            self.errors.drop()
            self.steady = None

    @property
    def last_nbytes(self) -> int:
        """Bytes of the gradients of the last negotiation, without compression."""
        return sum(tensor.nbytes for tensor in self.negotiated)

    def refusal(self, plan: Plan) -> str:
        return next((problem for dtype in plan.dtypes if (problem := ops.refusal(self._op, dtype))), "")

    def start_negotiation(
        self,
        communicator: Communicator,
        title: str,
        lines: Sequence[str],
        settings: str,
        own: StepHeader,
        problem: str = "",
    ) -> Work[list[OwnFields]]:
        """Start the header exchange of a step; pass its result to `agreement`.

        Arguments:
            title, lines, settings: must be the same on all ranks, like the options. lines: one per tensor.
            own: of this rank, without `more`.
            problem: why this rank's gradients cannot be used; all ranks raise it as InputError.
        """
        samples = own.samples
        if samples is not None and samples > LARGEST_SAMPLES:
            problem = (
                problem or f"samples={samples} must be at most 2**47 - 1, the largest number that the ranks exchange"
            )
        more = 0 if self.more_flags is None else self.more_flags.flags()
        rows, note = own._replace(samples=None if problem else samples, more=more).pack()
        return communicator.check("step", title, lines, self._agreed_settings(settings), note, problem, rows=rows)

    def _agreed_settings(self, settings: str) -> str:
        """Return all settings that must be the same on all ranks, as text."""
        nonfinite = self._options.nonfinite or world.config().nonfinite
        return (
            f"op={self._op.value} bucket_bytes={self.bucket_bytes} compression={self._compression.name} "
            f"{'error_feedback=True ' * (self.errors is not None)}"
            f"nonfinite={nonfinite} accumulate={self._options.accumulate} sharded={self._options.sharded} {settings}"
        ).strip()

    def agreement(self, communicator: Communicator, fields: list[OwnFields]) -> Agreement:
        """Interpret the fields of all ranks. Raises InputError on all ranks if their samples cannot be weighted, and
        those of `MoreFlags`."""
        headers = list(map(StepHeader.unpack, fields))
        if self.more_flags is not None:
            self.more_flags.check([each.more for each in headers], communicator.active.ranks)
        self.weight = self._weight(communicator.active, [each.samples for each in headers])
        agreement = Agreement(self.weight, headers)
        self.overlapped = agreement.any(OVERLAPPED)
        return agreement

    def exchange_flags(
        self,
        communicator: Communicator,
        title: str,
        own: StepHeader,
        problem: str = "",
    ) -> Agreement:
        """As `start_negotiation` and `agreement`, without samples, settings and tensors. Collective."""
        rows, note = own.pack()
        fields = communicator.check("step", title, note=note, problem=problem, rows=rows).wait()
        return Agreement(self.weight, list(map(StepHeader.unpack, fields)))

    def _weight(self, active: Group, numbers: list[int | None]) -> float | None:
        """Return the weight of this rank. numbers: of samples, by rank."""
        counted = [number is not None for number in numbers]
        if any(counted) and not all(counted):
            ranks = [rank for rank, known in zip(active.ranks, counted, strict=True) if not known]
            raise InputError(
                f"{self._title}: {named('rank', ranks)} gave no number of samples, but the others did; pass it on all"
            )
        samples = [number or 0 for number in numbers]
        self.samples = sum(samples) if all(counted) else 0
        if all(counted) and not self.samples:
            raise InputError(f"{self._title}: no rank has any samples, so there is nothing to average")
        if self._op is ReduceOp.SUM:
            return None if all(samples) or not any(counted) else float(bool(samples[active.rank]))
        if len(set(samples)) == 1:
            return None
        return samples[active.rank] * len(samples) / sum(samples)

    def fill_missing(
        self, communicator: Communicator, tensors: Sequence[Tensor], values: list[Any], params: Sequence[Any]
    ) -> list[Any]:
        """Replace None by zeros where another rank has the gradient, on the GPU or host of its parameter. Collective.
        params: the parameters; empty if unknown, then as other gradients."""
        anywhere = self.present_anywhere(communicator, [value is not None for value in values])
        like = params or [next(filter(gpu.is_device, values), None)] * len(values)
        return [
            gpu.zeros(other, tensor.shape, tensor.dtype) if value is None and present else value
            for tensor, value, present, other in zip(tensors, values, anywhere, like, strict=True)
        ]

    def present_anywhere(self, communicator: Communicator, here: list[bool]) -> list[bool]:
        """Return for each gradient whether any rank has it; here: whether this rank has it. Collective."""
        found = np.array(here, np.uint8)
        title = f"{self._title}: which ranks have which gradients"
        return communicator.allreduce_blocking(found, True, ReduceOp.MAX, title).tolist()  # type: ignore[no-any-return]

    # Steps that are like the one before.

    def new_steady(
        self, communicator: Communicator, given: StepInput, agreement: Agreement, title: str, settings: str,
        checks_finite: bool,
    ) -> SteadyStep | None:  # fmt: skip
        """Return what the next step is compared with; None if it needs a header exchange of its own. The same on all
        ranks: after an agreement in which all may repeat the step."""
        backend, wire, plan = communicator.backend, self._compression.value, self.plan(given.tensors)
        can_weigh = _weighs(communicator, plan.dtypes)
        is_uneven = self._op is ReduceOp.AVERAGE and len({each.samples for each in agreement.headers}) > 1
        if backend.fast_path is None or not backend.begins_with_header("grouped_allreduce", wire):
            return None
        if not backend.fuses or (is_uneven and not can_weigh):
            return None
        return SteadyStep(
            communicator, given, plan, title, self._agreed_settings(settings), self._op, wire, checks_finite, can_weigh,
            settings, self.residual(communicator, plan),
        )  # fmt: skip

    # Reduction.

    def residual(self, communicator: Communicator, plan: Plan) -> Array | None:
        """Return the errors of the compression of these tensors; None if there are none, or they are lost."""
        return None if self.errors is None or not communicator.backend.encodes else self.errors.residual(plan)

    @property
    def _keeps_nonfinite(self) -> bool:
        """Whether a NaN or infinity in a gradient always appears in the result."""
        return self._op in (ReduceOp.AVERAGE, ReduceOp.SUM)

    def checks_finite(self, communicator: Communicator) -> bool:
        """Whether reductions of arrays on the host can check their results, if all ranks count equally. One rank alone
        does not reduce."""
        backend = communicator.backend
        one_operation = backend.begins_with_header("grouped_allreduce", self._compression.value)
        return self._keeps_nonfinite and backend.checks_finite and backend.size > 1 and one_operation

    def checks_finite_on_gpu(self, communicator: Communicator) -> bool:
        """As `checks_finite`, for arrays on GPUs."""
        return self._keeps_nonfinite and communicator.gpu is not None

    def can_check(self, communicator: Communicator, values: Sequence[Any]) -> bool:
        """Whether `allreduce_` could check the results of these values, if all ranks count equally."""
        if set(map(type, values)) == {np.ndarray}:
            return self.checks_finite(communicator)
        return self.checks_finite_on_gpu(communicator) and gpu.all_on_gpu(values)

    def prepare(self, communicator: Communicator, values: Sequence[Any], checks: bool) -> PreparedReduction | None:
        """Prepare the reduction of gradients on GPUs, without weights, so that the header exchange of the step serves
        the reduction too. None if it needs an exchange of its own. checks: as in `allreduce_`."""
        if (devices := communicator.gpu) is None or not gpu.all_on_gpu(values):
            return None
        return devices.prepare(values, self._request(None, checks and self._keeps_nonfinite))

    def _request(self, weight: float | None, checks: bool) -> ReduceRequest:
        return ReduceRequest(self._op, self._title, self._compression, weight=weight, checks=checks)

    def allreduce_(
        self, communicator: Communicator, plan: Plan, values: list[Any], weight: float | None,
        checks_finite: bool = False, prepared: PreparedReduction | None = None,
    ) -> int | None:  # fmt: skip
        """Reduce writable arrays in place; None is left out.

        checks_finite: check the results, see `Communicator.nonfinite`; only if `can_check`, and without a weight. The
        host waits for arrays on a GPU only with it. prepared: the result of `prepare` for these values, if the ranks
        have agreed on it.
        Returns the index in `values` of the first array whose result is not finite, or None.
        """
        devices = communicator.gpu
        if prepared is not None:
            assert devices is not None
            return _wait_and_find_nonfinite(devices.start_prepared(prepared))
        kinds, indices = set(map(type, values)), plan.nonempty
        if type(None) in kinds:
            indices = [index for index in indices if values[index] is not None]
        if devices is not None and kinds != {np.ndarray}:
            on_gpu = [index for index in indices if gpu.is_device(values[index])]
            if on_gpu:
                there = [values[index] for index in on_gpu]
                found = _wait_and_find_nonfinite(devices.start(there, self._request(weight, checks_finite)))
                if found is not None:
                    return on_gpu[found]
                indices = [index for index in indices if index not in set(on_gpu)]
        if len(indices) < len(values):
            plan, values = self.plan([plan.tensors[index] for index in indices]), [values[index] for index in indices]
        if not values:
            return None
        if not communicator.backend.fuses or (weight is not None and not _weighs(communicator, plan.dtypes)):
            self._allreduce_buckets(communicator, plan, values, weight)
            return None
        self._allreduce_group(communicator, plan, values, checks_finite, weight)
        found = communicator.nonfinite if checks_finite else -1
        return None if found < 0 else indices[found]

    def _allreduce_group(
        self, communicator: Communicator, plan: Plan, values: list[Array], checks_finite: bool, weight: float | None
    ) -> None:
        queue, residual = communicator.queue, self.residual(communicator, plan)
        if communicator.size == 1 and self._compression is Compression.none and queue.track is None:
            return
        start, waited_before_s = time.perf_counter(), queue.waited_s
        communicator.grouped_allreduce_blocking(
            values, True, self._op, self._title, self._compression, checks_finite, weight, residual
        )
        queue.waited_s = waited_before_s + time.perf_counter() - start  # includes the copies of this rank

    def _allreduce_buckets(
        self, communicator: Communicator, plan: Plan, values: list[Array], weight: float | None
    ) -> None:
        buffer = communicator.fusion_buffer
        for number, bucket in enumerate(plan.buckets):
            targets = [values[i] for i in bucket.indices]
            if len(targets) == 1:
                self._allreduce(communicator, targets[0], weight, plan.tensors[bucket.indices[0]].name)
                continue
            parts = [arrays.flat(target) for target in targets]
            packed_bytes = bucket.count * bucket.dtype.itemsize
            name = f"bucket {number} of {len(plan.buckets)}"
            with span("pack", name, packed_bytes):
                packed = buffer.pack(parts, plan.largest(bucket.dtype))
            self._allreduce(communicator, packed, weight, name)
            with span("unpack", name, packed_bytes):
                buffer.unpack(parts)
                for target, part in zip(targets, parts, strict=True):
                    arrays.copy_back(target, part)

    def _allreduce(self, communicator: Communicator, array: Array, weight: float | None, name: str) -> None:
        weighted, compression = self._weighted(array, weight)
        if compression.is_quantized:  # errors are kept for the group as a whole
            compression = Compression.none
        communicator.allreduce_blocking(weighted, True, self._op, name, compression)
        if weighted is not array:
            array[...] = weighted

    def start(
        self, communicator: Communicator, plan: Plan, targets: list[Any], weight: float | None, name: str, checks: bool
    ) -> Work[list[Any]] | Work[int] | Work[ReductionResult]:
        """Start the reduction of gradients of one dtype, all on the host or all on a GPU, which no other operation
        uses. plan: of these gradients.

        The result of the Work: on a GPU, a ReductionResult. On the host with `checks`: see
        `Communicator.checked_allreduce_`. Without: `targets`, reduced in place, or new arrays where the weighted copy
        was reduced. checks: check the results; only if `checks_finite`, or `checks_finite_on_gpu`, without a weight.
        """
        if communicator.gpu is not None and gpu.is_device(targets[0]):
            request = self._request(weight, checks)._replace(name=name, independent=True)
            return communicator.gpu.start(targets, request)
        residual = self.residual(communicator, plan)
        if checks:
            return communicator.checked_allreduce_(targets, self._op, name, self._compression, residual)
        if weight is not None and _weighs(communicator, [targets[0].dtype]):
            return communicator.grouped_allreduce(
                targets, self._op, name, self._compression, in_place=True, weight=weight, residual=residual
            )
        weighted = [self._weighted(target, weight) for target in targets]
        arrays_ = [array for array, _ in weighted]
        return communicator.grouped_allreduce(arrays_, self._op, name, weighted[0][1], in_place=True, residual=residual)

    def _weighted(self, array: Array, weight: float | None) -> tuple[Array, Compression]:
        """Return the array to reduce, and its compression. 16-bit floats are weighted and summed in float32, and
        rounded once, so they are never compressed."""
        if weight is None:
            return array, self._compression
        weighted = np.zeros_like(array, arrays.accumulator(array.dtype))
        if weight == 1:  # integers too
            weighted[...] = array
        elif weight:  # with weight 0 the result is zero even where the gradient is NaN: the mean over no samples
            numbers = arrays.view_as_real(weighted)
            np.multiply(arrays.view_as_real(array), weight, out=numbers, dtype=numbers.dtype)
        return weighted, self._compression if weighted.dtype == array.dtype else Compression.none


def _wait_and_find_nonfinite(work: Work[ReductionResult]) -> int | None:
    """Wait for a reduction of arrays on GPUs. Return the index of the first one whose checked result is not finite, or
    None."""
    flags = work.wait().flags
    if flags is None:
        return None
    work.synchronize()
    found = flags.first_position()
    return None if found < 0 else found


def _weighs(communicator: Communicator, dtypes: Iterable[np.dtype[Any]]) -> bool:
    """Whether the backend multiplies arrays by a weight. 16-bit floats are weighted and summed in float32 instead."""
    return communicator.backend.weighs and all(arrays.accumulator(dtype) == dtype for dtype in dtypes)


def writable(tensors: Sequence[Tensor], values: Sequence[Any], params: Sequence[Any] = ()) -> list[Any]:
    """Return the arrays to reduce in place: the given ones where possible. Numbers, read-only arrays and arrays that
    share memory with one before them, or with one of `params`, are replaced by copies; None stays None. params are not
    compared on GPUs."""
    values = list(values)
    if native.disjoint([*params, *values]):  # the usual case
        return values
    known = gpu.layouts(values)  # of arrays on a GPU that are writable
    if known is not None and len({layout[0] for layout in known}) == len(values):
        return values
    usable = [index for index, value in enumerate(values) if isinstance(value, np.ndarray) and value.flags.writeable]
    host = [param for param in params if isinstance(param, np.ndarray)]
    pairs = memory_conflicts([*host, *(values[index] for index in usable)])
    kept = set(usable) - {usable[second - len(host)] for _, second in pairs if second >= len(host)}
    seen = set[int]()  # the addresses of arrays on GPUs
    return [
        _writable_on_gpu(value, tensor, seen) if gpu.is_device(value)
        else value if value is None or index in kept
        else np.array(value, tensor.dtype)
        for index, (tensor, value) in enumerate(zip(tensors, values, strict=True))
    ]  # fmt: skip


def _writable_on_gpu(value: Any, tensor: Tensor, seen: set[int]) -> Any:
    """As `writable`, for one gradient on a GPU. seen: the addresses of the arrays before it; its address is added."""
    on_gpu = gpu.adopt(value)
    address = on_gpu.array.data.ptr
    if on_gpu.writable and (address not in seen or not tensor.elements):
        seen.add(address)
        return value
    with gpu.on_stream(on_gpu):
        return on_gpu.to_caller(on_gpu.array.copy())


def takes_gpu() -> bool:
    return functions.current().devices is not None


def tensor_of(name: str, value: Any) -> Tensor:
    """Return the Tensor of an array or a number. Raises InputError for other values and unsupported dtypes."""
    try:
        if gpu.is_device(value) and takes_gpu():
            return _tensor(name, *gpu.shape_and_dtype(value))
        array = value if type(value) is np.ndarray else arrays.as_host_array(value)
        return _tensor(name, array.shape, array.dtype)
    except InputError as error:
        raise InputError(f"{nest.quoted(name)}: {error}") from None


@functools.lru_cache(maxsize=2**16)  # called for every gradient
def _tensor(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Tensor:
    arrays.dtype_code(dtype)  # raises
    return Tensor(name, shape, dtype)
