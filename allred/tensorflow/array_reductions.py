"""Reductions of arrays as Horovod defines them: factors before and after, averages of integers, ranks that joined."""

import numbers
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from allred.arrays import Array
from allred.comm.communicator import Communicator
from allred.comm.ops import Compression, ReduceOp
from allred.errors import InputError
from allred.tensorflow.host_functions import copy_of


def is_inexact(array: Array) -> bool:
    """Whether the dtype of an array is real or complex floating point."""
    return array.dtype.kind not in "iub"


class ArrayReduction(NamedTuple):
    """The reduction of arrays that are multiplied by `prescale` before it and by `postscale` after it."""

    op: ReduceOp
    prescale: float = 1.0
    postscale: float = 1.0

    def check(self) -> "ArrayReduction":
        """Return it. Raises InputError if a factor is not a number."""
        for name, factor in (("prescale_factor", self.prescale), ("postscale_factor", self.postscale)):
            if not isinstance(factor, numbers.Real):
                raise InputError(f"{name}={factor!r} must be a number")
        return self

    def label(self, name: str, arrays: Sequence[Array]) -> str:
        """Return the name for allred, with what the ranks would not compare otherwise."""
        factors = {"prescale_factor": self.prescale, "postscale_factor": self.postscale}
        differing = [f"{key}={float(factor)}" for key, factor in factors.items() if factor != 1.0]
        if self._op_of(arrays) is not self.op:
            differing.append("op=hvd.Average of integers")
        return ", ".join([name] * bool(name) + differing)

    def _op_of(self, arrays: Sequence[Array]) -> ReduceOp:
        """Return the reduction of a group for allred, which has no average of integers."""
        is_integer_mean = self.op is ReduceOp.AVERAGE and not all(map(is_inexact, arrays))
        return ReduceOp.SUM if is_integer_mean else self.op

    def reduce(
        self, communicator: Communicator, sources: Sequence[Array], name: str, encoding: Compression, is_list: bool
    ) -> list[Array]:
        """Return new arrays, the results of a group, or of one array. Collective."""
        op = self._op_of(sources)
        begun = [self._begin(source, op) for source in sources]
        label = self.label(name, sources)
        if is_list:
            communicator.grouped_allreduce_blocking(begun, True, op, label, encoding)
        else:
            communicator.allreduce_blocking(begun[0], True, op, label, encoding)
        active = communicator.active.size
        pairs = zip(begun, sources, strict=True)
        return [self._end(array, source, op, communicator.size, active) for array, source in pairs]

    def scatter(self, communicator: Communicator, source: Array, name: str) -> Array:
        """Return this rank's rows of a reduction. Collective."""
        op = self._op_of([source])
        begun = source if self.prescale == 1.0 and op is self.op else self._begin(source, op)
        rows = communicator.reducescatter(begun, op, self.label(name, [source])).wait()
        return self._end(rows, source, op, communicator.size, communicator.size)

    def _begin(self, source: Array, op: ReduceOp) -> Array:
        """Return a copy of an array, multiplied by the first factor."""
        is_half = is_inexact(source) and source.dtype.itemsize == 2
        # Sums of 16-bit floats are rounded after the division only.
        copy = source.astype(np.float32) if op is not self.op and is_half else copy_of(source)
        _scale(copy, self.prescale)
        return copy

    def _end(self, array: Array, source: Array, op: ReduceOp, size: int, active: int) -> Array:
        """Convert a result of allred, by the operator `op`, to Horovod's. size: the number of ranks; active: the number
        of ranks that have not joined."""
        is_mean = self.op is ReduceOp.AVERAGE
        if is_mean and not is_inexact(source):
            if self.postscale == 1.0:
                array -= np.fmod(array, size)  # truncates
                array //= size
            else:
                _scale(array, self.postscale / size)
            return array
        if is_mean and (op is not self.op or active != size):  # Horovod counts the ranks that have joined
            array *= array.dtype.type((1 if op is not self.op else active) / size)
        _scale(array, self.postscale)
        return array if array.dtype == source.dtype else array.astype(source.dtype)


def _scale(array: Array, factor: float) -> None:
    """Multiply an array by a factor, in place. Integers are multiplied in float64 and truncated; 16-bit floats in
    float32."""
    if factor == 1.0:
        return
    if not is_inexact(array):
        np.copyto(array, array.astype(np.float64) * factor, "unsafe")
    elif array.dtype.itemsize == 2:
        array[...] = array.astype(np.float32) * np.float32(factor)
    elif array.dtype.kind == "c":  # (inf + 0j) * 2 is inf + nan j in complex arithmetic
        array.view(array.real.dtype)[...] *= factor
    else:
        array *= array.dtype.type(factor)
