"""Tensors of optimizers and clipping: checks, and arithmetic that several optimizers share.

A tensor is a numpy or cupy array. The code uses only NumPy's ufuncs with `out=` and functions that dispatch on their
argument (`np.zeros_like`, `np.asarray(..., like=)`), so it works with both.

16-bit tensors are updated in float32, because Adam's eps = 1e-8 and (1 - beta2) g^2 underflow in float16, and 0/0 would
follow. Only the result is rounded to the dtype of the parameter; its slots are float32.

Contiguous float32 and float64 tensors are updated in one pass (`fused`) with the same bits: numpy arrays by C, cupy
arrays by one launch on the GPU.
"""

from typing import Any

import numpy as np

from allred import native
from allred.arrays import Array
from allred.errors import InputError
from allred.gpu import kernels


def compute_dtype(tensor: Array) -> np.dtype[Any]:
    """Dtype of the slots of a tensor and of the arithmetic of its update: its own, but at least float32.

    >>> compute_dtype(np.zeros(3, np.float16)), compute_dtype(np.zeros(3))
    (dtype('float32'), dtype('float64'))
    """
    return np.promote_types(tensor.dtype, np.float32)


def is_float_tensor(value: Any) -> bool:
    """Whether `value` is a numpy or cupy array of floats, bfloat16 (a user-defined dtype in NumPy) included."""
    if not (hasattr(value, "__array_ufunc__") and hasattr(value, "shape")):  # numpy scalars lack the first attribute
        return False
    return bool(value.dtype.kind == "f" or value.dtype.name == "bfloat16")


def describe(value: Any) -> str:
    """Description of a value in error messages.

    >>> describe(np.zeros((2, 3), np.float32)), describe([1.0])
    ('a float32 ndarray of shape (2, 3)', 'a list')
    """
    kind = type(value).__name__
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"a {value.dtype} {kind} of shape {tuple(value.shape)}"
    return f"a {kind}"


def check_writable(who: str, what: str, value: Any) -> None:
    """Raise InputError unless `value` is a writable float array. what: its name in the error."""
    if not is_float_tensor(value):
        raise InputError(
            f"{who}: {what} must be a numpy or cupy array of floats, because it is changed in place, "
            f"but is {describe(value)}"
        )
    if not getattr(value.flags, "writeable", True):  # cupy arrays are always writable and lack this flag
        raise InputError(f"{who}: {what} must be writable, but is read-only; pass a copy")


def check_gradient(who: str, name: str, param: Array, grad: Any) -> None:
    """Raise InputError unless `grad` can be the gradient of `param`."""
    number = isinstance(grad, (float, int, np.floating))
    if not number and not is_float_tensor(grad):
        raise InputError(
            f"{who}: the gradient of {name!r} must be an array of floats, but is {describe(grad)}; convert it first"
        )
    shape = () if number else tuple(grad.shape)
    if shape != tuple(param.shape):
        raise InputError(
            f"{who}: the gradient of {name!r} must have its parameter's shape {tuple(param.shape)}, but has {shape}; "
            "reduce or reshape it first"
        )
    if not number and isinstance(grad, np.ndarray) != isinstance(param, np.ndarray):
        raise InputError(
            f"{who}: parameter {name!r} is {describe(param)} but its gradient {describe(grad)}; "
            "copy both to the same device first"
        )


def decayed_gradient(param: Array, grad: Array, weight_decay: float) -> Array:
    """Return grad + weight_decay * param in the dtype of `grad`; `grad` itself if weight_decay is 0."""
    if weight_decay == 0.0:
        return grad
    decayed = np.empty_like(grad)
    np.multiply(param, weight_decay, out=decayed, dtype=decayed.dtype)
    np.add(decayed, grad, out=decayed)
    return decayed


def fold_in(average: Array, value: Array, decay: float, scratch: Array) -> None:
    """Update a moving average in place: decay * average + (1 - decay) * value. `scratch` may be `value`."""
    np.multiply(value, 1.0 - decay, out=scratch)
    np.multiply(average, decay, out=average)
    np.add(average, scratch, out=average)


def fused(rule: str, arrays: tuple[Array | None, ...], numbers: tuple[float, ...]) -> bool:
    """Update a tensor by a kernel, in C or on the GPU, if it supports the arguments. Return whether it did.

    The kernel produces the same bits as numpy, without numpy's floating-point warnings. It supports contiguous arrays
    that do not overlap, of one shape, not 0-d, and one dtype, float32 or float64; and numbers of type float. In C the
    GIL is released for more than 16 KiB. If it returns False, nothing has changed.

    rule: "sgd", "adagrad", "rmsprop", "adam" or "adamw". arrays: the parameter, the gradient and the slots, in the
    order of csrc/update.h; None for a missing slot. numbers: the hyper-parameters in that order.
    """
    param = arrays[0]
    if type(param) is np.ndarray:
        return param.dtype.char in "fd" and native.update(rule, arrays, numbers)
    return type(param).__module__.partition(".")[0] == "cupy" and kernels.update(rule, arrays, numbers)
