"""Whether an allreduce gives the right sums: known values in, closed forms of rank and size out.

All tensors of a call count as one stream. Element i of it is `i % period + rank % 4`, so the sum over n ranks is
`n * (i % period) + (0 + 1 + 2 + 3 + 0 + ...)`: small whole numbers, exact in every dtype. The period is prime, so a
chunk that lands in the wrong place is seen. Rounds of timing reduce zeros: they stay zeros, and neither grow nor fade
into denormals.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from allred import arrays
from allred.arrays import Array
from allred.gpu.values import fill as put
from allred.gpu.values import to_host

_BLOCK = 2**18  # elements that are filled or compared at once


class WrongResultError(Exception):
    """A collective gave something else than the sum, on some rank; every rank raises the same."""


def rank_sum(size: int) -> int:
    """The sum of rank % 4 over `size` ranks.

    >>> [rank_sum(size) for size in range(1, 7)]
    [0, 1, 3, 6, 6, 7]
    """
    return size // 4 * 6 + (0, 0, 1, 3)[size % 4]


def fill(group: list[Array], rank: int) -> None:
    """This rank's values."""
    for part, values in _parts(group, factor=1, plus=rank % 4):
        put(part, values)


def wrong(group: list[Array], size: int) -> str:
    """The first element that is not the sum over all ranks, in words; nothing if all are."""
    element = 0
    for part, values in _parts(group, factor=size, plus=rank_sum(size)):
        part = to_host(part)
        if (part != values).any():
            at = int(np.argmax(part != values))
            return f"element {element + at} is {part[at]}, and should be {values[at]}"
        element += part.size
    return ""


def check(title: str, call: Callable[[], object], group: list[Array], comm: Any) -> None:
    """Raise WrongResultError if one call on known values goes wrong on any rank. Leaves zeros in the arrays."""
    fill(group, comm.Get_rank())
    call()
    _raise_if_any(title, wrong(group, comm.Get_size()), comm)
    for array in group:
        array.fill(0)


def check_zeros(title: str, group: list[Array], comm: Any) -> None:
    """Raise WrongResultError if the zeros that were reduced are none any more, on any rank."""
    changed = any(array.any() for array in group)
    _raise_if_any(title, "sums of zeros are not zero after timing" * changed, comm)


def _raise_if_any(title: str, problem: str, comm: Any) -> None:
    for rank, words in enumerate(comm.allgather(problem)):
        if words:
            raise WrongResultError(f"{title} is wrong on rank {rank}: {words}")


def _parts(group: list[Array], factor: int, plus: int) -> Iterator[tuple[Array, Array]]:
    """The stream in parts of at most _BLOCK elements of one tensor, each with the values `factor * ... + plus`."""
    dtype = group[0].dtype
    period = 3 if dtype.itemsize == 1 else 61
    cycle: Any = np.resize(np.arange(period), min(_BLOCK, max(array.size for array in group)) + period)
    with np.errstate(over="ignore"):
        values = (factor * cycle + plus).astype(dtype)
    done = 0
    for array in group:
        flat = arrays.flat(array)
        for start in range(0, flat.size, _BLOCK):
            part = flat[start : start + _BLOCK]
            yield part, values[done % period :][: part.size]
            done += part.size
