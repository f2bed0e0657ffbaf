"""The numpy twins of the C kernels: slow, obvious, and the oracle their tests compare with."""

import numpy as np
from numpy.typing import NDArray

from allred.arrays import Array


def pack(tensors: list[Array], buffer: Array) -> None:
    """Copy the tensors' bytes, in order and without gaps, to the front of `buffer`."""
    target, offset = _bytes(buffer), 0
    _check_size(tensors, target)
    for tensor in tensors:
        target[offset : offset + tensor.nbytes] = _bytes(tensor)
        offset += tensor.nbytes


def unpack(tensors: list[Array], buffer: Array) -> None:
    """Fill the tensors, in order, from the front of `buffer`."""
    source, offset = _bytes(buffer), 0
    _check_size(tensors, source)
    for tensor in tensors:
        _bytes(tensor)[:] = source[offset : offset + tensor.nbytes]
        offset += tensor.nbytes


def _bytes(array: Array) -> NDArray[np.uint8]:
    return np.frombuffer(array, np.uint8) if array.nbytes else np.empty(0, np.uint8)


def _check_size(tensors: list[Array], buffer: Array) -> None:
    needed = sum(tensor.nbytes for tensor in tensors)
    if needed > buffer.nbytes:
        raise ValueError(f"the tensors take {needed} bytes but the fusion buffer has {buffer.nbytes}")
