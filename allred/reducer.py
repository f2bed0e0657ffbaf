"""Gradients in, averaged gradients out.

    check: all ranks bring the same tensors -> plan -> weight -> pack -> allreduce -> unpack, bucket by bucket

Before the first byte moves, the ranks compare their plans and tell each other how many samples their gradients stand
for, in one header (comm/header.py); a rank whose gradients cannot be used says so there, and all raise the same error.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from allred import arrays
from allred.arrays import Array
from allred.comm import ops
from allred.comm.base import Communicator
from allred.comm.ops import ReduceOp
from allred.errors import InputError
from allred.fusion.buffer import FusionBuffer
from allred.fusion.plan import Plan, Tensor, plan

# The note in a header: samples in the low bits, and two flags.
_SAMPLES = 2**48 - 1
_UNCOUNTED = 2**62  # this rank does not know its number of samples
_MISSING = 2**63  # this rank lacks a gradient


class Reducer:
    """Averages (or sums) lists of gradients over the ranks of a communicator. `title` is what errors begin with."""

    def __init__(self, communicator: Communicator, op: ReduceOp, bucket_bytes: int, title: str) -> None:
        if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            raise InputError(f"gradients are combined with allred.Average or allred.Sum, not with op={op!r}")
        self.communicator = communicator
        self.samples = 0  # of all ranks, in the last reduction; 0 if they were not counted
        self._op, self._bucket_bytes, self._title = op, bucket_bytes, title
        self._buffer = FusionBuffer(communicator, bucket_bytes)
        self._plans: dict[tuple[Tensor, ...], Plan] = {}

    def reduce(
        self, tensors: Sequence[Tensor], values: Sequence[Any], samples: int | None, problem: str = ""
    ) -> list[Any]:
        """The reduced gradients, in order: writable arrays among `values` are overwritten, others give new arrays.

        tensors: what every rank must bring. values: the gradients, of the tensors' shapes and dtypes; None counts as
        zeros if another rank has that gradient, and stays None otherwise. samples: how many samples the gradients are
        the mean of; ranks with more count for more. problem: why this rank cannot take part, in words.

        Raises InputError or MismatchError, the same on every rank, before anything has been changed.
        """
        ready = [_writable(value) for value in values] if not problem else []
        note = _UNCOUNTED if samples is None else min(samples, _SAMPLES)
        note |= _MISSING if any(value is None for value in ready) else 0
        whole = self.plan(tensors)
        problem = problem or next((p for b in whole.buckets if (p := ops.refusal(self._op, b.dtype))), "")
        notes = self.communicator.check("step", self._title, whole.fingerprint, note, problem).wait()
        if any(each & _MISSING for each in notes):
            ready = self._fill_missing(tensors, ready)
        factor = self._factor(notes)
        present = [i for i, value in enumerate(ready) if value is not None]
        self._run(self.plan([tensors[i] for i in present]), [ready[i] for i in present], factor)
        return ready

    def plan(self, tensors: Sequence[Tensor]) -> Plan:
        """The buckets in which `tensors` are reduced."""
        key = tuple(tensors)
        if key not in self._plans:
            if len(self._plans) >= 16:  # gradients of ever changing shape: do not keep them all
                self._plans.clear()
            self._plans[key] = plan(key, self._bucket_bytes)
        return self._plans[key]

    def _fill_missing(self, tensors: Sequence[Tensor], values: list[Any]) -> list[Any]:
        """Zeros where this rank lacks a gradient that another one has."""
        here = np.array([value is not None for value in values], np.uint8)
        anywhere = self.communicator.allreduce_(here, ReduceOp.MAX, f"{self._title}: who has which gradient").wait()
        return [
            np.zeros(tensor.shape, tensor.dtype) if value is None and some else value
            for tensor, value, some in zip(tensors, values, anywhere, strict=True)
        ]

    def _factor(self, notes: list[int]) -> float:
        """By how much this rank's gradients count: 1 where all ranks have equally many samples."""
        counted = [not note & _UNCOUNTED for note in notes]
        if any(counted) and not all(counted):
            ranks = [rank for rank, known in enumerate(counted) if not known]
            raise InputError(f"{self._title}: ranks {ranks} do not say how many samples they have, the others do")
        samples = [note & _SAMPLES for note in notes]
        self.samples = sum(samples) if all(counted) else 0
        if self._op is ReduceOp.SUM or len(set(samples)) == 1:
            return 1.0
        return samples[self.communicator.rank] * len(samples) / sum(samples)

    def _run(self, plan: Plan, values: list[Array], factor: float) -> None:
        for number, bucket in enumerate(plan.buckets):
            targets = [values[i] for i in bucket.indices]
            parts = [arrays.flat(target) for target in targets]
            if fused := len(parts) > 1:
                flat, name = self._buffer.pack(parts), f"bucket {number} of {len(plan.buckets)}"
            else:
                flat, name = parts[0], plan.tensors[bucket.indices[0]].name
            if factor == 0.0:
                flat[:] = 0  # even if they are NaN: the mean over no samples
            elif factor != 1.0:
                np.multiply(flat, factor, out=flat)
            self.communicator.allreduce_(flat, self._op, name).wait()
            if fused:
                self._buffer.unpack(parts)
            for target, part in zip(targets, parts, strict=True):
                if not np.shares_memory(target, part):
                    target[...] = part.reshape(target.shape)


def _writable(value: Any) -> Any:
    """The array to reduce in: the caller's own, where it can be written; a copy of numbers and read-only arrays."""
    if value is None or (isinstance(value, np.ndarray) and value.flags.writeable):
        return value
    return np.array(arrays.as_host_array(value))


def tensor_of(name: str, value: Any) -> Tensor:
    """What a plan has to know of an array or a number. Raises InputError if it is not one, or of unusable dtype."""
    try:
        array = arrays.as_host_array(value)
        arrays.dtype_code(array.dtype)
    except InputError as error:
        raise InputError(f"'{name}': {error}") from None
    return Tensor(name, array.shape, array.dtype)
