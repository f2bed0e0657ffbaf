"""Arrays on a GPU, whoever made them: cupy's, torch's tensors, what has `__cuda_array_interface__` or DLPack.

allred works on them as cupy arrays that share their memory. Looking at a value does not load cupy. Other frameworks
have current streams of their own: cupy's own ways to take their arrays order its current stream after them, or have the
host wait, for each array. Here that is done once for all, by whoever works on them (`Adopted.stream`).
"""

import contextlib
import functools
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from allred import arrays
from allred.errors import InputError
from allred.gpu.device import Handle, external
from allred.gpu.kernels import Kernels

_DLPACK_CUDA = (2, 13)  # DLPack's numbers of CUDA memory and of managed memory
_BFLOAT16 = "bfloat16"
_HOST = frozenset({np.ndarray, float, int, bool, list, tuple, type(None)})  # for sure


class Adopted(NamedTuple):
    """A device array as cupy sees it. bfloat16, which older cupy lacks, is uint16 there and bfloat16 in `dtype`.

    kind: makes a cupy array that holds this dtype into what the caller is given: a torch tensor for a torch tensor.
    stream: gives the handle of the framework's current stream, where it is not cupy's.
    """

    array: Any
    dtype: np.dtype[Any]
    writable: bool
    kind: Callable[[Any, np.dtype[Any]], Any]
    stream: Handle | None = None

    def give(self, made: Any) -> Any:
        """What the caller is given for a cupy array like `array`."""
        return self.kind(made, self.dtype)

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
    if (cupy := sys.modules.get("cupy")) is not None and isinstance(value, cupy.ndarray):
        return True  # without making its interface, which takes a microsecond
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
        return _of_cupy(value, writable=True)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _of_torch(torch, value)
    interface = getattr(value, "__cuda_array_interface__", None)
    if interface is not None and not (hasattr(value, "__dlpack__") and _says_less(interface)):
        return _of_interface(value, interface)
    return _of_cupy(cupy.from_dlpack(value), writable=False)  # of a framework whose arrays may be immutable


def _of_cupy(array: Any, writable: bool) -> Adopted:
    dtype = array.dtype
    bare = array.view(np.uint16) if arrays.name_of(dtype) == _BFLOAT16 else array
    return Adopted(bare, dtype, writable, _cupys)


def _cupys(made: Any, dtype: np.dtype[Any]) -> Any:
    return made if made.dtype == dtype else made.view(dtype)


def _says_less(interface: dict[str, Any]) -> bool:
    """Than DLPack, which has cupy's stream wait for the array: JAX's knows no stream, and cannot be written to."""
    return interface.get("stream") is None and bool(interface["data"][1])


def _of_torch(torch: Any, tensor: Any) -> Adopted:
    dtype = _dtype_of_torch(tensor.dtype)
    held = np.dtype(np.uint16) if tensor.dtype is torch.bfloat16 else dtype
    strides = tuple([step * held.itemsize for step in tensor.stride()])
    bare = tensor.detach()
    array = _view(bare.data_ptr(), tuple(tensor.shape), held, strides, bare, tensor.device.index)
    return Adopted(array, dtype, True, _torchs, _stream_of_torch(tensor.device.index))


@functools.cache
def _dtype_of_torch(dtype: Any) -> np.dtype[Any]:
    """numpy's, of a torch dtype."""
    name = str(dtype).removeprefix("torch.")
    try:
        return arrays.dtype_of(name)
    except TypeError:
        raise InputError(f"{dtype} is not supported; use one of {', '.join(arrays.DTYPES)}") from None


def _torchs(made: Any, dtype: np.dtype[Any]) -> Any:
    torch: Any = sys.modules["torch"]

    if arrays.name_of(dtype) == _BFLOAT16:  # which older cupy lacks
        return torch.from_dlpack(made.view(np.int16)).view(torch.bfloat16)
    return torch.from_dlpack(made)


@functools.cache
def _stream_of_torch(index: int) -> Handle:
    """Torch's current stream on a GPU; the same function for all tensors there."""
    torch: Any = sys.modules["torch"]

    return lambda: int(torch.cuda.current_stream(index).cuda_stream)


def _of_interface(value: Any, interface: dict[str, Any]) -> Adopted:
    """By CUDA's array interface: `stream`, of version 3, is where the value is being computed; 0 cannot be there."""
    if interface.get("mask") is not None:
        raise InputError("a masked array would lose its mask; pass an array without one")
    (address, locked), shape, dtype = interface["data"], tuple(interface["shape"]), np.dtype(interface["typestr"])
    array = _view(address, shape, dtype, interface.get("strides"), value)
    handle = interface.get("stream")
    return Adopted(array, dtype, not locked, _cupys, None if handle is None else _fixed(handle))


