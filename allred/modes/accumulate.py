"""Gradient accumulation: several micro-steps make one step, so that a large batch fits into little memory."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from allred.errors import InputError


class Accumulator:
    """Adds up the gradients of several micro-steps, each weighted by its samples."""

    def __init__(self, micro_steps: int) -> None:
        self._micro_steps = micro_steps
        self._sums: list[Any] = []
        self._samples: list[int | None] = []  # of each call so far

    def add(self, values: Sequence[Any], samples: int | None) -> bool:
        """Take the gradients of one call; True if it is the last of a step."""
        if self._samples and (samples is None) != (self._samples[0] is None):
            raise InputError("samples are known for some micro-steps of this step and not for others; give all or none")
        if not self._samples:
            self._sums = [None] * len(values)
        self._samples.append(samples)
        weight = 1 if samples is None else samples
        for index, value in enumerate(values):
            if value is not None and weight:
                added = np.multiply(value, weight)
                self._sums[index] = added if self._sums[index] is None else self._sums[index] + added
        return len(self._samples) == self._micro_steps

    def take(self) -> tuple[list[Any], int | None]:
        """The mean of what was added, and its number of samples; starts anew."""
        counts = [count for count in self._samples if count is not None]
        total = sum(counts) if counts else len(self._samples)
        means = [None if added is None else np.asarray(added / max(total, 1), added.dtype) for added in self._sums]
        self._sums, self._samples = [], []
        return means, sum(counts) if counts else None
