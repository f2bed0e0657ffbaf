"""Device arrays of any framework: cupy, torch, and objects with `__cuda_array_interface__` or DLPack.

allred works on them as cupy arrays that share their memory (`adopt`). `is_device` does not import cupy. Other
frameworks have their own current streams. cupy's own conversions order cupy's current stream after them, or block the
host, once per array. Here the code that uses the arrays orders the streams once for all of them (`Adopted.stream`).
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
from allred.gpu.kernels import Kernels
from allred.gpu.streams import StreamHandle, external_stream

_DLPACK_CUDA = (2, 13)  # DLPack's device types for CUDA memory and managed memory
_BFLOAT16 = "bfloat16"
_HOST_TYPES = frozenset({np.ndarray, float, int, bool, list, tuple, type(None)})


class Adopted(NamedTuple):
    """Device array as a cupy array that shares its memory.

    Arguments:
        array: the cupy array; bfloat16, which older cupy lacks, is uint16 here.
        dtype: dtype of the caller's array.
        writable: whether the caller's array may be changed in place.
        convert: makes an array of the caller's framework from a cupy array and a dtype.
        stream: returns the handle of the framework's current stream; None for cupy.
    """

    array: Any
    dtype: np.dtype[Any]
    writable: bool
    convert: Callable[[Any, np.dtype[Any]], Any]
    stream: StreamHandle | None = None

    def to_caller(self, made: Any) -> Any:
        """Convert a cupy array with the dtype of `array` to the caller's framework."""
        return self.convert(made, self.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)

    @property
    def nbytes(self) -> int:
        return int(self.array.nbytes)

    def flat(self) -> Any:
        """Elements in C order in contiguous memory: a view if the array is contiguous, else a copy."""
        return self.array.reshape(-1) if self.array.flags.c_contiguous else self.array.flatten()

    def in_memory_order(self, order: tuple[int, ...]) -> Any:
        """Elements in the order in which they lie in memory: a view. order: its `memory_order`."""
        return self.array.transpose(*order, *(axis for axis in range(self.array.ndim) if axis not in order)).reshape(-1)


def real_numbers(flat: Any) -> Any:
    """View a flat contiguous array of complex numbers as one of twice as many floats. Return any other array itself."""
    return arrays.view_as_real(flat).reshape(-1) if flat.dtype.kind == "c" else flat


def is_device(value: Any) -> bool:
    """Whether a value is an array on a GPU. Takes a fraction of a microsecond for a numpy array."""
    if type(value) in _HOST_TYPES:
        return False
    if (cupy := sys.modules.get("cupy")) is not None and isinstance(value, cupy.ndarray):
        return True  # reading its interface would take a microsecond
    if (torch := sys.modules.get("torch")) is not None and isinstance(value, torch.Tensor):
        return bool(value.is_cuda)
    if hasattr(value, "__cuda_array_interface__"):
        return True
    if hasattr(value, "__dlpack_device__"):
        return int(value.__dlpack_device__()[0]) in _DLPACK_CUDA
    return False


def all_on_gpu(values: Sequence[Any]) -> bool:
    """Whether there are values, and all are cupy arrays or torch tensors on a GPU. Other frameworks' arrays are not
    looked for."""
    kinds = set(map(type, values))
    cupy, torch = sys.modules.get("cupy"), sys.modules.get("torch")
    if cupy is not None and kinds == {cupy.ndarray}:
        return True
    return (
        bool(kinds)
        and torch is not None
        and kinds <= {torch.Tensor, torch.nn.Parameter}
        and all(v.is_cuda for v in values)
    )


def adopt(value: Any) -> Adopted:
    """View a device array as a cupy array. Raises InputError for dtypes that allred does not support."""
    import cupy

    if isinstance(value, cupy.ndarray):
        return _from_cupy(value, writable=True)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _from_torch(torch, value)
    interface = getattr(value, "__cuda_array_interface__", None)
    if interface is not None:  # if it is read-only and names no stream, as JAX's, DLPack orders cupy's stream
        orders = interface.get("stream") is not None or not interface["data"][1]
        if orders or not hasattr(value, "__dlpack__"):
            return _from_interface(value, interface)
    return _from_cupy(cupy.from_dlpack(value), writable=False)  # arrays of this framework may be immutable


