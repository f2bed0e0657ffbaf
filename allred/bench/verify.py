"""Verifies the results of benchmarks: exact expected values of an allreduce and of training steps.

Allreduce: all tensors of a call count as one stream. Element i is `i % period + rank % 4`, so the sum over n ranks is
`n * (i % period) + (0 + 1 + 2 + 3 + 0 + ...)`: small whole numbers, exact in every dtype. The period is prime, so a
chunk in the wrong place is detected. Timed rounds reduce zeros, which stay zeros: they neither overflow nor become
denormal.

Training: one step on random numbers must equal numpy's result bit for bit. Then steps use whole numbers, whose
arithmetic is exact in any order: a gradient that is lost, torn or applied twice changes the result.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from allred import arrays
from allred.arrays import Array
from allred.gpu.device_arrays import fill as put
from allred.gpu.device_arrays import to_host

Shape = tuple[int, ...]


def resnet50() -> list[Shape]:
    """Convolutions (out, in, height, width), each followed by weight and bias of its batch norm; fc.weight, fc.bias."""
    shapes = [(64, 3, 7, 7), (64,), (64,)]
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += _bottleneck(channels, width, downsample=block == 0)
            channels = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


def _bottleneck(channels: int, width: int, downsample: bool) -> Iterator[Shape]:
    out = 4 * width
    convolutions = [(width, channels, 1, 1), (width, width, 3, 3), (out, width, 1, 1)]
    if downsample:
        convolutions.append((out, channels, 1, 1))
    for convolution in convolutions:
        yield from (convolution, convolution[:1], convolution[:1])


def transformer() -> list[Shape]:
    """Embeddings (word, position, token type, norm), 12 layers of 16 tensors, pooler."""
    hidden, inner = 768, 3072
    norm: list[Shape] = [(hidden,), (hidden,)]
    dense: list[Shape] = [(hidden, hidden), (hidden,)]
    attention = [*dense, *dense, *dense, *dense, *norm]  # query, key, value, output
    layer = [*attention, (inner, hidden), (inner,), (hidden, inner), (hidden,), *norm]
    return [(30522, hidden), (512, hidden), (2, hidden), *norm, *layer * 12, *dense]


_Sets = dict[str, Callable[[], list[Shape]]]

# A tensor of `small` and `tiny` has 1 KiB in float32.
SETS: _Sets = {"resnet50": resnet50, "transformer": transformer, "small": lambda: [(256,)] * 1000}
PS_SETS: _Sets = {**SETS, "tiny": lambda: [(256,)]}

LR = 0.75  # learning rate; 4 * LR is a whole number
_BLOCK = 2**18  # elements that are filled or compared at once
_MAX_EXACT_UPDATES = 2**22  # an update subtracts at most 3; float32 has all whole numbers up to 2**24


class WrongResultError(Exception):
    """A result is wrong on some rank. All ranks raise the same text."""


def raise_if_any(title: str, problem: str, comm: Any, role: str = "rank") -> None:
    """Raise WrongResultError on all ranks of `comm` if `problem` is not empty on one of them. Collective."""
    for rank, text in enumerate(comm.allgather(problem)):
        if text:
            raise WrongResultError(f"{title} is wrong on {role} {rank}: {text}")


def rank_sum(size: int) -> int:
    """The sum of rank % 4 over `size` ranks.

    >>> [rank_sum(size) for size in range(1, 7)]
    [0, 1, 3, 6, 6, 7]
    """
    return size // 4 * 6 + (0, 0, 1, 3)[size % 4]


def fill(group: list[Array], rank: int) -> None:
    """Write the input values of `rank` into all arrays."""
    for part, values in _parts(group, factor=1, plus=rank % 4):
        put(part, values)


def wrong(group: list[Array], size: int) -> str:
    """Describes the first element that is not the sum over `size` ranks; "" if all are right."""
    first = 0
    for part, values in _parts(group, factor=size, plus=rank_sum(size)):
        part = to_host(part)
        if (part != values).any():
            at = int(np.argmax(part != values))
            return f"element {first + at} is {part[at]}, expected {values[at]}"
        first += part.size
    return ""


def check(title: str, call: Callable[[], object], group: list[Array], comm: Any) -> None:
    """Reduce known values with one call, then set all arrays to zero. Raises WrongResultError. Collective."""
    fill(group, comm.Get_rank())
    call()
    raise_if_any(title, wrong(group, comm.Get_size()), comm)
    for array in group:
        array.fill(0)


def check_zeros(title: str, group: list[Array], comm: Any) -> None:
    """Raise WrongResultError if the zeros that were reduced while timing have changed. Collective."""
    changed = any(array.any() for array in group)
    raise_if_any(title, "sums of zeros are not zero after timing" * changed, comm)


def random_arrays(shapes: list[Shape], dtype: DTypeLike, seed: int) -> list[Array]:
    """Normally distributed arrays, the same on every rank."""
    rng = np.random.default_rng(seed)
    return [np.asarray(rng.standard_normal(shape, np.float32), dtype) for shape in shapes]


def after_one_step(params: list[Array], grads: list[Array], workers: int, averages: bool) -> list[Array]:
    """numpy's parameters after each worker has pushed `grads` once. averages: one update by the mean (mode sync)."""
    found = [param.copy() for param in params]
    for param, grad in zip(found, grads, strict=True):
        used = functools.reduce(np.add, [grad] * workers) / workers if averages else grad
        for _ in range(1 if averages else workers):
            np.subtract(param, np.multiply(used, LR), out=param)
    return found