@functools.lru_cache
def _fixed(handle: int) -> Handle:
    return lambda: handle


def _view(
    address: int, shape: tuple[int, ...], dtype: np.dtype[Any], strides: tuple[int, ...] | None, owner: Any,
    index: int = -1,
) -> Any:  # fmt: skip
    """Memory of somebody else's as a cupy array; index: of its GPU, to be found out where it is -1."""
    import cupy

    if not arrays.size_of(shape):
        return cupy.empty(shape, dtype)
    memory = cupy.cuda.UnownedMemory(address, arrays.size_of(shape) * dtype.itemsize, owner, index)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0), strides)


_OF_CUPY = operator.attrgetter("data.ptr", "data.device_id", "shape", "strides", "dtype")


def layouts(values: Sequence[Any]) -> list[Any] | None:
    """How each of them lies in memory, and as what, to be compared: arrays with equal layouts are the same to a kernel.
    An address, and more. None for arrays of which nobody knows that quicker than by `adopt`, and for no arrays."""
    kinds = set(map(type, values))
    cupy, torch = sys.modules.get("cupy"), sys.modules.get("torch")
    if cupy is not None and kinds == {cupy.ndarray}:
        return list(map(_OF_CUPY, values))
    if torch is not None and kinds and kinds <= {torch.Tensor, torch.nn.Parameter}:
        return [(t.data_ptr(), t.device, t.shape, t.stride(), t.dtype) for t in values]
    return None


def addresses(values: Sequence[Any]) -> list[int]:
    """Where device arrays begin."""
    known = layouts(values)
    return [adopt(value).array.data.ptr for value in values] if known is None else [layout[0] for layout in known]


def of_shape(value: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and dtype of an array of any kind, without adopting it where that is known."""
    if isinstance(value, np.ndarray) or type(value).__module__.partition(".")[0] == "cupy":
        return value.shape, value.dtype
    found = adopt(value)
    return found.array.shape, found.dtype


def stream_of(value: Any) -> Any:
    """The stream that the framework of an array on a GPU works on now, as cupy has streams."""
    import cupy

    if not isinstance(value, cupy.ndarray):
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            return external(_stream_of_torch(value.device.index)())
        if (handle := (getattr(value, "__cuda_array_interface__", None) or {}).get("stream")) is not None:
            return external(handle)
    return cupy.cuda.get_current_stream()


@contextlib.contextmanager
def on_stream(found: Adopted) -> Iterator[None]:
    """Inside this block cupy works on the stream that the array's framework works on."""
    with contextlib.nullcontext() if found.stream is None else external(found.stream()):
        yield


def zeros(like: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """On the GPU, of the kind of `like`, if that is on one; else on the host."""
    if not is_device(like):
        return np.zeros(shape, dtype)
    import cupy

    adopted = adopt(like)
    bits = np.dtype(np.uint16) if dtype.name == _BFLOAT16 else dtype
    with on_stream(adopted):
        return adopted.kind(cupy.zeros(shape, bits), dtype)


def fill(target: Any, values: Any) -> None:
    """Give an array, of whatever kind, the values of a host array of its shape."""
    if not is_device(target):
        target[...] = values
        return
    adopted = adopt(target)
    host = np.ascontiguousarray(values, adopted.dtype).view(adopted.array.dtype)
    import cupy

    with on_stream(adopted):
        adopted.array[...] = cupy.asarray(host)


def following(values: Sequence[Any]) -> tuple[list[Adopted], Kernels]:
    """Arrays on the GPU, as cupy's current stream may read them: it comes after what their frameworks' streams hold.
    And that stream's kernels."""
    import cupy

    found, current = [adopt(value) for value in values], cupy.cuda.get_current_stream()
    for handle in {one.stream for one in found if one.stream is not None}:
        current.wait_event(external(handle()).record())
    return found, _kernels(current.ptr)


@functools.cache
def _kernels(stream: int) -> Kernels:
    """Those of a stream, on which their tables are written and read."""
    import cupy

    return Kernels(cupy)


def to_host(value: Any) -> Any:
    """A copy in host memory of what is on a GPU, which waits for it; everything else as it is."""
    if not is_device(value):
        return value
    found = adopt(value)
    with on_stream(found):
        return found.array.get().view(found.dtype)


def head(value: Any, nbytes: int) -> arrays.Array:
    """The first bytes of an array of any kind, in C order, in host memory."""
    if not is_device(value):
        return arrays.as_bytes(value)[:nbytes]
    found = adopt(value)
    with on_stream(found):
        start: arrays.Array = found.flat()[: nbytes // found.array.itemsize].get()
        return start.view(np.uint8)