def _from_cupy(array: Any, writable: bool) -> Adopted:
    dtype = array.dtype
    bare = array.view(np.uint16) if arrays.name_of(dtype) == _BFLOAT16 else array
    return Adopted(bare, dtype, writable, _to_cupy)


def _to_cupy(made: Any, dtype: np.dtype[Any]) -> Any:
    return made if made.dtype == dtype else made.view(dtype)


def _from_torch(torch: Any, tensor: Any) -> Adopted:
    dtype = _numpy_dtype(tensor.dtype)
    if tensor.is_conj() or tensor.is_neg():
        raise InputError("the tensor is a lazy conjugate or negation; call resolve_conj() or resolve_neg() first")
    held = np.dtype(np.uint16) if tensor.dtype is torch.bfloat16 else dtype
    strides = tuple([step * held.itemsize for step in tensor.stride()])
    bare = tensor.detach()
    array = _view(bare.data_ptr(), tuple(tensor.shape), held, strides, bare, tensor.device.index)
    return Adopted(array, dtype, True, _to_torch, _torch_stream(tensor.device.index))


@functools.cache
def _numpy_dtype(dtype: Any) -> np.dtype[Any]:
    name = str(dtype).removeprefix("torch.")
    try:
        return arrays.dtype_of(name)
    except TypeError:
        raise InputError(f"{dtype} is not supported; use one of {', '.join(arrays.DTYPES)}") from None


def _to_torch(made: Any, dtype: np.dtype[Any]) -> Any:
    torch: Any = sys.modules["torch"]

    if arrays.name_of(dtype) == _BFLOAT16:  # which older cupy lacks
        return torch.from_dlpack(made.view(np.int16)).view(torch.bfloat16)
    return torch.from_dlpack(made)


@functools.cache
def _torch_stream(index: int) -> StreamHandle:
    """Handle function of torch's current stream on a GPU; the same object for all tensors there. It makes the GPU
    current: a new thread uses GPU 0, also if its tensors are elsewhere."""
    torch: Any = sys.modules["torch"]
    import cupy

    gpu = cupy.cuda.Device(index)

    def handle() -> int:
        gpu.use()
        return int(torch.cuda.current_stream(index).cuda_stream)

    return handle


def _from_interface(value: Any, interface: dict[str, Any]) -> Adopted:
    """Adopt by CUDA's array interface. Its `stream` (version 3) is the stream that computes the value, never 0."""
    if interface.get("mask") is not None:
        raise InputError("a masked array would lose its mask; pass an array without one")
    (address, locked), shape, dtype = interface["data"], tuple(interface["shape"]), np.dtype(interface["typestr"])
    array = _view(address, shape, dtype, interface.get("strides"), value)
    handle = interface.get("stream")
    return Adopted(array, dtype, not locked, _to_cupy, None if handle is None else _fixed_stream(handle))


@functools.lru_cache
def _fixed_stream(handle: int) -> StreamHandle:
    return lambda: handle


def _view(
    address: int, shape: tuple[int, ...], dtype: np.dtype[Any], strides: tuple[int, ...] | None, owner: Any,
    index: int = -1,
) -> Any:  # fmt: skip
    """View memory of another framework as a cupy array. index: of its GPU; -1 lets cupy find it."""
    import cupy

    if not arrays.size_of(shape):
        return cupy.empty(shape, dtype)
    memory = cupy.cuda.UnownedMemory(address, arrays.size_of(shape) * dtype.itemsize, owner, index)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0), strides)


def memory_order(array: Any) -> tuple[int, ...] | None:
    """Axes with more than one element, from the largest stride to the smallest: (0, 2, 3, 1) in torch's format
    channels_last. None if the elements have gaps or overlap. array: numpy or cupy array."""
    axes = [axis for axis, count in enumerate(array.shape) if count > 1]
    axes = axes if array.flags.c_contiguous else sorted(axes, key=lambda axis: -array.strides[axis])
    step = array.itemsize
    for axis in [] if array.flags.c_contiguous else axes[::-1]:
        if array.strides[axis] != step:
            return None
        step *= array.shape[axis]
    return tuple(axes)


_CUPY_LAYOUT = operator.attrgetter("data.ptr", "shape", "strides", "dtype")