def whole_params(shapes: list[Shape], dtype: DTypeLike) -> list[Array]:
    """Initial parameters: whole numbers from 0 to 60."""
    return _repeat(range(61), shapes, dtype)


def whole_gradients(shapes: list[Shape], dtype: DTypeLike) -> list[Array]:
    """Gradients -4, 0, 4: times LR they are whole numbers too."""
    return _repeat((-4, 0, 4), shapes, dtype)


def wrong_after_updates(updates: int, params: list[Array], start: list[Array], grads: list[Array]) -> str:
    """Describes the first parameter that differs from `start - updates * LR * grads`; "" if none does.

    More than 2**22 updates are not checked: float32 is no longer exact.

    >>> start, grads = whole_params([(3,)], "float32"), whole_gradients([(3,)], "float32")
    >>> wrong_after_updates(2, [np.array([6, 1, -4], np.float32)], start, grads)
    ''
    >>> wrong_after_updates(2, [np.array([6, 1, -1], np.float32)], start, grads)
    'element 2 of tensor 0 is -1.0, expected -4.0'
    """
    if updates > _MAX_EXACT_UPDATES:
        return ""
    return first_difference(params, [a - updates * LR * grad for a, grad in zip(start, grads, strict=True)])


def first_difference(got: list[Array], expected: list[Array]) -> str:
    """Describes the first element of `got` that is not bit for bit as expected; "" if all are."""
    for number, (a, b) in enumerate(zip(got, expected, strict=True)):
        if a.tobytes() != b.tobytes():
            a, b = a.reshape(-1), b.reshape(-1)
            at = int(np.argmax(a != b))
            return f"element {at} of tensor {number} is {a[at]}, expected {b[at]}"
    return ""


def _repeat(values: Iterable[int], shapes: list[Shape], dtype: DTypeLike) -> list[Array]:
    cycle = np.array(list(values))
    return [np.resize(cycle, math.prod(shape)).reshape(shape).astype(dtype) for shape in shapes]


def _parts(group: list[Array], factor: int, plus: int) -> Iterator[tuple[Array, Array]]:
    """Parts of at most _BLOCK elements of one tensor, each with the values `factor * (i % period) + plus`."""
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
