"""Gradient accumulation over several micro-steps (`Accumulator`), and the samples of a step (`SampleCount`)."""

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from allred import arrays
from allred.data.loader import claim_samples
from allred.errors import InputError
from allred.fusion import Tensor
from allred.gpu.arithmetic import compute


class Accumulator:
    """Adds up the gradients of several micro-steps, each weighted by its samples; 16-bit floats in float32."""

    def __init__(self, micro_steps: int) -> None:
        self.micro_steps = micro_steps
        self.clear()

    @property
    def filled(self) -> int:
        """Micro-steps added since the last complete step."""
        return len(self._samples)

    def clear(self) -> None:
        """Discard the sums."""
        self._tensors: list[Tensor] = []
        self._sums: list[Any] = []
        self._samples: list[int | None] = []  # of each micro-step

    def add(self, tensors: Sequence[Tensor], values: Sequence[Any], samples: int | None) -> bool:
        """Add the gradients of one micro-step; return whether it is the last of a step.

        Raises InputError if they differ from those of the micro-steps before in name, shape or dtype.
        """
        if odd := next((tensor for tensor in tensors if not arrays.is_float(tensor.dtype)), None):
            raise InputError(f"the gradient of {odd} cannot be accumulated: its mean would be rounded; cast it")
        if not self._samples:
            self._tensors, self._sums = list(tensors), [None] * len(values)
        if list(tensors) != self._tensors:
            raise InputError("the gradients of this micro-step have other names, shapes or dtypes than those before it")
        if self._samples and (samples is None) != (self._samples[0] is None):
            raise InputError("samples are known for some micro-steps of this step and not for others; give all or none")
        self._samples.append(samples)
        weight = 1 if samples is None else samples
        for index, (tensor, value) in enumerate(zip(tensors, values, strict=True)):
            if value is not None and weight:
                wide = arrays.accumulator(tensor.dtype)
                added, before = compute(np.multiply, value, weight, wide=wide), self._sums[index]
                self._sums[index] = added if before is None else compute(np.add, before, added, wide=wide)
        return len(self._samples) == self.micro_steps

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
                self._claimed = _claim(samples), ""
            except InputError as error:
                self._claimed = None, str(error)
        return self._claimed[0]

    def of_step(self, samples: Any) -> int | None:
        """Return the samples of the step that ends. Raises InputError."""
        claimed, self._claimed = self._claimed, None
        if claimed is None:
            return _claim(samples)
        if claimed[1]:
            raise InputError(claimed[1])
        if samples is not None and _whole(samples) != claimed[0]:
            raise InputError(f"samples={samples!r} in step(), but {claimed[0]!r} in the first reduce(); give it there")
        return claimed[0]


def _claim(samples: Any) -> int | None:
    return claim_samples(None if samples is None else _whole(samples))


def _whole(samples: Any) -> int:
    try:
        number = operator.index(samples)
    except TypeError:
        number = -1
    if number < 0:
        raise InputError(f"samples={samples!r} must be a whole number of at least 0")
    return number
