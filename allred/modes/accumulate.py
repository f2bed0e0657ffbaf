"""Gradient accumulation: several micro-steps make one step, so that a large batch fits into little memory."""

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from allred import arrays
from allred.errors import InputError
from allred.fusion.plan import Tensor
from allred.gpu.arithmetic import compute


class Accumulator:
    """Adds up the gradients of several micro-steps, each weighted by its samples; 16-bit floats in float32."""

    def __init__(self, micro_steps: int) -> None:
        try:
            self.micro_steps = operator.index(micro_steps)
        except TypeError:
            self.micro_steps = 0
        if self.micro_steps < 1:
            raise InputError(f"accumulate={micro_steps!r} must be a whole number of micro-steps, at least 1")
        self.clear()

    @property
    def filled(self) -> int:
        """Micro-steps so far, of the step at hand."""
        return len(self._samples)

    def clear(self) -> None:
        """Start anew."""
        self._tensors: list[Tensor] = []
        self._sums: list[Any] = []
        self._samples: list[int | None] = []  # of each call so far

    def add(self, tensors: Sequence[Tensor], values: Sequence[Any], samples: int | None) -> bool:
        """Take the gradients of one call; True if it is the last of a step.

        Raises InputError if they do not fit those of the calls before.
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
        """The means of what was added, as new arrays of the tensors' dtypes, and the number of samples; starts anew."""
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
