"""Whether steps with parameter servers give the right parameters.

A step on random numbers must give what numpy gives, bit for bit. Then whole numbers are trained on, for which the
arithmetic is exact in any order: if an element of the result is not its start less what the servers' count of updates
takes away, a gradient was lost, torn, or came twice.
"""

import functools
import math

import numpy as np
from numpy.typing import DTypeLike

from allred.arrays import Array
from allred.bench.sets import Shape

LR = 0.75  # times 4: a whole number
_EXACT_UPDATES = 2**22  # each takes away 3: whole numbers of float32


def random(shapes: list[Shape], dtype: DTypeLike, seed: int) -> list[Array]:
    """Normal numbers, the same on every rank."""
    rng = np.random.default_rng(seed)
    return [np.asarray(rng.standard_normal(shape, np.float32), dtype) for shape in shapes]


def after_a_step(params: list[Array], grads: list[Array], workers: int, averages: bool) -> list[Array]:
    """What numpy makes of parameters when each worker has given these gradients once; averages: policy sync."""
    found = [param.copy() for param in params]
    for param, grad in zip(found, grads, strict=True):
        used = functools.reduce(np.add, [grad] * workers) / workers if averages else grad
        for _ in range(1 if averages else workers):
            np.subtract(param, np.multiply(used, LR), out=param)
    return found


def whole_start(shapes: list[Shape], dtype: DTypeLike) -> list[Array]:
    """Parameters that are whole numbers."""
    return [np.resize(np.arange(61), math.prod(shape)).reshape(shape).astype(dtype) for shape in shapes]


def whole_gradients(shapes: list[Shape], dtype: DTypeLike) -> list[Array]:
    """Gradients that are whole numbers, and so are they times LR: -4, 0, 4."""
    return [np.resize(np.array([-4, 0, 4]), math.prod(shape)).reshape(shape).astype(dtype) for shape in shapes]


def wrong_after(updates: int, params: list[Array], start: list[Array], grads: list[Array]) -> str:
    """What is not as it has to be after so many updates; nothing can be said after very many.

    >>> start, grads = whole_start([(3,)], "float32"), whole_gradients([(3,)], "float32")
    >>> wrong_after(2, [np.array([6, 1, -4], np.float32)], start, grads)
    ''
    >>> wrong_after(2, [np.array([6, 1, -1], np.float32)], start, grads)
    'element 2 of tensor 0 is -1.0, and should be -4.0'
    """
    if updates > _EXACT_UPDATES:
        return ""
    return different(params, [a - updates * LR * grad for a, grad in zip(start, grads, strict=True)])


def different(got: list[Array], expected: list[Array]) -> str:
    """The first element that is not as expected, bit for bit, in words; nothing if all are."""
    for number, (a, b) in enumerate(zip(got, expected, strict=True)):
        if a.tobytes() != b.tobytes():
            a, b = a.reshape(-1), b.reshape(-1)
            at = int(np.argmax(a != b))
            return f"element {at} of tensor {number} is {a[at]}, and should be {b[at]}"
    return ""
