"""Gradient clipping by value or by the global norm. Functions with a trailing underscore work in place.

In data-parallel training clip the averaged gradients, after the reduction: then all ranks compute the same norm and
scale. 16-bit gradients are scaled in float32 and rounded once.
"""

import math
from typing import Any

import numpy as np

from allred.arrays import Array, view_as_real
from allred.errors import InputError
from allred.nest import leaves, quoted
from allred.optim.base import check_writable, compute_dtype, describe, is_inexact_tensor
from allred.validators import positive


def clip_by_value_(grads: Any, limit: float) -> None:
    """Clip every element to [-limit, limit] in place. NaN stays NaN; infinities become the limit.

    Arguments:
        grads: nest of writable float arrays; None leaves are skipped.
        limit: > 0.

    Raises InputError: a leaf is not a writable float array, or limit <= 0; nothing has changed then.

    >>> grads = [np.array([-3.0, 0.5]), None]
    >>> clip_by_value_(grads, 1.0)
    >>> print(grads)
    [array([-1. ,  0.5]), None]
    """
    limit = positive("clip_by_value_", "limit", limit)
    tensors = _writable("clip_by_value_", grads)
    if any(grad.dtype.kind == "c" for grad in tensors):
        raise InputError("clip_by_value_: complex numbers have no order; use clip_by_global_norm_")
    for grad in tensors:
        np.minimum(grad, limit, out=grad, dtype=compute_dtype(grad), casting="same_kind")
        np.maximum(grad, -limit, out=grad, dtype=compute_dtype(grad), casting="same_kind")


def clip_by_global_norm_(grads: Any, max_norm: float) -> float:
    """Scale all gradients by min(1, max_norm / global_norm(grads)) in place, and return the norm before scaling.

    If the norm is infinite or NaN, the gradients do not change, and the caller can skip the step:
    `if math.isfinite(norm): optimizer.step(...)`. torch adds 1e-6 to the norm before the division; TensorFlow and this
    function do not.

    Arguments:
        grads: nest of writable arrays of floats or complex numbers; None leaves are skipped.
        max_norm: > 0; with infinity the function only computes the norm.

    Raises InputError: a leaf is not a writable float array, or max_norm <= 0; nothing has changed then.

    >>> grads = {"w": np.array([3.0, 0.0]), "b": np.array(-4.0)}
    >>> clip_by_global_norm_(grads, 1.0)
    5.0
    >>> print(grads)
    {'w': array([0.6, 0. ]), 'b': array(-0.8)}

    R. Pascanu, T. Mikolov, Y. Bengio: On the difficulty of training recurrent neural networks. ICML 2013.
    """
    max_norm = positive("clip_by_global_norm_", "max_norm", max_norm)
    tensors = _writable("clip_by_global_norm_", grads)
    norm = _norm(tensors)
    if max_norm < norm < math.inf:
        for grad in tensors:
            np.multiply(grad, max_norm / norm, out=grad, dtype=compute_dtype(grad), casting="same_kind")
    return norm


def global_norm(grads: Any) -> float:
    """Global norm: sqrt(sum of the squares of all elements of all leaves), in float64; 0.0 without leaves.

    Arguments:
        grads: nest of arrays of floats or complex numbers, and of Python numbers; None leaves are skipped.

    Raises InputError: a leaf has another type.

    >>> global_norm([np.array([3.0, 0.0]), None, 4.0])
    5.0
    """
    tensors = []
    for name, grad in leaves(grads):
        if isinstance(grad, (float, int, complex, np.inexact)):
            tensors.append(np.asarray(grad))
        elif is_inexact_tensor(grad):
            tensors.append(grad)
        elif grad is not None:
            raise InputError(
                f"global_norm: {quoted(name, 'gradient')} must be an array of floats, but is {describe(grad)}; "
                "convert it first"
            )
    return _norm(tensors)


def _norm(tensors: list[Array]) -> float:
    # einsum casts to float64 piece by piece: no temporary of the whole tensor, and squares of float32 never overflow
    flat = [np.ravel(view_as_real(tensor), order="K") for tensor in tensors]
    return math.sqrt(float(sum(np.einsum("i,i->", piece, piece, dtype=np.float64) for piece in flat)))


def _writable(who: str, grads: Any) -> list[Array]:
    """Leaves that are not None. Raises InputError unless all are writable float arrays."""
    tensors = []
    for name, grad in leaves(grads):
        if grad is not None:
            check_writable(who, quoted(name, "gradient"), grad)
            tensors.append(grad)
    return tensors
