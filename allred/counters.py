"""Counters of a rank in memory that its watcher maps: the watcher reads them while the rank computes, hangs or is dead.

The rank writes some numbers at the end of each step, without a system call. A reader may see a part of the numbers of
one step and a part of the next.
"""

import mmap
import os
from collections.abc import Callable
from typing import Any, NamedTuple


class Values(NamedTuple):
    """The numbers of a rank since init(). Times are in seconds, and sums over all steps; bytes are those of gradients.

    step: the global step. in_step: 1 while the rank is in opt.step, else 0. seconds: of training: a step
    lasts from the end of the step before to its own end. waiting_s: until other ranks arrived; mode ps: with the
    servers. communicating_s: without these waits. The rest of `seconds` is computing (`shares`). staleness: mode ps,
    sum over the gradients. rounds: exchanges of mode local, and of mode ps with `every`.
    """

    step: float = 0
    in_step: float = 0
    steps: float = 0
    examples: float = 0
    seconds: float = 0
    waiting_s: float = 0
    communicating_s: float = 0
    bytes: float = 0
    staleness: float = 0
    dropped: float = 0
    skipped: float = 0
    rounds: float = 0


_FIELDS = Values._fields
_STEP, _IN_STEP, _STEPS, _SKIPPED, _ROUNDS = map(_FIELDS.index, ("step", "in_step", "steps", "skipped", "rounds"))
_WAITING, _COMMUNICATING, _STALENESS = map(_FIELDS.index, ("waiting_s", "communicating_s", "staleness"))


class Shares(NamedTuple):
    """The parts of a rank's time, whose sum is 1. computing: all that is not one of the others, also updates and input.
    waiting: until other ranks arrived; mode ps: with the servers. communicating: without these waits."""

    computing: float
    waiting: float
    communicating: float

    def __str__(self) -> str:
        waiting, communicating = round(100 * self.waiting), round(100 * self.communicating)
        computing = max(0, 100 - waiting - communicating)
        return f"{computing} % computing, {waiting} % waiting, {communicating} % communicating"


def shares(seconds: float, waiting_s: float, communicating_s: float) -> Shares | None:
    """Return the shares of a time in which a rank has waited and communicated; None if the time is 0.

    >>> print(shares(4.0, waiting_s=1.5, communicating_s=0.1))
    60 % computing, 38 % waiting, 2 % communicating
    """
    total = max(seconds, waiting_s + communicating_s)  # they are measured by several clocks
    if total <= 0:
        return None
    return Shares((total - waiting_s - communicating_s) / total, waiting_s / total, communicating_s / total)


def _add_numbers(values: Any, first: int, *numbers: float) -> None:
    for position, number in enumerate(numbers, first):
        values[position] += number


class Counters:
    """The counters of this rank. add_numbers: `native.add_numbers`, which takes a quarter of the time."""

    def __init__(self, add_numbers: Callable[..., None] = _add_numbers) -> None:
        self._values = memoryview(bytearray(8 * len(_FIELDS))).cast("d")
        self._add_numbers = add_numbers

    def share(self) -> int:
        """Move the counters into memory that other processes can map. Return its descriptor, which the caller closes;
        -1 if there is no memory: then monitors show zeros."""
        descriptor = -1
        try:
            descriptor = os.memfd_create("rank-counters", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, mmap.PAGESIZE)
            shared = memoryview(mmap.mmap(descriptor, mmap.PAGESIZE)).cast("d")
        except OSError:
            if descriptor >= 0:
                os.close(descriptor)
            return -1
        shared[: len(_FIELDS)] = self._values[: len(_FIELDS)]
        self._values = shared
        return descriptor

    @property
    def times(self) -> tuple[float, float]:
        """waiting_s and communicating_s of all steps."""
        return self._values[_WAITING], self._values[_COMMUNICATING]

    def begin_step(self) -> None:
        self._values[_IN_STEP] = 1.0

    def end_step(
        self, step: int, samples: int, seconds: float, waiting_s: float, communicating_s: float, nbytes: int,
        staleness: int = 0, dropped: bool = False,
    ) -> None:  # fmt: skip
        """Count a step. step: the global step; the others: see `Values`, of this step only. samples: of this rank."""
        values = self._values
        values[_STEP] = step
        self._add_numbers(values, _STEPS, 1.0, samples, seconds, waiting_s, communicating_s, nbytes, staleness, dropped)
        values[_IN_STEP] = 0.0

    def skip(self) -> None:
        """Count a step whose gradients were not finite."""
        self._values[_SKIPPED] += 1.0

    def count_gradient(self, staleness: int, dropped: bool) -> None:
        """Mode ps: count a gradient that was pushed without a step."""
        self._add_numbers(self._values, _STALENESS, staleness, dropped)

    def count_round(self) -> None:
        """Count an exchange of a round."""
        self._values[_ROUNDS] += 1.0


class CountersReader:
    """The counters of a rank in its watcher. descriptor: of their memory, which is closed; None: they are zeros."""

    def __init__(self, descriptor: int | None) -> None:
        self._values = memoryview(bytes(8 * len(_FIELDS))).cast("d")
        if descriptor is not None:
            self._values = memoryview(mmap.mmap(descriptor, mmap.PAGESIZE, prot=mmap.PROT_READ)).cast("d")
            os.close(descriptor)

    def read(self) -> list[float]:
        """Return the numbers in the order of `Values`."""
        return [float(value) for value in self._values[: len(_FIELDS)]]
