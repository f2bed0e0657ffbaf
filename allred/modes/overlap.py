"""`Overlap`: reduces gradients while others are still computed, in the steps after the first `opt.reduce(name, grad)`.

    first step with reduce()   is reduced in step(); at its end all ranks adopt the order in which gradients became
                               ready on rank 0
    every later step
      1  opening     in the first reduce(), or in step() on a rank that does not call reduce(): a header exchange. All
                     ranks expect the same gradients in this order, share their numbers of samples, and say whether
                     one needs all gradients before any is changed (mistake_checks.py); then the step is as the first
      2  buckets     each is sent when its gradients are ready and the buckets before it are sent: in the same order on
                     all ranks
      3  closing     in step(), after the last bucket: a header exchange with mistakes of this rank since the opening,
                     and whether its gradients were finite, unless the reductions have checked their results

Between 1 and 3 a rank keeps its mistakes to itself and sends zeros for gradients that it lacks, because the others wait
for its buckets. So errors are raised in step(), with the same text on all ranks.

Each gradient must be where it was on rank 0 when the order was set: on the host or on a GPU.

A rank with one core cannot compute and communicate at once: to send early would only interrupt the computation. So it
sends all gradients in step(), if the thread that called reduce() in the last step computed for more than half of the
time from the first call to step(). Each rank decides for itself; the others wait for its buckets.
"""

import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from allred import arrays, world
from allred.cluster import processors
from allred.comm import arguments, functions
from allred.comm.communicator import Communicator
from allred.comm.device_reduce import ReductionResult
from allred.comm.header import OwnFields
from allred.comm.work import Work
from allred.errors import AllredError, InputError
from allred.fusion import Plan, Tensor
from allred.gpu import device_arrays as gpu
from allred.modes.clipping import Clipper
from allred.modes.detect.mistake_checks import MistakeChecks
from allred.modes.options import StepInput
from allred.modes.reducer import Reducer, takes_gpu, tensor_of, writable
from allred.modes.step_header import MISSING, NEEDS_ALL, StepHeader
from allred.timeline.recorder import span

_COMPUTING_SHARE = 0.5  # of the elapsed time: a thread that computes or waits for a core for longer is computing
_DEVICES = ("the host", "a GPU")


