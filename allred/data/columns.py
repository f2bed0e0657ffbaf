"""Columns: sources of rows (arrays, array files, datasets), and collation of samples into batches.

A column has a length and `pick(rows)`. It can be pickled for a process that prefetches, which maps a mapped file again.
Array files are numpy's .npy, mapped into memory, and IDX, the format of MNIST.
"""

import gzip
import math
import mmap
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from allred import arrays
from allred.arrays import Array
from allred.errors import DataError, InputError

# IDX: two zero bytes, a byte for the dtype, a byte for the number of dimensions, each dimension as a big-endian uint32,
# then the elements in C order, big-endian. http://yann.lecun.com/exdb/mnist/ (at the end)
IDX_DTYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_GZIP = b"\x1f\x8b"


def npy(path: str | os.PathLike[str]) -> Array:
    """Map the array of a .npy file into memory, read-only. Only the parts that are used are read, when they are used.

    Ranks of a node share the memory. If the file is truncated while it is mapped, the process ends with SIGBUS.

    Returns an array of any shape and any dtype except object.

    Raises:
        OSError: the file cannot be opened.
        DataError: it is not a .npy file, holds objects, or is too short.

    >>> images = npy("images.npy")    # doctest: +SKIP

    https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
    """
    name = os.fspath(path)
    with open(name, "rb") as file:
        head, nbytes = file.read(12), os.fstat(file.fileno()).st_size
    length = int.from_bytes(head[8:10] if head[6:7] == b"\1" else head[8:], "little")
    if head[:6] == b"\x93NUMPY" and length > nbytes:  # numpy would reserve this memory
        what = f"got {nbytes} bytes: its header has {length}"
        raise DataError(f"{name}: expected an array in numpy's .npy format, {what}")
    try:
        array = np.lib.format.open_memmap(name, mode="r")
    except OSError:
        raise
    except Exception as error:  # usually ValueError; numpy evaluates a damaged header, which may raise any error
        nbytes = os.path.getsize(name)
        raise DataError(f"{name}: expected an array in numpy's .npy format, got {nbytes} bytes: {error}") from None
    return array


def idx(path: str | os.PathLike[str]) -> Array:
    """Read the array of an IDX file, compressed with gzip or not, whatever its name is.

    Returns an array of the shape in the file, in native byte order: uint8, int8, int16, int32, float32 or float64.

    Raises:
        OSError: the file cannot be read.
        DataError: it is not an IDX file, is damaged, or has the wrong size.

    >>> images, labels = idx("train-images-idx3-ubyte.gz"), idx("train-labels-idx1-ubyte.gz")    # doctest: +SKIP
    >>> images.shape, images.dtype, labels.shape    # doctest: +SKIP
    ((60000, 28, 28), dtype('uint8'), (60000,))
    """
    name = os.fspath(path)
    with open(name, "rb") as file:
        content = file.read()
    where = name
    if content.startswith(_GZIP):
        where = f"{name}, unpacked"
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{name}: damaged gzip file of {len(content)} bytes: {error}") from None
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in IDX_DTYPES:
        codes = ", ".join(f"{code:#04x}" for code in IDX_DTYPES)
        raise DataError(
            f"{where}: offset 0: expected IDX (two zero bytes and one of {codes}), "
            f"got {content[:4].hex(' ') or 'an empty file'}"
        )
    dtype, ndim = np.dtype(IDX_DTYPES[content[2]]), content[3]
    begin = 4 + 4 * ndim
    if len(content) < begin:
        raise DataError(f"{where}: offset 4: expected {ndim} dimensions, {4 * ndim} bytes, got {len(content) - 4}")
    shape = struct.unpack(f">{ndim}I", content[4:begin])
    expected = math.prod(shape) * dtype.itemsize
    if len(content) - begin != expected:
        raise DataError(
            f"{where}: offset {begin}: expected {expected} bytes of {dtype.newbyteorder('=').name} {shape}, got "
            f"{len(content) - begin}"
        )
    try:
        array = np.frombuffer(content, dtype, offset=begin).reshape(shape)
    except ValueError as error:  # too many dimensions, or too large ones beside an empty one
        raise DataError(f"{where}: offset 3: numpy has no array of shape {shape}: {error}") from None
    return array.astype(dtype.newbyteorder("="))


_ARRAYS = ("__array__", "__array_interface__", "__cuda_array_interface__")


_JAX_ALIGNMENT, _COPIED_BYTES = 64, 2**14  # smaller batches are copied, which takes less time than to align them


class Column(Protocol):
    """Source of rows for `batches`."""

    def __len__(self) -> int: ...

    def pick(self, rows: Array) -> Any:
        """Copy rows into a batch. rows: int64 (n,)."""


class Columns:
    """Columns of one length. A call with row numbers returns a tuple of batches, or the batch of a single column."""

    def __init__(self, columns: list[Column]) -> None:
        self._columns = columns

    def __call__(self, rows: Array) -> Any:
        picked = tuple(column.pick(rows) for column in self._columns)
        return picked if len(picked) > 1 else picked[0]


