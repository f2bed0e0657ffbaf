"""Host arrays (numpy): supported dtypes, their codes in headers, and views of memory.

bfloat16 is the dtype of ml_dtypes. It is recognized by its name, so ml_dtypes is required only if it is used.
"""

import functools
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from allred.errors import InputError

Array = NDArray[Any]

# The index of a dtype is its code on the wire; append only.
DTYPES = (
    *("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"),
    *("uint16", "uint32", "uint64", "complex64", "complex128"),
)
_CODES = {name: code for code, name in enumerate(DTYPES)}
_COMPLEX = frozenset({"complex64", "complex128"})
_FLOATS = frozenset({"float16", "bfloat16", "float32", "float64", *_COMPLEX})
_HALVES = frozenset({"float16", "bfloat16"})


@functools.cache
def name_of(dtype: np.dtype[Any]) -> str:
    """Cached dtype.name, which numpy computes at each access, in microseconds."""
    return dtype.name


def dtype_code(dtype: np.dtype[Any]) -> int:
    """Code of a dtype in headers. Raises InputError for an unsupported dtype."""
    code = _CODES.get(name_of(dtype))
    if code is None:
        raise InputError(f"dtype {dtype} cannot be reduced; use one of {', '.join(DTYPES)}")
    if not dtype.isnative:
        raise InputError(
            f"dtype {dtype.str} is byte-swapped; convert it with array.astype(array.dtype.newbyteorder('='))"
        )
    return code


OTHER_DTYPE = 254  # in headers: elements that are copied only, of a dtype that is in the title


def copied_code(dtype: np.dtype[Any]) -> int:
    """As `dtype_code`, for elements that are copied and not reduced: also longdouble, dates, strings of fixed width and
    records. Raises InputError for Python objects."""
    if name_of(dtype) in _CODES:
        return dtype_code(dtype)
    if dtype.hasobject or not dtype.itemsize:
        raise InputError(f"dtype {dtype} holds Python objects or no bytes; use broadcast_object or allgather_object")
    return OTHER_DTYPE


def dtype_of(name: str) -> np.dtype[Any]:
    """numpy dtype for a name in DTYPES. Raises InputError for bfloat16 if ml_dtypes is not installed."""
    if name != "bfloat16":
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError:
        raise InputError("dtype bfloat16 requires ml_dtypes; pip install ml_dtypes") from None
    found: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return found


def is_inexact(dtype: np.dtype[Any]) -> bool:
    """Whether the dtype is one of float16, bfloat16, float32, float64, complex64, complex128."""
    return name_of(dtype) in _FLOATS


def is_complex(dtype: np.dtype[Any]) -> bool:
    """Whether the dtype is complex64 or complex128."""
    return name_of(dtype) in _COMPLEX


