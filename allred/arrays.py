"""What an array is to allred: which dtypes it moves and how they are named in headers and messages.

Host arrays are numpy's. bfloat16 is ml_dtypes' type, known by name so that ml_dtypes is needed only by who uses it.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from allred.errors import InputError

Array = NDArray[Any]

# The position in this tuple is the dtype's code on the wire; append only.
DTYPES = (
    *("bool", "uint8", "int8", "int16", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64"),
)
_CODES = {name: code for code, name in enumerate(DTYPES)}
_FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
_HALVES = frozenset({"float16", "bfloat16"})


@functools.cache
def name_of(dtype: np.dtype[Any]) -> str:
    """dtype.name, which numpy puts together anew each time, in microseconds."""
    return dtype.name


def dtype_code(dtype: np.dtype[Any]) -> int:
    """The dtype's number in headers. Raises InputError for a dtype that allred does not move."""
    code = _CODES.get(name_of(dtype))
    if code is None:
        raise InputError(f"dtype {dtype.name} is not supported; use one of {', '.join(DTYPES)}")
    if not dtype.isnative:
        raise InputError(
            f"dtype {dtype.str} is byte-swapped; convert it with array.astype(array.dtype.newbyteorder('='))"
        )
    return code


def dtype_of(name: str) -> np.dtype[Any]:
    """numpy's dtype of one of DTYPES. Raises InputError for bfloat16 where ml_dtypes, which has it, is missing."""
    if name != "bfloat16":
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError:
        raise InputError("bfloat16 needs ml_dtypes, from which numpy has it; pip install ml_dtypes") from None
    found: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return found


def is_float(dtype: np.dtype[Any]) -> bool:
    """Whether the dtype is one of float16, bfloat16, float32, float64."""
    return name_of(dtype) in _FLOATS


def accumulator(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype that sums of `dtype` are formed in: float32 for the 16-bit floats, else itself."""
    return np.dtype(np.float32) if name_of(dtype) in _HALVES else dtype


def as_host_array(value: Any) -> Array:
    """`value` as a numpy array, without a copy where it is one. Raises InputError for what lives on a device."""
    if isinstance(value, np.ma.MaskedArray):
        raise InputError("a masked array would lose its mask; pass array.filled(value)")
    if isinstance(value, np.ndarray):
        return value
    if hasattr(value, "__cuda_array_interface__"):
        raise InputError(
            f"{type(value).__module__}.{type(value).__name__} lives on a GPU, and is not taken here: the backend nccl, "
            "for arrays on GPUs, does not serve (allred.init()'s banner says why), or this takes host arrays only; "
            "pass a host array, for example cupy.asnumpy(x)"
        )
    if type(value).__module__.partition(".")[0] == "torch":
        raise InputError(
            "torch tensors are not taken as they are yet; pass tensor.detach().numpy(), which shares its memory"
        )
    array = np.asarray(value)
    if array.dtype == object:
        raise InputError(f"expected an array or a number, got {type(value).__name__}")
    return array


def flat(array: Array) -> Array:
    """The elements in C order: a view where the array is contiguous, else a copy."""
    if not isinstance(array, np.ndarray):  # cupy's, where there is arithmetic on either kind
        return array.ravel()
    return np.ascontiguousarray(array).reshape(-1)


def put_back(target: Array, flat: Array) -> None:
    """Give an array the elements of what `flat` made of it, where that was a copy."""
    if not np.shares_memory(target, flat):
        target[...] = flat.reshape(target.shape)


def memory_of(group: Sequence[Array]) -> list[int]:
    """A number for each array, the same for those that begin at the same memory."""
    if all(array.flags.owndata for array in group):  # numpy's address takes 1 us
        return [id(array) for array in group]
    return [array.__array_interface__["data"][0] for array in group]


def overlap(group: Sequence[Array]) -> bool:
    """Whether two of the contiguous arrays in the group share memory, or any two begin at the same."""
    if len(set(memory_of(group))) < len(group):
        return True
    whole = [array for array in group if array.flags.c_contiguous]
    if all(array.flags.owndata for array in whole):
        return False
    return len(whole) > 1 and cross(memory_of(whole), [array.nbytes for array in whole])


def cross(starts: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether two of the stretches of memory, that begin there and have so many bytes, share some."""
    stretches = sorted((start, start + size) for start, size in zip(starts, sizes, strict=True))
    return any(end > start for (_, end), (start, _) in itertools.pairwise(stretches))


def as_bytes(array: Array) -> NDArray[np.uint8]:
    """The memory of a contiguous array, or of a contiguous copy of another, as flat bytes."""
    return flat(array).view(np.uint8)


def as_buffer(array: Array) -> Array:
    """A view that has the buffer protocol, which ml_dtypes' bfloat16 lacks."""
    return array.view(np.uint16) if name_of(array.dtype) == "bfloat16" else array


def describe(shape: tuple[int, ...], dtype: np.dtype[Any]) -> str:
    """How errors write a tensor: `float32 (64, 10)`."""
    return f"{name_of(dtype)} {shape}".replace("'", "")


def amount(nbytes: float) -> str:
    """Bytes in words.

    >>> amount(812), amount(2400), amount(2.5e6)
    ('812 B', '2.40 kB', '2.50 MB')
    """
    if nbytes < 1000:
        return f"{nbytes:.0f} B"
    return f"{nbytes / 1e3:.2f} kB" if nbytes < 1e6 else f"{nbytes / 1e6:.2f} MB"


def size_of(shape: tuple[int, ...]) -> int:
    """Elements of a shape; 1 for the empty shape of a 0-d array."""
    return math.prod(shape)


def split_sizes(total: int, parts: int) -> list[int]:
    """`total` items over `parts` ranks, within one of each other; the first take one more, as in numpy.array_split.

    >>> split_sizes(10, 4)
    [3, 3, 2, 2]
    """
    base, extra = divmod(total, parts)
    return [base + (part < extra) for part in range(parts)]
