"""Reductions that every rank computes from the arrays of all ranks: argmax, argmin, cumsum, statistics, and those by a
Python function. As in functions.py, every rank calls them in the same order.

Each rank receives the arrays of all ranks, so they are for small arrays: a value per rank, a record of an episode.
Results have the same bits on every rank (those of cumsum, in the order of the ranks).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from allred import arrays, native
from allred.arrays import Array
from allred.comm import ops
from allred.comm.arguments import array_descriptor
from allred.comm.functions import current
from allred.comm.header import own_fields
from allred.comm.ops import ReduceOp
from allred.comm.process_set import ProcessSet
from allred.comm.work import Steps
from allred.errors import InputError


@dataclasses.dataclass(frozen=True)
class SampleStatistics:
    """The result of `statistics`. `count` is the number of samples of all ranks; the other fields are float64, with the
    shape of one sample."""

    count: int
    mean: Array
    std: Array
    min: Array
    max: Array


def argmax(value: Any, name: str = "", process_set: ProcessSet | None = None) -> tuple[Array, Array]:
    """Return the largest value of all ranks, and the rank that has it, for each element: (new array, int64 array of the
    same shape). Of ranks with equal values it is the lowest. A NaN counts as the largest, as in numpy.

    Example: on 2 ranks, `allred.argmax([allred.rank(), 5])` returns `([1, 5], [1, 0])`.
    """
    return _extreme("argmax", np.argmax, value, name, process_set)


def argmin(value: Any, name: str = "", process_set: ProcessSet | None = None) -> tuple[Array, Array]:
    """As `argmax`, for the smallest value. A NaN counts as the smallest, as in numpy."""
    return _extreme("argmin", np.argmin, value, name, process_set)


def _extreme(
    kind: str, choose: Callable[..., Array], value: Any, name: str, process_set: ProcessSet | None
) -> tuple[Array, Array]:
    everything, ranks = _gathered(kind, lambda: _numbers(value, ReduceOp.MAX, "the order"), name, process_set)
    index = np.asarray(choose(everything, axis=0))
    values = np.take_along_axis(everything, index[None], axis=0)[0]
    return np.asarray(values), np.asarray(np.asarray(ranks, np.int64)[index])


def allreduce_with(
    value: Any, function: Callable[[Array, Array], Any], name: str = "", process_set: ProcessSet | None = None
) -> Array:
    """Reduce `value` over all ranks with a Python function of two arrays, which returns an array of their shape and
    dtype. It is applied on each rank in the order of the ranks: function(function(x0, x1), x2). Returns a new array.

    Raises InputError if the function returns another shape or dtype. An exception of the function is raised as it is.

    Example: on 2 ranks, `allred.allreduce_with([3.0, 4.0], np.hypot)` returns `[4.24, 5.66]`.
    """
    how = getattr(function, "__name__", type(function).__name__)

    def source() -> Array:
        if not callable(function):
            raise InputError(f"function={function!r} is not a function of two arrays")
        return arrays.as_host_array(value)

    everything, _ = _gathered("allreduce_with", source, name, process_set, how)
    each = [everything[index, ...] for index in range(len(everything))]
    made = np.asarray(functools.reduce(function, each))
    if (made.shape, made.dtype) != (each[0].shape, each[0].dtype):
        got, expected = arrays.describe(made.shape, made.dtype), arrays.describe(each[0].shape, each[0].dtype)
        raise InputError(f"allreduce_with: {how} returned {got}; expected {expected}, as its arguments")
    return made.copy() if np.shares_memory(made, everything) else made


def cumsum(value: Any, exclusive: bool = False, name: str = "", process_set: ProcessSet | None = None) -> Array:
    """Return the prefix sum over the ranks (MPI_Scan), elementwise: the sum of the arrays of the ranks up to this one,
    a new array of the same shape and dtype. exclusive: without this rank's own (MPI_Exscan), zeros on the first rank,
    such as the global index of this rank's first row.

    Example: on 3 ranks, `allred.cumsum(2)` returns 2, 4 and 6; `allred.cumsum(2, exclusive=True)` 0, 2 and 4.
    """
    how = "exclusive" if exclusive else ""
    everything, ranks = _gathered("cumsum", lambda: _numbers(value, ReduceOp.SUM, "the sum"), name, process_set, how)
    before = everything[: ranks.index(current(process_set).number) + (not exclusive)]
    result = np.zeros(everything.shape[1:], everything.dtype)
    if len(before):
        buffers = [arrays.as_buffer(array) for array in before.reshape(len(before), -1)]
        code = arrays.dtype_code(result.dtype)
        native.reduce(buffers, arrays.as_buffer(result), code, ops.CODES[ReduceOp.SUM], 1)
    return result


def statistics(samples: Any, name: str = "", process_set: ProcessSet | None = None) -> SampleStatistics:
    """Return count, mean, standard deviation, minimum and maximum over the samples of all ranks, for each element.

    samples: zero or more samples of this rank, along the first dimension. A number counts as one sample. They are
    converted to float64, which rounds integers above 2**53. The standard deviation divides by the count (numpy's
    default, ddof=0). If no rank has a sample, all results but the count are NaN.

    Example: on 2 ranks, `allred.statistics([allred.rank(), 3.0])` returns count 4, mean 1.75, std 1.299, min 0, max 3.
    """
    communicator = current(process_set)

    def steps() -> Steps[SampleStatistics]:
        source = np.atleast_1d(np.asarray(_numbers(samples, ReduceOp.MAX, "the order"), np.float64))
        count, rest = len(source), source.shape[1:]
        descriptor = array_descriptor("statistics", source, name, shape=("any", *rest), rows=count)
        group, headers = yield from communicator.agree(descriptor)
        mine = _own_statistics(source)
        table = np.empty((group.size, *mine.shape))
        yield from group.backend.allgather(arrays.as_bytes(mine), arrays.as_bytes(table), [mine.nbytes] * group.size)
        return _combined([own_fields(record).rows for record in headers], table)

    return communicator.start("statistics", name, steps()).wait()


def _own_statistics(samples: Array) -> Array:
    """Return mean, sum of squared deviations, minimum and maximum of the samples, (4, ...)."""
    with np.errstate(all="ignore"):
        mean = samples.mean(axis=0) if len(samples) else np.zeros(samples.shape[1:])
        squares = np.square(samples - mean).sum(axis=0)
        return np.stack([mean, squares, samples.min(axis=0, initial=np.inf), samples.max(axis=0, initial=-np.inf)])


def _combined(counts: list[int], table: Array) -> SampleStatistics:
    """Combine the results of `_own_statistics` of all ranks (ranks, 4, ...)."""
    count, mean, squares = 0, np.zeros(table.shape[2:]), np.zeros(table.shape[2:])
    with np.errstate(all="ignore"):
        for rows, (own_mean, own_squares, _, _) in zip(counts, table, strict=True):
            if rows and not count:
                count, mean, squares = rows, own_mean, own_squares
            elif rows:  # T. Chan, G. Golub, R. LeVeque: Updating formulae and a pairwise algorithm, 1979
                count += rows
                difference = own_mean - mean
                mean = mean + difference * (rows / count)
                squares = squares + own_squares + np.square(difference) * (rows / count * (count - rows))
    if not count:
        nothing = np.full(table.shape[2:], np.nan)
        return SampleStatistics(0, nothing, nothing.copy(), nothing.copy(), nothing.copy())
    with np.errstate(all="ignore"):  # differences of infinities are NaN, but not their sum
        plain = sum(own[0] * (rows / count) for rows, own in zip(counts, table, strict=True) if rows)
        mean = np.where(np.isnan(mean), plain, mean)
    std, low, high = np.sqrt(squares / count), table[:, 2].min(axis=0), table[:, 3].max(axis=0)
    return SampleStatistics(count, *map(np.asarray, (mean, std, low, high)))


def _numbers(value: Any, op: ReduceOp, what: str) -> Array:
    """Return an array that `op` could reduce. what: for the error."""
    source = arrays.as_host_array(value)
    arrays.dtype_code(source.dtype)  # raises
    if ops.refusal(op, source.dtype):
        raise InputError(
            f"{what} of {source.dtype.name} is not defined; convert it, for example by abs(x), x.real or x.astype(int)"
        )
    return source


def _gathered(
    kind: str, source: Callable[[], Array], name: str, process_set: ProcessSet | None, how: str = ""
) -> tuple[Array, list[int]]:
    """Return the arrays of all ranks, of one shape, as one array (ranks, ...), and the numbers of these ranks. source:
    returns the array of this rank; if it raises InputError, all ranks do."""
    communicator = current(process_set)

    def steps() -> Steps[tuple[Array, list[int]]]:
        mine = source()
        group, _ = yield from communicator.agree(array_descriptor(kind, mine, name, how=how))
        everything = np.empty((group.size, *mine.shape), mine.dtype)
        yield from group.backend.allgather(
            arrays.as_bytes(mine), arrays.as_bytes(everything), [mine.nbytes] * group.size
        )
        return everything, list(group.ranks)

    return communicator.start(kind, name, steps()).wait()