def part_of(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of the two parts of a complex number; any other dtype itself."""
    return np.dtype(f"f{dtype.itemsize // 2}").newbyteorder(dtype.byteorder) if is_complex(dtype) else dtype


def view_as_real(array: Array) -> Array:
    """Return complex numbers, also of cupy, as floats: a view over the same memory with one more dimension,
    (real, imaginary). Return any other array itself.

    >>> view_as_real(np.array([1 + 2j, 3]))
    array([[1., 2.],
           [3., 0.]])
    """
    if not is_complex(array.dtype):
        return array
    pairs: Array = array[..., None].view(part_of(array.dtype))
    return pairs


def view_as_complex(parts: Array) -> Array:
    """Return contiguous floats (..., 2) as complex numbers, a view. The inverse of `view_as_real`."""
    return parts.view(np.result_type(parts.dtype, np.complex64))[..., 0]


def accumulator(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Dtype in which sums are computed: float32 for 16-bit floats, else the dtype itself."""
    return np.dtype(np.float32) if name_of(dtype) in _HALVES else dtype


def can_hold(dtype: np.dtype[Any], values: Array) -> bool:
    """Return whether a dtype can hold the values of an array. Floats may be rounded, but must not overflow; an integer
    dtype holds no float array. Integers must be exact.

    >>> can_hold(np.dtype(np.float32), np.array(0.1)), can_hold(np.dtype(np.int64), np.array(2.0))
    (True, False)
    >>> can_hold(np.dtype(np.int8), np.array([100, -100])), can_hold(np.dtype(np.uint8), np.array([-1]))
    (True, False)
    """
    if dtype == values.dtype:
        return True
    if (is_inexact(values.dtype) and not is_inexact(dtype)) or (is_complex(values.dtype) and not is_complex(dtype)):
        return False
    with np.errstate(over="ignore", invalid="ignore"):
        cast = values.astype(dtype)
        if is_inexact(values.dtype):
            return bool(np.array_equal(np.isinf(cast), np.isinf(values)))
        return bool(np.array_equal(cast.astype(values.dtype), values) and np.array_equal(cast < 0, values < 0))


def as_host_array(value: Any) -> Array:
    """Convert `value` to a numpy array; a numpy array is returned as it is. Raises InputError for a device array."""
    masked = sys.modules.get("numpy.ma")  # loaded by who makes a masked array; np.ma would load it here, in 10 ms
    if masked is not None and isinstance(value, masked.MaskedArray):
        raise InputError("a masked array would lose its mask; pass array.filled(value)")
    if isinstance(value, np.ndarray):
        return value
    if hasattr(value, "__cuda_array_interface__"):
        raise InputError(
            f"{type(value).__module__}.{type(value).__name__} is on a GPU, but a host array is expected: backend nccl "
            "is not in use (the banner of allred.init() shows the reason), or the function takes host arrays only; "
            "pass a host array, for example cupy.asnumpy(x)"
        )
    if type(value).__module__.partition(".")[0] == "torch":
        raise InputError(
            "torch tensors on the host are not supported; pass tensor.detach().numpy(), which shares the memory, or "
            "the module to methods of a hooked torch optimizer"
        )
    array = np.asarray(value)
    if array.dtype == object:
        raise InputError(f"expected an array or a number, got {type(value).__name__}")
    return array


def apart(source: Array, target: Array, own: Array) -> Array:
    """Return a contiguous array that a collective sends, or a copy if it overlaps the array that it receives, because
    received data would overwrite data that are not sent yet. They may share the part of this rank, whose place is the
    start of `own`.

    >>> whole = np.arange(4)
    >>> apart(whole, whole[2:], whole[2:]) is whole, apart(whole, whole[:2], whole[2:]) is whole
    (True, False)
    """
    if not np.may_share_memory(source, target):
        return source
    starts = {array.__array_interface__["data"][0] for array in (min(source, target, key=len), own)}
    return source if len(starts) == 1 else source.copy()


def flat(array: Array) -> Array:
    """Elements in C order: a view if the array is contiguous, else a copy."""
    if not isinstance(array, np.ndarray):  # a cupy array
        return array.ravel()
    return np.ascontiguousarray(array).reshape(-1)


def copy_back(target: Array, flat: Array) -> None:
    """Copy the result of `flat` back into its array, unless it is a view."""
    if not np.shares_memory(target, flat):
        target[...] = flat.reshape(target.shape)


def pairs_sharing_memory(group: Sequence[Array]) -> Iterator[tuple[int, int]]:
    """Yield the indices (i, j), i < j, of each two arrays that have an element in the same memory; (i, i) for an array
    that has several elements in the same memory.

    >>> line = np.zeros(6)
    >>> list(pairs_sharing_memory([line[:4], line[4:], line[::2], line[1::2]]))
    [(0, 2), (0, 3), (1, 2), (1, 3)]
    """
    for index, array in enumerate(group):
        if not array.flags.forc and has_internal_overlap(array):
            yield index, index
    for first, second in overlapping_ranges([_bounds(array) for array in group]):
        if np.shares_memory(group[first], group[second]):
            yield first, second


def overlapping_ranges(ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the indices (i, j), i < j, of each two ranges [start, stop) that overlap. Empty ranges overlap none.

    >>> list(overlapping_ranges([(0, 8), (8, 16), (6, 9), (3, 3)]))
    [(0, 2), (1, 2)]
    """
    open_ranges: list[int] = []  # ranges that end after the start of the current one
    for index in sorted((i for i, (start, stop) in enumerate(ranges) if start < stop), key=ranges.__getitem__):
        open_ranges = [other for other in open_ranges if ranges[other][1] > ranges[index][0]]
        yield from ((min(other, index), max(other, index)) for other in open_ranges)
        open_ranges.append(index)


def _bounds(array: Array) -> tuple[int, int]:
    """Return the addresses of the first byte of an array, and of one past its last byte."""
    start = array.__array_interface__["data"][0]
    if not array.size:
        return start, start
    steps = [stride * (count - 1) for stride, count in zip(array.strides, array.shape, strict=True)]
    below, above = sum(step for step in steps if step < 0), sum(step for step in steps if step > 0)
    return start + below, start + above + array.itemsize


def has_internal_overlap(array: Array) -> bool:
    """Return whether elements may share memory. Sorted by stride, each stride must reach past the extent of the smaller
    ones. May return True for arrays without shared elements."""
    covered = array.itemsize
    axes = zip(map(abs, array.strides), array.shape, strict=True)
    for step, count in sorted((step, count) for step, count in axes if count > 1):
        if step < covered:
            return array.size > 0
        covered += step * (count - 1)
    return False


def as_bytes(array: Array) -> NDArray[np.uint8]:
    """Bytes of an array in C order, uint8 (nbytes,): a view if the array is contiguous, else a copy."""
    return flat(array).view(np.uint8)


def as_buffer(array: Array) -> Array:
    """View with the buffer protocol, which bfloat16 of ml_dtypes lacks."""
    return array.view(np.uint16) if name_of(array.dtype) == "bfloat16" else array


def describe(shape: tuple[int, ...], dtype: np.dtype[Any]) -> str:
    """Description of a tensor in errors: `float32 (64, 10)`."""
    return f"{name_of(dtype) if name_of(dtype) in _CODES else dtype} {shape}".replace("'", "")


def amount(nbytes: float) -> str:
    """Format a number of bytes.

    >>> amount(812), amount(2400), amount(2.5e6)
    ('812 B', '2.40 kB', '2.50 MB')
    """
    if nbytes < 1000:
        return f"{nbytes:.0f} B"
    return f"{nbytes / 1e3:.2f} kB" if nbytes < 1e6 else f"{nbytes / 1e6:.2f} MB"


def size_of(shape: tuple[int, ...]) -> int:
    """Number of elements of a shape; 1 for the empty shape of a 0-d array."""
    return math.prod(shape)


def split_sizes(total: int, parts: int) -> list[int]:
    """Split `total` items over `parts` ranks as evenly as possible; the first take one more, as numpy.array_split.

    >>> split_sizes(10, 4)
    [3, 3, 2, 2]
    """
    base, extra = divmod(total, parts)
    return [base + (part < extra) for part in range(parts)]
