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
from allred.comm.communicator import Communicator
from allred.comm.functions import current
from allred.comm.header import own_fields
from allred.comm.ops import ReduceOp
from allred.comm.process_set import ProcessSet
from allred.comm.work import Steps, UserCodeError
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
    communicator = current(process_set)

    def steps() -> Steps[tuple[Array, Array]]:
        source = _numbers(value, ReduceOp.MAX, "the order")
        everything, ranks = yield from _gathered(communicator, kind, source, name)
        index = np.asarray(choose(everything, axis=0))
        return np.take_along_axis(everything, index[None], axis=0)[0], np.asarray(ranks, np.int64)[index]

    return communicator.start(kind, name, steps()).wait()


def allreduce_with(
    value: Any, function: Callable[[Array, Array], Any], name: str = "", process_set: ProcessSet | None = None
) -> Array:
    """Reduce `value` over all ranks with a Python function of two arrays, which returns an array of their shape and
    dtype. It is applied in the order of the ranks: function(function(x0, x1), x2). Returns a new array.

    Raises InputError on all ranks if the function returns another shape or dtype. An exception of the function is
    raised on each rank where it occurs, and allred can be used afterwards.

    Example: on 2 ranks, `allred.allreduce_with([3.0, 4.0], np.hypot)` returns `[4.24, 5.66]`.
    """
    communicator = current(process_set)

    def steps() -> Steps[Array]:
        source = arrays.as_host_array(value)
        if not callable(function):
            raise InputError(f"function={function!r} is not a function of two arrays")
        how = getattr(function, "__name__", type(function).__name__)
        everything, _ = yield from _gathered(communicator, "allreduce_with", source, name, how)
        try:
            made = np.asarray(functools.reduce(function, everything))
        except Exception as error:  # of any class: code of the user
            raise UserCodeError(error) from error
        if (made.shape, made.dtype) != (source.shape, source.dtype):
            got, expected = arrays.describe(made.shape, made.dtype), arrays.describe(source.shape, source.dtype)
            raise InputError(f"allreduce_with: {how} returned {got}; expected {expected}, as its arguments")
        return made.copy() if np.shares_memory(made, everything) else made

    return communicator.start("allreduce_with", name, steps()).wait()


def cumsum(value: Any, exclusive: bool = False, name: str = "", process_set: ProcessSet | None = None) -> Array:
    """Return the prefix sum over the ranks (MPI_Scan), elementwise: the sum of the arrays of the ranks up to this one,
    a new array of the same shape and dtype. exclusive: without this rank's own (MPI_Exscan), zeros on the first rank,
    such as the global index of this rank's first row.

    Example: on 3 ranks, `allred.cumsum(2)` returns 2, 4 and 6; `allred.cumsum(2, exclusive=True)` 0, 2 and 4.
    """
    communicator = current(process_set)

    def steps() -> Steps[Array]:
        source = _numbers(value, ReduceOp.SUM, "the sum")
        how = "exclusive" if exclusive else ""
        everything, ranks = yield from _gathered(communicator, "cumsum", source, name, how)
        before = list(everything[: list(ranks).index(communicator.number) + (not exclusive)])
        result = np.zeros_like(source, order="C")
        if before:
            buffers = [arrays.as_buffer(array) for array in before]
            native.reduce(
                buffers, arrays.as_buffer(result), arrays.dtype_code(source.dtype), ops.CODES[ReduceOp.SUM], 1
            )
        return result

    return communicator.start("cumsum", name, steps()).wait()


def statistics(samples: Any, name: str = "", process_set: ProcessSet | None = None) -> SampleStatistics:
    """Return count, mean, standard deviation, minimum and maximum over the samples of all ranks, for each element.

    samples: the samples of this rank along the first dimension: any number of them, also none. A number counts as one
    sample. The standard deviation is that of the population (numpy's default, ddof=0). Means and squared deviations of
    each rank are computed in float64 and combined. Without samples on any rank everything but the count is NaN.

    Example: on 2 ranks, `allred.statistics([allred.rank(), 3.0])` returns count 4, mean 1.75, std 1.299, min 0, max 3.
    """
    communicator = current(process_set)

    def steps() -> Steps[SampleStatistics]:
        source = np.atleast_1d(_numbers(samples, ReduceOp.MAX, "the order"))
        count, rest = len(source), source.shape[1:]
        descriptor = array_descriptor("statistics", source, name, shape=("any", *rest), rows=count)
        group, headers = yield from communicator.agree(descriptor)
        mine = _own_statistics(source.astype(np.float64))
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
            if rows:  # T. Chan, G. Golub, R. LeVeque: Updating formulae and a pairwise algorithm, 1979
                count += rows
                difference = own_mean - mean
                mean = mean + difference * (rows / count)
                squares = squares + own_squares + np.square(difference) * (rows / count * (count - rows))
    if not count:
        nothing = np.full(table.shape[2:], np.nan)
        return SampleStatistics(0, nothing, nothing.copy(), nothing.copy(), nothing.copy())
    return SampleStatistics(count, mean, np.sqrt(squares / count), table[:, 2].min(axis=0), table[:, 3].max(axis=0))


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
    communicator: Communicator, kind: str, source: Array, name: str, how: str = ""
) -> Steps[tuple[Array, list[int]]]:
    """Return the arrays of all ranks of one shape (ranks, ...), and the numbers of these ranks."""
    descriptor = array_descriptor(kind, source, name, how=how)
    group, _ = yield from communicator.agree(descriptor)
    everything = np.empty((group.size, *source.shape), source.dtype)
    yield from group.backend.allgather(
        arrays.as_bytes(source), arrays.as_bytes(everything), [source.nbytes] * group.size
    )
    return everything, list(group.ranks)