class Overlap:
    """The overlapped reduction of one optimizer in mode sync. `title`: prefix of errors."""

    def __init__(self, reducer: Reducer, checks: MistakeChecks, clipper: Clipper, title: str) -> None:
        self._reducer, self._checks, self._clipper, self._title = reducer, checks, clipper, title
        # The order that the ranks have agreed on.
        self._tensors: list[Tensor] = []  # in the order of the nest
        self._positions: dict[str, int] = {}  # by name, in `_tensors`
        self._params: Sequence[Any] = ()  # of the last step, by position
        self._on_gpu: list[bool] = []  # by position
        self._like: Any = None  # an empty array on the GPU of this rank; None: on the host
        self._ordered: Plan | None = None  # the tensors in the agreed order
        self._buckets: list[
            tuple[tuple[int, ...], Plan]
        ] = []  # positions and plan, in the order in which they are sent
        self._communicator: Communicator | None = None  # of the step that has begun
        self._begun = 0, 0.0, 0.0  # at the first reduce() of the step: its thread, the time, and runnable_s()
        self._computed = False  # whether this thread computed in the last step
        self._sends_early = True
        self.end_step()

    def end_step(self) -> None:
        self._given: dict[str, Any] = {}  # gradients passed to reduce(), in this order
        self._ready: dict[int, Any] = {}  # by position: the array that is reduced
        self._opening: Work[list[OwnFields]] | None = None
        self._needs_all: bool | None = None  # whether a rank needs all gradients first; None: unknown
        self._weight: float | None = None
        self._checks_results = False  # whether the reductions check their results, instead of a scan; on all ranks
        # The reductions of the buckets, and the arrays that get the results.
        self._sent: list[tuple[Work[list[Any]] | Work[int] | Work[ReductionResult], list[Any]]] = []
        self._problem, self._flags = "", 0
        self._stream: Any = None  # the CUDA stream that computed the last gradient
        if self._communicator is not None:
            self._communicator.unfinished.pop(self, None)
        self._communicator = None

    def cancel(self) -> bool:
        """Forget the gradients of the step that has begun. Return False if its opening was sent: the other ranks wait
        for this rank in `step`. Ranks may differ, because each decides when to send it."""
        if self._opening is not None:
            return False
        self.end_step()
        return True

    def forget_order(self) -> None:
        """Start again with a first step. Called on all ranks."""
        self._ordered = None

    @property
    def has_begun(self) -> bool:
        return bool(self._given)

    @property
    def has_order(self) -> bool:
        return self._ordered is not None

    def agree_on_order(self, given: StepInput, values: Sequence[Any]) -> None:
        """Adopt the order in which gradients became ready on the first rank. Collective. given: of
        the first step. values: its gradients, or their means. A missing gradient is expected where its parameter is."""
        communicator, tensors, params = given.communicator, given.tensors, given.leaves
        positions = {tensor.name: index for index, tensor in enumerate(tensors)}
        order = [positions[name] for name in self._given]
        order += [index for index in reversed(range(len(tensors))) if index not in order]
        like = next(filter(gpu.is_device, [*values, *params]), None)
        places = [param if value is None else value for value, param in zip(values, params, strict=True)]
        on_gpu = list(map(gpu.is_device, places))
        first, title = communicator.active.ranks[0], f"{self._title}: the order of early gradients"
        order, self._on_gpu = communicator.broadcast_object((order, on_gpu), first, title).wait()
        self._like = gpu.zeros(like, (0,), np.dtype(np.float32))
        self._tensors, self._positions, self._params = list(tensors), positions, params
        limit = self._reducer.bucket_bytes
        self._ordered = Plan(tuple(tensors[index] for index in order), limit)
        self._buckets = []
        for bucket in sorted(self._ordered.buckets, key=lambda bucket: bucket.indices[-1]):
            for there in (True, False):  # arrays on the GPU and on the host have different buckets
                indices = tuple(order[i] for i in bucket.indices if self._on_gpu[order[i]] is there)
                if indices:
                    self._buckets.append((indices, Plan(tuple(tensors[i] for i in indices), limit)))

    # In opt.reduce().

    def add(self, communicator: Communicator, name: str, grad: Any, samples: int | None) -> None:
        """Take a gradient of the next step and send the buckets that are complete. A mistake is raised in step()."""
        if name in self._given:
            self._problem = self._problem or f"reduce({name!r}) was called twice for one step; call step() after each"
            return
        if not self.has_begun:
            self._communicator = communicator
            communicator.unfinished[self] = f"reduce({name!r}) has begun a step; call {self._title} before"
            self._begun = threading.get_ident(), time.perf_counter(), processors.runnable_s()
            self._sends_early = self._should_send_early()
            if self._sends_early:
                functions.enable_progress(communicator)
        self._given[name] = grad
        self._order_streams([grad])
        if not self.has_order or not self._sends_early:
            return
        if self._opening is None:
            self._open(communicator, samples)
        self._problem = self._problem or self._accept(name, grad)
        self._advance(communicator)

    def _should_send_early(self) -> bool:
        """Return whether reduce() sends gradients in this step."""
        setting = world.config().overlap
        if setting == "auto":
            return any(self._on_gpu) or not self._computed or processors.cores_per_rank() > 1
        return setting == "always"

    def _accept(self, name: str, grad: Any) -> str:
        """Note that a gradient is ready; return why it cannot be used, or ""."""
        index = self._positions.get(name)
        if index is None:
            return _unknown(name, list(self._positions))
        tensor = self._tensors[index]
        try:
            number = isinstance(grad, (int, float)) or (isinstance(grad, complex) and arrays.is_complex(tensor.dtype))
            got = tensor if number else tensor_of(name, grad)
        except InputError as error:
            return f"reduce(): {error}"
        if got != tensor:
            return f"reduce({name!r}): got {arrays.describe(got.shape, got.dtype)}, and the gradient is {tensor}"
        if problem := self._wrong_device(index, grad):
            return problem
        self._ready[index] = writable([tensor], [grad], [self._params[index]])[0]
        return ""

    def _wrong_device(self, index: int, grad: Any) -> str:
        here, before = gpu.is_device(grad), self._on_gpu[index]
        if here == before:
            return ""
        name = self._tensors[index].name
        return f"the gradient '{name}' is on {_DEVICES[here]}, and was on {_DEVICES[before]} when the order was set"

    def _open(self, communicator: Communicator, samples: int | None) -> None:
        assert self._ordered is not None
        saved = self._reducer.errors is not None and self._reducer.errors.saved
        flags = NEEDS_ALL * bool(self._checks.requests(communicator, samples) or saved)
        title = f"{self._title}: the order of the gradients"
        lines, settings = self._ordered.lines, self._clipper.settings
        self._opening = self._reducer.start_negotiation(
            communicator, title, lines, settings, StepHeader(samples, flags)
        )

    def _advance(self, communicator: Communicator) -> None:
        assert self._opening is not None
        try:
            if self._needs_all is None and not self._opening.done():
                return
            needs_all = self._complete_opening(communicator)
        except AllredError:  # on all ranks; raised in step()
            return
        while not needs_all and len(self._sent) < len(self._buckets):
            if not all(index in self._ready for index in self._buckets[len(self._sent)][0]):
                break
            self._send(communicator)
        if self._sent and any(self._on_gpu):  # C makes progress on the host only
            communicator.queue.progress(self._sent[-1][0])

    def _complete_opening(self, communicator: Communicator) -> bool:
        """Wait for the opening. Return whether a rank needs all gradients before any is changed."""
        assert self._opening is not None
        if self._needs_all is None:
            with span("negotiate", self._title):
                agreement = self._reducer.agreement(communicator, self._opening.wait())
            self._weight = agreement.weight
            self._needs_all = agreement.any(NEEDS_ALL)
            counts_equally = agreement.weight is None and communicator.active.size == communicator.size
            host = all(self._on_gpu) or self._reducer.checks_finite(communicator)
            device = not any(self._on_gpu) or self._reducer.checks_finite_on_gpu(communicator)
            self._checks_results = counts_equally and host and device and self._checks.policy != "ignore"
        return self._needs_all

    def _send(self, communicator: Communicator) -> None:
        number = len(self._sent)
        indices, bucket = self._buckets[number]
        targets = [self._ready[index] for index in indices]
        self._order_streams(targets)
        name = f"{self._title}: early bucket {number} of {len(self._buckets)}"
        if not self._checks_results:
            self._flags |= self._checks.scan_bucket(bucket, targets)
        work = self._reducer.start(communicator, bucket, targets, self._weight, name, self._checks_results)
        self._sent.append((work, targets))

    def _order_streams(self, grads: Sequence[Any]) -> None:
        """Make the stream of each gradient wait for the stream of the one before it. Gradients of one bucket may be
        computed on several streams, and sent in a later call of reduce()."""
        for grad in filter(gpu.is_device, grads) if takes_gpu() else ():
            stream = gpu.current_stream(grad)
            if self._stream is not None and stream.ptr != self._stream.ptr:
                stream.wait_event(self._stream.record())
            self._stream = stream

    # In opt.step().

    def with_problem(self, given: StepInput) -> StepInput:
        """Return the input of a step with the first mistake in the calls of reduce() before it."""
        if self._given:
            self._order_streams(given.values)
            thread, time_s, runnable_s = self._begun
            share = (processors.runnable_s() - runnable_s) / (time.perf_counter() - time_s)
            self._computed = thread == threading.get_ident() and share > _COMPUTING_SHARE
        problem = given.problem
        if self._given or self.has_order:
            problem = problem or self._problem or self._shared_memory_problem(given)
        if self.has_order:
            problem = problem or self._mismatch(given.tensors, given.values)
        else:
            positions = {tensor.name: index for index, tensor in enumerate(given.tensors)}
            problem = problem or self._other_array_problem(positions, given.values)
        return given._replace(problem=problem)

    def _other_array_problem(self, positions: dict[str, int], values: Sequence[Any]) -> str:
        """Return the error text if reduce() got a name or an array that step() did not get; "" if not."""
        for name, grad in self._given.items():
            index = positions.get(name)
            if index is None:
                return _unknown(name, list(positions))
            if values[index] is not grad:
                return f"reduce({name!r}) got another array than step(); pass the same array to both"
        return ""

    def _shared_memory_problem(self, given: StepInput) -> str:
        """Return the error text if a gradient that was passed to reduce() shares memory with another, or with another
        parameter of the host; "" if not."""
        grads = list(zip(given.tensors, given.values, strict=True))
        there = [(t.name, value) for t, value in grads if gpu.is_device(value) and t.elements]
        named = [(tensor.name, value) for tensor, value in grads]
        named += [(f"parameter {tensor.name}", leaf) for tensor, leaf in zip(given.tensors, given.leaves, strict=True)]
        host = [(name, value) for name, value in named if isinstance(value, np.ndarray)]
        starts = gpu.addresses([value for _, value in there])
        pairs = [(host[i][0], host[j][0]) for i, j in arguments.memory_conflicts([value for _, value in host])]
        pairs += [(there[i][0], there[j][0]) for i, j in arrays.overlapping_ranges([(at, at + 1) for at in starts])]
        for first, second in pairs:
            if first == second and first in self._given:
                return f"'{first}' has several elements in the same memory, which reduce() cannot change; pass a copy"
            if (first in self._given or second in self._given) and second != f"parameter {first}":
                return f"'{first}' and '{second}' share memory, which reduce() changes for both; pass a copy of one"
        return ""

    def needs_all_gradients(self, communicator: Communicator, samples: int | None) -> bool:
        """Complete the opening. Return whether a rank needs all gradients before any is changed. Collective."""
        if self._opening is None:
            self._open(communicator, samples)
        return self._complete_opening(communicator)

    def finish(self, given: StepInput) -> list[Any] | None:
        """Send the other gradients, wait for all, and return them; None if the step is skipped."""
        problem = given.problem
        rest = [index for index in range(len(self._tensors)) if index not in self._ready]
        tensors = [self._tensors[index] for index in rest]
        values = writable(tensors, [None if problem else given.values[index] for index in rest], given.leaves)
        self._params = given.leaves
        missing = [index for index, value in zip(rest, values, strict=True) if value is None]
        self._ready |= zip(rest, values, strict=True)
        for index in missing:
            self._ready[index] = gpu.zeros(self._like if self._on_gpu[index] else None, *self._tensors[index][1:])
        while len(self._sent) < len(self._buckets):
            self._send(given.communicator)
        return self._close(given, missing, self._complete_buckets())

    def _complete_buckets(self) -> int | None:
        """Wait for all buckets. Return the position of the first gradient whose checked result is not finite, or None.

        The host waits for the GPU only after the last bucket.
        """
        nonfinite, on_gpu = [], []
        for (work, targets), (indices, bucket) in zip(self._sent, self._buckets, strict=True):
            found = work.wait()
            if isinstance(found, ReductionResult):
                if found.flags is not None and bucket.floats:
                    on_gpu.append((work, found.flags, indices))
            elif isinstance(found, int):
                nonfinite += [indices[found]] if found >= 0 else []
            else:
                for target, result in zip(targets, found, strict=True):
                    if target is not result:
                        target[...] = result
        if on_gpu:
            on_gpu[-1][0].synchronize()  # all of these end on the unpacking stream
        for _, flags, indices in on_gpu:
            if (found := flags.first_position()) >= 0:
                nonfinite.append(indices[found])
        return nonfinite[0] if nonfinite else None

    def _close(self, given: StepInput, missing: list[int], nonfinite: int | None) -> list[Any] | None:
        """Exchange mistakes, missing gradients and flags. missing: positions of the gradients that this rank lacks.
        nonfinite: see `_complete_buckets`."""
        title = f"{self._title}: the end of early gradients"
        plan = self._reducer.plan(self._tensors)
        window = 0 if given.problem else self._checks.window(plan, given, given.values)
        with span("negotiate", title):
            own = StepHeader(flags=self._flags | MISSING * bool(missing), content_hash=window)
            agreement = self._reducer.exchange_flags(given.communicator, title, own, given.problem)
        mean = [self._ready[index] for index in range(len(self._tensors))]
        if agreement.any(MISSING):
            here = [index not in missing for index in range(len(self._tensors))]
            anywhere = self._reducer.present_anywhere(given.communicator, here)
            mean = [value if present else None for value, present in zip(mean, anywhere, strict=True)]
        checks = self._checks
        passes = checks.passes(agreement, agreement.hashes, plan, mean, given.params)
        return mean if passes and checks.passes_reduced(agreement, plan, mean, nonfinite) else None

    def _mismatch(self, tensors: Sequence[Tensor], values: Sequence[Any]) -> str:
        """Describe a difference between the gradients of step() and of reduce(); "" if there is none."""
        if list(tensors) != self._tensors:
            return "step() has other gradients, by name, shape or dtype, than the step that set the order of gradients"
        if problem := self._other_array_problem(self._positions, values):
            return problem
        present = [(index, value) for index, value in enumerate(values) if value is not None]
        return next(filter(None, (self._wrong_device(index, value) for index, value in present)), "")


def _unknown(name: str, names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"reduce({name!r}): no gradient has this name; they are {', '.join(map(repr, names[:5]))}{more}"