class ArrayColumn:
    """Rows of an array."""

    def __init__(self, array: Array) -> None:
        self._array = array

    def __len__(self) -> int:
        return len(self._array) if self._array.ndim else 0

    def pick(self, rows: Array) -> Array:
        """Return `array[rows]`; a large one at an address that JAX on CPUs uses without a copy."""
        array, shape = self._array, (len(rows), *self._array.shape[1:])
        nbytes = arrays.size_of(shape) * array.itemsize
        if nbytes < _COPIED_BYTES or array.dtype.hasobject or type(array) not in (np.ndarray, np.memmap):
            picked: Array = array[rows]
            return picked
        memory = np.empty(nbytes + _JAX_ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % _JAX_ALIGNMENT
        aligned: Array = memory[start : start + nbytes].view(array.dtype).reshape(shape)
        return array.take(rows, 0, aligned, "wrap")  # with "raise", as is the default, it would copy

    def __reduce__(self) -> Any:
        view = _view_of_file(self._array)
        return (_map_file, view) if view else (ArrayColumn, (self._array,))


class DatasetColumn:
    """Samples of a map-style dataset: an object with `__len__` and `__getitem__(int)`, as in torch."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def pick(self, rows: Array) -> Any:
        """Collate samples. Uses `__getitems__(list)` if the dataset has it."""
        numbers = [int(row) for row in rows]
        many = getattr(self._dataset, "__getitems__", None)
        samples = many(numbers) if many and numbers else [self._dataset[number] for number in numbers]
        return collate(samples) if numbers else collate([], like=self._dataset[0])


def as_column(value: Any) -> Column:
    """Column for an argument of `batches`. Raises InputError if it has no rows."""
    if type(value).__module__.partition(".")[0] == "scipy" and hasattr(value, "toarray"):
        raise InputError(
            f"{type(value).__name__} is a sparse matrix of scipy; batches() needs dense rows: pass x.toarray(), or a "
            "dataset whose __getitem__(i) returns x[i].toarray()[0]"
        )
    listed = isinstance(value, (list, tuple, range, str, bytes, bytearray, memoryview, Mapping))
    if listed or any(hasattr(value, name) for name in _ARRAYS) or not hasattr(value, "__getitem__"):
        if hasattr(value, "__iter__") and not hasattr(value, "__getitem__") and not hasattr(value, "__array__"):
            raise InputError(
                f"{type(value).__name__} can only be iterated over; batches() needs __len__ and __getitem__; "
                "use allred.data.stream for an iterable"
            )
        return ArrayColumn(arrays.as_host_array(value))
    if not hasattr(value, "__len__"):
        raise InputError(f"batches() needs the length of the dataset, and {type(value).__name__} has no __len__")
    return DatasetColumn(value)


FileView = tuple[str, str, tuple[int, ...], tuple[int, ...], int]


def _view_of_file(array: Array) -> FileView | None:
    """File name, dtype, shape, strides and offset in bytes of a view of a mapped file; None for other arrays."""
    whole: Any = array
    while isinstance(whole, np.ndarray) and not isinstance(whole.base, mmap.mmap):
        whole = whole.base
    if not isinstance(whole, np.memmap) or whole.filename is None or whole.mode == "c" or array.dtype.hasobject:
        return None
    begin = array.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
    return str(whole.filename), array.dtype.str, array.shape, array.strides, whole.offset + begin


def _map_file(name: str, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> ArrayColumn:
    memory = np.memmap(name, np.uint8, "r")
    return ArrayColumn(np.ndarray(shape, dtype, memory, offset, strides))


def collate(samples: Sequence[Any], like: Any = None, path: str = "a sample") -> Any:
    """Stack samples of one kind along a new first dimension, as torch's default_collate does, into numpy arrays.

    Numbers become an array (n,) of bool, int64 or float64; numpy arrays and torch tensors of shape s an array (n, *s)
    of their dtype; strings and bytes a list. Tuples, named tuples, lists and dicts become the same containers of
    batches (torch returns a list for a tuple).

    samples: n samples, n >= 0. like: sample that defines kinds and shapes if n is 0. path: name of a sample in errors.
    Raises InputError: samples differ in kind or shape, or have another type.

    >>> collate([(1, {"x": [1.0, 2.0]}), (0, {"x": [3.0, 4.0]})])
    (array([1, 0]), {'x': [array([1., 3.]), array([2., 4.])]})
    """
    first = samples[0] if samples else like
    for sample in samples:
        if type(sample) is not type(first) and _kind(sample) != _kind(first):
            raise InputError(
                f"{path} is a {type(first).__name__} in one sample and a {type(sample).__name__} in another"
            )
    kind = _kind(first)
    if kind == "text":
        return list(samples)
    if kind == "dict":
        _check_equal([sorted(map(str, sample)) for sample in samples], "keys", path)
        return {key: collate([s[key] for s in samples], first[key], f"{path}[{key!r}]") for key in first}
    if kind == "sequence":
        _check_equal([len(sample) for sample in samples], "length", path)
        parts = [collate([s[i] for s in samples], first[i], f"{path}[{i}]") for i in range(len(first))]
        if isinstance(first, tuple):
            return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)
        return parts
    stacked = [_as_array(sample, path) for sample in samples or [first]]
    _check_equal([array.shape for array in stacked], "shape", path)
    return np.stack(stacked)[: len(samples)]


def _as_array(sample: Any, path: str) -> Array:
    array = np.asarray(sample)
    if array.dtype == object:
        kinds = "a number, an array, a string, or a tuple, list or dict of them"
        raise InputError(f"{path} is a {type(sample).__name__}; expected {kinds}")
    return array


def _kind(sample: Any) -> str:
    if isinstance(sample, (str, bytes)):
        return "text"
    if isinstance(sample, Mapping):
        return "dict"
    return "sequence" if isinstance(sample, (tuple, list)) else "array"


def _check_equal(values: Sequence[Any], what: str, path: str) -> None:
    for value in values:
        if value != values[0]:
            raise InputError(f"{path} has {what} {values[0]} in one sample and {value} in another; cannot stack them")
