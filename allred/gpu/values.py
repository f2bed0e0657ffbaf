"""Arrays on a GPU, whoever made them: cupy's, torch's tensors, what has `__cuda_array_interface__` or DLPack.

allred works on them as cupy arrays that share their memory. Looking at a value does not load cupy.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from allred import arrays
from allred.gpu.kernels import Kernels

_DLPACK_CUDA = (2, 13)  # DLPack's numbers of CUDA memory and of managed memory
_BFLOAT16 = "bfloat16"
_HOST = frozenset({np.ndarray, float, int, bool, list, tuple, type(None)})  # for sure


@dataclasses.dataclass(frozen=True)
class Adopted:
    """A device array as cupy sees it. bfloat16, which older cupy lacks, is uint16 there and bfloat16 in `dtype`.

    give: makes a cupy array like `array` into what the caller is given: a torch tensor for a torch tensor.
    """

    array: Any
    dtype: np.dtype[Any]
    writable: bool
    give: Callable[[Any], Any]
    stream: int | None = None  # the handle of the framework's current stream, where it is not cupy's

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array."""
        return tuple(self.array.shape)

    @property
    def nbytes(self) -> int:
        """Of the array."""
        return int(self.array.nbytes)

    def flat(self) -> Any:
        """The elements in C order, as memory in one piece: the array's own where it is that, else a copy."""
        return self.array.reshape(-1) if self.array.flags.c_contiguous else self.array.flatten()


def is_device(value: Any) -> bool:
    """Whether a value lives on a GPU. Costs a fraction of a microsecond for a numpy array."""
    if type(value) in _HOST:
        return False
    if (torch := sys.modules.get("torch")) is not None and isinstance(value, torch.Tensor):
        return bool(value.is_cuda)
    if hasattr(value, "__cuda_array_interface__"):
        return True
    if hasattr(value, "__dlpack_device__"):
        return int(value.__dlpack_device__()[0]) in _DLPACK_CUDA
    return False


def adopt(value: Any) -> Adopted:
    """The same memory as a cupy array. Raises InputError for bfloat16 without ml_dtypes."""
    import cupy

    if isinstance(value, cupy.ndarray):
        bare = value.view(np.uint16) if value.dtype.name == _BFLOAT16 else value
        dtype = value.dtype
        return Adopted(bare, dtype, True, lambda made: made if made.dtype == dtype else made.view(dtype))
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _of_torch(torch, value, cupy)
    if hasattr(value, "__cuda_array_interface__"):
        writable = not value.__cuda_array_interface__["data"][1]
        array = cupy.asarray(value)
        return Adopted(array, array.dtype, writable, lambda made: made)
    array = cupy.from_dlpack(value)  # of a framework whose arrays may be immutable
    return Adopted(array, array.dtype, False, lambda made: made)


def _of_torch(torch: Any, tensor: Any, cupy: Any) -> Adopted:
    bare, stream = tensor.detach(), torch.cuda.current_stream(tensor.device).cuda_stream
    if tensor.dtype is not torch.bfloat16:
        array = cupy.from_dlpack(bare)
        return Adopted(array, array.dtype, True, torch.from_dlpack, stream)
    array = cupy.from_dlpack(bare.view(torch.int16)).view(np.uint16)
    return Adopted(
        array,
        arrays.dtype_of(_BFLOAT16),
        True,
        lambda made: torch.from_dlpack(made.view(np.int16)).view(torch.bfloat16),
        stream,
    )


def of_shape(value: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and dtype of a device array, without adopting it where that is known."""
    if type(value).__module__.partition(".")[0] == "cupy":
        return value.shape, value.dtype
    found = adopt(value)
    return found.array.shape, found.dtype


def zeros(like: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """On the GPU, of the kind of `like`, if that is on one; else on the host."""
    if not is_device(like):
        return np.zeros(shape, dtype)
    import cupy

    adopted = adopt(like)
    bits = np.dtype(np.uint16) if dtype.name == _BFLOAT16 else dtype
    made = cupy.zeros(shape, bits)
    return adopted.give(made) if dtype == adopted.dtype else made


def fill(target: Any, values: Any) -> None:
    """Give an array, of whatever kind, the values of a host array of its shape."""
    if not is_device(target):
        target[...] = values
        return
    adopted = adopt(target)
    host = np.ascontiguousarray(values, adopted.dtype).view(adopted.array.dtype)
    import cupy

    adopted.array[...] = cupy.asarray(host)


def exceeds_on_gpu(values: Sequence[Any], element_bytes: int, limit: int) -> bool:
    """Whether some element's magnitude is beyond the limit, as native.exceeds has it; the host waits for the answer."""
    import cupy

    found = [adopt(value) for value in values]
    for handle in {one.stream for one in found if one.stream is not None}:
        cupy.cuda.get_current_stream().wait_event(cupy.cuda.ExternalStream(handle).record())
    return bool(_kernels().exceeds([one.flat() for one in found], element_bytes, limit).get()[0])


@functools.cache
def _kernels() -> Kernels:
    import cupy

    return Kernels(cupy)


def to_host(value: Any) -> Any:
    """A copy in host memory of what is on a GPU, which waits for it; everything else as it is."""
    if not is_device(value):
        return value
    found = adopt(value)
    return found.array.get().view(found.dtype)
