"""Gradient clipping: limits on the elements or on the norm of all gradients together. The trailing _ says: in place.

In data-parallel training clip the averaged gradients, after the reduction: then all ranks see the same norm and scale
alike. 16-bit gradients are scaled in float32 and rounded once.
"""

import math
from typing import Any

import numpy as np

from allred.arrays import Array
from allred.errors import InputError
from allred.nest import leaves
from allred.optim.hyper import positive
from allred.optim.tensors import check_writable, compute_dtype, describe, is_float_tensor


def clip_by_value_(grads: Any, limit: float) -> None:
    """Limit every element to [-limit, limit], in place. NaN stays NaN; infinities become the limit.

    Arguments:
        grads: nest of writable float arrays; None leaves are skipped.
        limit: > 0.

    Raises:
        InputError: a leaf that cannot be changed in place, or a limit that is not positive; nothing has changed then.

    >>> grads = [np.array([-3.0, 0.5]), None]
    >>> clip_by_value_(grads, 1.0)
    >>> print(grads)
    [array([-1. ,  0.5]), None]
    """
    limit = positive("clip_by_value_", "limit", limit)
    for grad in _writable("clip_by_value_", grads):
        np.minimum(grad, limit, out=grad, dtype=compute_dtype(grad), casting="same_kind")
        np.maximum(grad, -limit, out=grad, dtype=compute_dtype(grad), casting="same_kind")


def clip_by_global_norm_(grads: Any, max_norm: float) -> float:
    """Scale all gradients by min(1, max_norm / global_norm(grads)), in place, and return the norm before.

    If the norm is infinite or NaN no scale would help: the gradients are left as they are, and the returned norm tells
    the caller, who may skip the step: `if math.isfinite(norm): optimizer.step(...)`. torch adds 1e-6 to the norm before
    it divides; TensorFlow and this do not.

    Arguments:
        grads: nest of writable float arrays; None leaves are skipped.
        max_norm: > 0; infinity only measures.

    Raises:
        InputError: a leaf that cannot be changed in place, or max_norm not positive; nothing has changed then.

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
    """sqrt(sum of the squares of all elements of all leaves), accumulated in float64; 0.0 for none.

    Arguments:
        grads: nest of float arrays and Python floats; None leaves are skipped.

    Raises:
        InputError: a leaf that is neither.

    >>> global_norm([np.array([3.0, 0.0]), None, 4.0])
    5.0
    """
    tensors = []
    for name, grad in leaves(grads):
        if isinstance(grad, (float, int, np.floating)):
            tensors.append(np.asarray(grad))
        elif is_float_tensor(grad):
            tensors.append(grad)
        elif grad is not None:
            raise InputError(
                f"global_norm: gradient {name!r} must be an array of floats, but is {describe(grad)}; convert it first"
            )
    return _norm(tensors)


def _norm(tensors: list[Array]) -> float:
    # einsum casts to float64 piece by piece: no temporary of the whole tensor, and squares of float32 never overflow
    flat = [np.ravel(tensor, order="K") for tensor in tensors]
    return math.sqrt(float(sum(np.einsum("i,i->", piece, piece, dtype=np.float64) for piece in flat)))


def _writable(who: str, grads: Any) -> list[Array]:
    """All leaves that are not None, once every one of them is known to be writable."""
    tensors = []
    for name, grad in leaves(grads):
        if grad is not None:
            check_writable(who, f"gradient {name!r}", grad)
            tensors.append(grad)
    return tensors