def layouts(values: Sequence[Any]) -> list[Any] | None:
    """Memory layout of each array, as tuples to compare: address, shape, strides, dtype. A kernel treats arrays with
    equal layouts alike. An address tells the GPU. None if there are no arrays, or if only `adopt` could tell."""
    kinds = set(map(type, values))
    cupy, torch = sys.modules.get("cupy"), sys.modules.get("torch")
    if cupy is not None and kinds == {cupy.ndarray}:
        return list(map(_CUPY_LAYOUT, values))
    if torch is not None and kinds and kinds <= {torch.Tensor, torch.nn.Parameter}:
        return [(t.data_ptr(), t.shape, t.stride(), t.dtype) for t in values]
    return None


def addresses(values: Sequence[Any]) -> list[int]:
    known = layouts(values)
    return [adopt(value).array.data.ptr for value in values] if known is None else [layout[0] for layout in known]


def shape_and_dtype(value: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    if isinstance(value, np.ndarray) or type(value).__module__.partition(".")[0] == "cupy":
        return value.shape, value.dtype
    found = adopt(value)
    return found.array.shape, found.dtype


def current_stream(value: Any) -> Any:
    import cupy

    if not isinstance(value, cupy.ndarray):
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            return external_stream(_torch_stream(value.device.index)())
        if (handle := (getattr(value, "__cuda_array_interface__", None) or {}).get("stream")) is not None:
            return external_stream(handle)
    return cupy.cuda.get_current_stream()


@contextlib.contextmanager
def on_stream(found: Adopted) -> Iterator[None]:
    """Make the current stream of the array's framework cupy's current stream inside this block."""
    with contextlib.nullcontext() if found.stream is None else external_stream(found.stream()):
        yield


def zeros(like: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """Array of zeros: of the framework of `like` if that is a device array, else of numpy."""
    if not is_device(like):
        return np.zeros(shape, dtype)
    import cupy

    adopted = adopt(like)
    bits = np.dtype(np.uint16) if dtype.name == _BFLOAT16 else dtype
    with on_stream(adopted):
        return adopted.convert(cupy.zeros(shape, bits), dtype)


def fill(target: Any, values: Any) -> None:
    if not is_device(target):
        target[...] = values
        return
    adopted = adopt(target)
    host = np.ascontiguousarray(values, adopted.dtype).view(adopted.array.dtype)
    import cupy

    with on_stream(adopted):
        adopted.array[...] = cupy.asarray(host)


def with_kernels(values: Sequence[Any]) -> tuple[list[Adopted], Kernels]:
    """Adopt device arrays, make cupy's current stream wait for their frameworks' streams, and return its kernels."""
    import cupy

    found = [adopt(value) for value in values]
    handles = {one.stream for one in found if one.stream is not None}
    events = [external_stream(handle()).record() for handle in handles]
    current = cupy.cuda.get_current_stream()
    for event in events:
        current.wait_event(event)
    return found, _kernels(current.ptr)


@functools.cache
def _kernels(stream: int) -> Kernels:
    """Kernels of one stream, on which their tables are written and read."""
    import cupy

    return Kernels(cupy)


def to_host(value: Any) -> Any:
    """Copy a device array to host memory; blocks the host. Returns any other value unchanged."""
    if not is_device(value):
        return value
    found = adopt(value)
    with on_stream(found):
        return found.array.get().view(found.dtype)


def leading_bytes(value: Any, nbytes: int) -> arrays.Array:
    """First bytes of a host or device array in C order, uint8 (at most nbytes,), in host memory."""
    if not is_device(value):
        return arrays.as_bytes(value)[:nbytes]
    found = adopt(value)
    with on_stream(found):
        start: arrays.Array = found.flat()[: nbytes // found.array.itemsize].get()
        return start.view(np.uint8)


HALF_DTYPES = ("float16", "bfloat16")


def storage_dtype(name: str) -> np.dtype[Any]:
    """Dtype of device arrays for elements of the dtype `name`: uint16 for bfloat16, else the dtype itself."""
    return np.dtype(np.uint16 if name == "bfloat16" else name)


def half_to_float32(bits: Any, name: str) -> Any:
    """Convert 16-bit floats of the dtype `name` to float32. bits: numpy or cupy array, bfloat16 as uint16."""
    if name == "float16":
        return bits.astype(np.float32)
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def round_to_half(xp: Any, value: Any, name: str) -> Any:
    """Round float32 or float64 to 16-bit floats of the dtype `name`, ties to even; bfloat16 as uint16. xp: cupy, or
    numpy, whose functions accept cupy arrays too."""
    if name == "float16":
        return value.astype(np.float32).astype(np.float16)
    bits = value.astype(np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet_nan = (bits >> np.uint32(16)) | np.uint32(0x40)
    return xp.where(xp.isnan(value), quiet_nan, rounded).astype(np.uint16)


def compute(
    function: Any, *operands: Any, wide: np.dtype[Any], dtype: np.dtype[Any] | None = None, out: Any = None
) -> Any:
    """Apply a numpy ufunc to numbers and to arrays that are all on the host or all on one GPU.

    wide: dtype of the computation. The result is `out`, or a new array of the same framework as the first array. It is
    rounded once: to the dtype of `out`, or to `dtype` if given. Arrays of complex numbers are computed as real ones:
    (inf + 0j) * 2 is inf + nan j in complex arithmetic.
    """
    first = next(filter(is_device, operands), None)
    if first is None:
        if arrays.is_complex(wide):
            parts = [arrays.view_as_real(np.asarray(each)) if np.iscomplexobj(each) else each for each in operands]
            into = None if out is None else arrays.view_as_real(out)
            found = function(*parts, out=into, dtype=arrays.part_of(wide), casting="same_kind")
            made = arrays.view_as_complex(found) if out is None else out
        else:
            made = np.asarray(function(*operands, out=out, dtype=wide, casting="same_kind"))
        return made if dtype is None else made.astype(dtype, copy=False)
    like = adopt(first)
    with on_stream(like):
        given = [_computable(operand) if is_device(operand) else operand for operand in operands]
        if arrays.is_complex(wide):
            part = arrays.part_of(wide)
            if out is not None:
                function(*given, out=arrays.view_as_real(adopt(out).array), dtype=part)
                return out
            made = arrays.view_as_complex(function(*given, dtype=part))
            return like.convert(made.astype(dtype or wide, copy=False), dtype or wide)
        if out is None:
            return like.convert(_rounded(function(*given, dtype=wide), dtype or wide), dtype or wide)
        target = adopt(out)
        if target.dtype == wide:
            function(*given, out=target.array, dtype=wide)
        else:
            target.array[...] = _rounded(function(*given, dtype=wide), target.dtype)
        return out


def _computable(value: Any) -> Any:
    found = adopt(value)
    if arrays.name_of(found.dtype) == "bfloat16":
        return half_to_float32(found.array, "bfloat16")
    return arrays.view_as_real(found.array)


def _rounded(made: Any, dtype: np.dtype[Any]) -> Any:
    if arrays.name_of(dtype) == "bfloat16":
        return round_to_half(np, made, "bfloat16")
    return made.astype(dtype, copy=False)


def squares(parts: Sequence[tuple[Any, int, int]]) -> float:
    """Sum of squares of floats in float64, where squares of float32 never overflow; without a copy of a whole array.
    parts: (array, start, stop): elements start to stop - 1 of the array in C order."""
    here = [
        arrays.view_as_real(arrays.flat(value)[low:high]).reshape(-1)
        for value, low, high in parts
        if not is_device(value)
    ]
    total = float(sum(np.einsum("i,i->", flat, flat, dtype=np.float64) for flat in here))
    there = [part for part in parts if is_device(part[0])]
    return total + squares_on_gpu(there) if there else total


def squares_on_gpu(parts: Sequence[tuple[Any, int, int]]) -> float:
    found, kernels = with_kernels([value for value, *_ in parts])
    flats: dict[str, list[Any]] = {}
    for one, (_, low, high) in zip(found, parts, strict=True):
        flats.setdefault(arrays.name_of(arrays.part_of(one.dtype)), []).append(real_numbers(one.flat()[low:high]))
    return float(sum(kernels.squares(some, name) for name, some in flats.items()))


def exceeds_on_gpu(values: Sequence[Any], element_bytes: int, limit: int) -> bool:
    found, kernels = with_kernels(values)
    return bool(kernels.exceeds([real_numbers(one.flat()) for one in found], element_bytes, limit).get()[0])
