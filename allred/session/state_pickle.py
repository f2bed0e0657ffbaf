"""Pickles the states of a session. Tensors of a framework in them are stored in the safetensors format.

So no code of a framework runs when its tensors are loaded. A framework registers its tensors (`register_tensor`) when
its part of allred is imported; other objects are pickled as usual.
"""

import io
import pickle
from collections.abc import Callable
from typing import Any

from allred import arrays
from allred.arrays import Array

_TENSOR = "tensor"
_kinds: dict[str, tuple[type, Callable[[Any], Array], Callable[[Array], Any]]] = {}


def register_tensor(kind: str, cls: type, to_array: Callable[[Any], Array], to_tensor: Callable[[Array], Any]) -> None:
    """Register the tensors of a framework. kind: its name in checkpoints. to_array: returns a host array."""
    _kinds[kind] = cls, to_array, to_tensor


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        from safetensors.numpy import save  # takes 10 ms to import

        for kind, (cls, to_array, _) in _kinds.items():
            if isinstance(value, cls):
                array = to_array(value)
                return (
                    kind,
                    arrays.name_of(array.dtype),
                    save({_TENSOR: arrays.flat(arrays.as_buffer(array))}),
                    array.shape,
                )
        return None


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, pid: Any) -> Any:
        from safetensors.numpy import load

        kind, dtype, data, shape = pid
        if kind not in _kinds:
            raise pickle.UnpicklingError(f"it has tensors of {kind}; call allred.distributed(optimizer) before")
        array = load(data)[_TENSOR].view(arrays.dtype_of(dtype)).reshape(shape)
        return _kinds[kind][2](array)


def dumps(value: Any) -> bytes:
    """Return the pickle of an object."""
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


def loads(data: bytes) -> Any:
    """Return the object of a result of `dumps` or of `pickle.dumps`. Raises any exception of unpickling."""
    return _Unpickler(io.BytesIO(data)).load()
