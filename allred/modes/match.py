"""The input of a step: parameters with their gradients (`Matcher`), micro-steps (`Accumulator`), `SampleCount`.

Most steps have the same names, shapes and dtypes as the step before, in dicts, lists and tuples of contiguous arrays. C
checks that in 0.1 us per tensor, or 0.5 us for tensors on a GPU. All other input takes the slow path, which describes
errors.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from allred import arrays, log, native, nest
from allred.data.loader import claim_samples
from allred.errors import InputError
from allred.fusion import Tensor
from allred.gpu import device_arrays as gpu
from allred.gpu.device_arrays import compute
from allred.modes.reducer import takes_gpu, tensor_of
from allred.validators import integer

# tensors, leaves, values, problem, plain of a `StepInput`. A tuple: one is made in each step.
Matched = tuple[list[Tensor], list[Any], list[Any], str, bool]


class Matcher:
    """Matches the parameters and gradients of one optimizer. `title`: prefix of its warnings."""

    def __init__(self, title: str = "opt.step()") -> None:
        self._title = title
        self._warned_float64 = False
        self._tensors: list[Tensor] = []  # of the last step; [] if the next one must take the slow path
        self._structure = nest.NO_STRUCTURE  # of its parameters and gradients
        self._on_gpu: list[Any] | None = None  # its layouts, if it was on a GPU

    def match(self, params: Any, grads: Any) -> Matched:
        """Match two nests. The same list of tensors as in the last call means that all is as before, on the host."""
        again = self._match_again(params, grads)
        if again is not None:
            return again
        try:
            matched = _match_leaves(nest.leaves(params), nest.leaves(grads))
        except InputError as error:
            matched = [], [], [], str(error), False
        tensors, leaves, values, problem, _ = matched
        if not self._warned_float64 and not problem:
            self._warn_float64(tensors, leaves, values)
        self._tensors = []
        self._structure = nest.NO_STRUCTURE if problem else nest.structure(params)
        if native.leaves_of(self._structure, grads) is None:
            return matched
        plain = native.match(tensors, leaves, values)
        self._on_gpu = None if plain else _layouts(leaves, values)
        if plain or self._on_gpu:
            self._tensors = tensors
        return tensors, leaves, values, problem, plain

    def _warn_float64(self, tensors: list[Tensor], leaves: list[Any], values: list[Any]) -> None:
        """Print one warning if gradients are float64 and their parameters float32, or complex128 and complex64."""
        wide = [
            (tensor, dtype)
            for tensor, leaf, value in zip(tensors, leaves, values, strict=True)
            if value is not None
            and (dtype := tensor_of(tensor.name, leaf).dtype) in (np.float32, np.complex64)
            and tensor.dtype == np.result_type(dtype, np.float64)
        ]
        if wide:
            self._warned_float64 = True
            others = f" and {len(wide) - 1} more" if len(wide) > 1 else ""
            (name, _, double), single = wide[0]
            log.warning(
                f"{self._title}: the gradients of {single} parameters are {double} ('{name}'{others}). {double} "
                f"doubles the bytes that are sent, and the parameters stay {single}. Compute the gradients in {single} "
                f"({double} data or constants make them {double}), or pass grad.astype(numpy.{single})"
            )

    def _match_again(self, params: Any, grads: Any) -> Matched | None:
        """Match input that is like that of the last call; None if it is not."""
        if not self._tensors:
            return None
        leaves, values = native.leaves_of(self._structure, params), native.leaves_of(self._structure, grads)
        if leaves is None or values is None:
            return None
        if self._on_gpu is None:
            matches = native.match(self._tensors, leaves, values)
            return (self._tensors, leaves, values, "", True) if matches else None
        if takes_gpu() and self._on_gpu == _layouts(leaves, values):
            return list(self._tensors), leaves, values, "", False
        return None


def _layouts(leaves: list[Any], values: list[Any]) -> list[Any] | None:
    """Return the layouts of parameters and gradients on a GPU, without their addresses; None if they take long."""
    params, grads = gpu.layouts(leaves), gpu.layouts(values)
    return None if params is None or grads is None else [layout[1:] for layout in params + grads]


def _match_leaves(params: list[nest.Leaf], grads: list[nest.Leaf]) -> Matched:
    """Raises InputError if they do not match."""
    names, given_names = [name for name, _ in params], [name for name, _ in grads]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"two parameters are named '{twice}': dict keys must differ as text")
    if names != given_names:
        odd = sorted(set(names) ^ set(given_names))[:5]
        raise InputError(f"params and grads differ in structure, in {', '.join(map(repr, odd)) or 'their order'}")
    tensors = []
    for (name, param), (_, grad) in zip(params, grads, strict=True):
        expected = parameter(name, param)
        got = expected if grad is None else tensor_of(name, grad)
        if got.shape != expected.shape:
            raise InputError(f"the gradient of {expected} has shape {got.shape}")
        if arrays.is_complex(got.dtype) and not arrays.is_complex(expected.dtype):
            raise InputError(f"the gradient of {expected} is {got.dtype}; pass its real part")
        tensors.append(expected if isinstance(grad, (int, float, complex)) else got)  # Python numbers have no dtype
    return tensors, [leaf for _, leaf in params], [grad for _, grad in grads], "", False


def parameter(name: str, leaf: Any) -> Tensor:
    """Return the Tensor of a parameter. Raises InputError if it cannot be updated in place. name: "" for an array that
    is the only parameter."""
    if type(leaf) is np.ndarray and leaf.flags.writeable:
        return tensor_of(name, leaf)
    if gpu.is_device(leaf):
        if not takes_gpu():
            arrays.as_host_array(leaf)  # raises
        if not gpu.adopt(leaf).writable:
            raise InputError(
                f"{nest.quoted(name, 'parameter')} is on a GPU and cannot be written to; it is updated in place"
            )
        return tensor_of(name, leaf)
    arrays.as_host_array(leaf)  # raises its own errors for devices, torch tensors and masked arrays
    if not isinstance(leaf, np.ndarray) or not leaf.flags.writeable:
        what = "a read-only array" if isinstance(leaf, np.ndarray) else type(leaf).__name__
        raise InputError(
            f"{nest.quoted(name, 'parameter')} is {what}; it is updated in place, so it must be a writable array"
        )
    return tensor_of(name, leaf)


class Accumulator:
    """Adds up the gradients of several micro-steps, each weighted by its samples; 16-bit floats in float32."""

    def __init__(self, micro_steps: int) -> None:
        self.micro_steps = micro_steps
        self.clear()

    @property
    def filled(self) -> int:
        return len(self._samples)

    def clear(self) -> None:
        self._tensors: list[Tensor] = []
        self._sums: list[Any] = []
        self._samples: list[int | None] = []  # of each micro-step
        self.problem = ""  # the first error of these micro-steps; raised at the end of the step

    def add(self, tensors: Sequence[Tensor], values: Sequence[Any], samples: int | None, problem: str = "") -> bool:
        """Add the gradients of one micro-step; return whether it is the last of a step. problem: why they cannot be
        used; the first one is kept for the end of the step, because ranks communicate only there."""
        problem = problem or self._refusal(tensors, samples)
        self._samples.append(samples)
        if problem and not self.problem:
            self.problem = f"micro-step {self.filled} of {self.micro_steps}: {problem}"
        if not self.problem:
            self._add(tensors, values, 1 if samples is None else samples)
        return self.filled == self.micro_steps

    def _refusal(self, tensors: Sequence[Tensor], samples: int | None) -> str:
        if odd := next((tensor for tensor in tensors if not arrays.is_inexact(tensor.dtype)), None):
            return f"the gradient of {odd} cannot be accumulated: its mean would be rounded; cast it"
        if self._samples and list(tensors) != self._tensors:
            return "the gradients of this micro-step have other names, shapes or dtypes than those before it"
        if self._samples and (samples is None) != (self._samples[0] is None):
            return "samples are known for some micro-steps of this step and not for others; give all or none"
        return ""

    def _add(self, tensors: Sequence[Tensor], values: Sequence[Any], weight: int) -> None:
        if not self._tensors:
            self._tensors, self._sums = list(tensors), [None] * len(values)
        for index, (tensor, value) in enumerate(zip(tensors, values, strict=True)):
            if value is not None and weight:
                wide = arrays.accumulator(tensor.dtype)
                value = np.asarray(value, wide) if isinstance(value, (int, float, complex)) else value
                added, before = compute(np.multiply, value, weight, wide=wide), self._sums[index]
                self._sums[index] = added if before is None else compute(np.add, before, added, wide=wide)

    def take(self) -> tuple[list[Any], int | None]:
        """Return the means as new arrays of the dtypes of the tensors, and the number of samples; then clear."""
        counts = [count for count in self._samples if count is not None]
        total = sum(counts) if counts else len(self._samples)
        means = [
            None
            if added is None
            else compute(np.divide, added, max(total, 1), wide=arrays.accumulator(tensor.dtype), dtype=tensor.dtype)
            for tensor, added in zip(self._tensors, self._sums, strict=True)
        ]
        self.clear()
        return means, sum(counts) if counts else None


class SampleCount:
    """The number of samples of each step: the argument of its first reduce() or of step(), else the share of the
    current batch (data/loader.py)."""

    def __init__(self) -> None:
        self._claimed: tuple[int | None, str] | None = None  # by reduce() for the next step: the number, or an error

    def of_reduce(self, samples: Any) -> int | None:
        """Return the samples of the next step; `samples` counts in the first call. An error is raised by `of_step`."""
        if self._claimed is None:
            try:
                self._claimed = claim_samples(_whole(samples)), ""
            except InputError as error:
                self._claimed = None, str(error)
        return self._claimed[0]

    @property
    def problem(self) -> str:
        """The error of `of_reduce`, or ""."""
        return "" if self._claimed is None else self._claimed[1]

    def of_step(self, samples: Any) -> int | None:
        claimed, self._claimed = self._claimed, None
        if claimed is None:
            return claim_samples(samples if samples is None else _whole(samples))
        if claimed[1]:
            raise InputError(claimed[1])
        if samples is not None and _whole(samples) != claimed[0]:
            raise InputError(f"samples={samples!r} in step(), but {claimed[0]!r} in the first reduce(); give it there")
        return claimed[0]


class UnknownSamples(SampleCount):
    """The number of samples of steps that are not known by the batches of allred.data."""

    def of_reduce(self, samples: Any) -> int | None:
        return _whole(samples)

    def of_step(self, samples: Any) -> int | None:
        return _whole(samples)


def _whole(samples: Any) -> int | None:
    return None if samples is None else integer("samples", samples, 0)
