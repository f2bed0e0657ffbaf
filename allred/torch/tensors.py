"""Torch tensors on the host as numpy arrays over the same memory.

Tensor.numpy() is not used: torch then refuses to resize the storage, as FSDP does. It also rejects tensors that require
gradients, and bfloat16.
"""

from typing import Any

import numpy as np
import torch

from allred import arrays
from allred.arrays import Array
from allred.errors import InputError

_DTYPES: dict[torch.dtype, str] = {
    getattr(torch, name): np.dtype("int16" if name == "bfloat16" else name).str
    for name in arrays.DTYPES
    if hasattr(torch, name)  # not unsigned integers before torch 2.3
}
_BITS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}  # by the bytes of an element


class _Memory:
    """The array interface of a tensor. numpy's arrays refer to this object, and so keep the tensor alive."""

    __slots__ = ("__array_interface__", "_tensor")

    def __init__(self, tensor: torch.Tensor, dtype: str) -> None:
        nbytes = tensor.element_size()
        self._tensor = tensor
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), False),
            "typestr": dtype,
            "shape": tuple(tensor.shape),
            "strides": None if tensor.is_contiguous() else tuple(step * nbytes for step in tensor.stride()),
        }


def as_array(tensor: Any) -> Array:
    """Return an array over the memory of a tensor on the host: writable, with its shape, strides and dtype.

    The array keeps the tensor alive. Do not resize the tensor's storage while the array is in use. bfloat16 is the
    dtype of ml_dtypes.

    Raises InputError if `tensor` is not a dense CPU tensor, is a lazy conjugate or negation, has a dtype that is not in
    arrays.DTYPES, or is bfloat16 and ml_dtypes is not installed.

    >>> parameter = torch.zeros(2, requires_grad=True)
    >>> as_array(parameter)[0] = 3
    >>> parameter
    tensor([3., 0.], requires_grad=True)
    """
    check_host(tensor)
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise InputError(f"dtype {tensor.dtype} is not supported; use one of {', '.join(arrays.DTYPES)}")
    array = _view(tensor, dtype)
    return array.view(arrays.dtype_of("bfloat16")) if tensor.dtype is torch.bfloat16 else array


def as_raw_array(tensor: Any) -> Array:
    """As `as_array`, for collectives that copy elements without arithmetic: accepts every dtype of torch.

    An array of complex numbers has one more dimension, (real, imaginary). Other dtypes that are not in arrays.DTYPES,
    and bfloat16 without ml_dtypes, are viewed as integers of the same size.

    >>> as_raw_array(torch.tensor([1 + 2j]))
    array([[1., 2.]], dtype=float32)
    """
    check_host(tensor)
    if tensor.dtype.is_complex:
        tensor = torch.view_as_real(tensor.detach())
    if tensor.dtype in _DTYPES and (tensor.dtype is not torch.bfloat16 or _has_bfloat16()):
        return as_array(tensor)
    return _view(tensor, np.dtype(_BITS[tensor.element_size()]).str)


def as_tensor(array: Array) -> torch.Tensor:
    """Return a tensor that shares the memory of an array; the reverse of `as_array`.

    >>> as_tensor(np.ones(2, np.float32))
    tensor([1., 1.])
    """
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def copy_to_tensor(array: Array) -> torch.Tensor:
    """Return a new CPU tensor with the values of an array of any layout. Its storage can be resized."""
    made = torch.empty(array.shape, dtype=getattr(torch, array.dtype.name))
    as_array(made)[...] = array
    return made


def copy_like(parameter: torch.Tensor, value: Any) -> torch.Tensor:
    """Return a gradient of a parameter, with its strides, dtype and device, as torch makes them. Fused optimizers read
    parameter, gradient and state in memory order, so all must have the same strides. value: an array, or a dense
    tensor; of complex numbers, or as real numbers.

    >>> copy_like(torch.zeros(2, 3).t(), np.ones((3, 2), np.float32)).stride()
    (1, 3)
    """
    made = torch.empty_like(parameter, requires_grad=False)
    source = value if isinstance(value, torch.Tensor) else copy_to_tensor(value)
    (torch.view_as_real(made) if made.is_complex() and not source.is_complex() else made).copy_(source)
    return made


def _view(tensor: torch.Tensor, dtype: str) -> Array:
    if tensor.numel() == 0:  # it may have no address
        return np.empty(tuple(tensor.shape), dtype)
    return np.asarray(_Memory(tensor, dtype))


def _has_bfloat16() -> bool:
    try:
        arrays.dtype_of("bfloat16")
    except InputError:
        return False
    return True


def check_host(tensor: Any) -> None:
    """Raise InputError unless it is a dense tensor on the host."""
    if not isinstance(tensor, torch.Tensor):
        raise InputError(f"expected a torch.Tensor, got {type(tensor).__name__}")
    if tensor.device.type != "cpu":
        raise InputError(f"expected a tensor on the CPU, got one on {tensor.device}")
    if tensor.layout is not torch.strided or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
        raise InputError(f"expected a dense tensor, got a {kind} one")
    if tensor.is_conj() or tensor.is_neg():
        raise InputError("the tensor is a lazy conjugate or negation; call resolve_conj() or resolve_neg() first")
