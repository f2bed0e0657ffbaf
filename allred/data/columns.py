"""Where rows come from: arrays in memory, files mapped into memory, datasets that give one sample at a time.

Each has a length and `pick(rows)`, and can be pickled for a process that prefetches; a mapped file is then mapped anew.
"""

import mmap
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from allred import arrays
from allred.arrays import Array
from allred.data.collate import collate
from allred.errors import InputError

_ARRAYS = ("__array__", "__array_interface__", "__cuda_array_interface__")


class Column(Protocol):
    """One of the things that `batches` takes."""

    def __len__(self) -> int: ...

    def pick(self, rows: Array) -> Any:
        """These rows as a batch, a copy. rows: int64 (n,)."""


class Columns:
    """Several of one length; called with row numbers it gives a tuple, or the batch itself if there is one column."""

    def __init__(self, columns: list[Column]) -> None:
        self._columns = columns

    def __call__(self, rows: Array) -> Any:
        picked = tuple(column.pick(rows) for column in self._columns)
        return picked if len(picked) > 1 else picked[0]


class Rows:
    """An array's."""

    def __init__(self, array: Array) -> None:
        self._array = array

    def __len__(self) -> int:
        return len(self._array) if self._array.ndim else 0

    def pick(self, rows: Array) -> Array:
        """`array[rows]`"""
        picked: Array = self._array[rows]
        return picked

    def __reduce__(self) -> Any:
        place = _place_in_file(self._array)
        return (_map, place) if place else (Rows, (self._array,))


class Samples:
    """A dataset's: an object with `__len__` and `__getitem__(int)`, as torch's map-style datasets are."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def pick(self, rows: Array) -> Any:
        """Samples, collated; by `__getitems__(list)` where the dataset has that."""
        numbers = [int(row) for row in rows]
        many = getattr(self._dataset, "__getitems__", None)
        samples = many(numbers) if many and numbers else [self._dataset[number] for number in numbers]
        return collate(samples) if numbers else collate([], like=self._dataset[0])


def column(value: Any) -> Column:
    """What gives the rows of `value`. Raises InputError for what has none."""
    listed = isinstance(value, (list, tuple, range, str, bytes, bytearray, memoryview, Mapping))
    if listed or any(hasattr(value, name) for name in _ARRAYS) or not hasattr(value, "__getitem__"):
        if hasattr(value, "__iter__") and not hasattr(value, "__getitem__") and not hasattr(value, "__array__"):
            raise InputError(
                f"{type(value).__name__} can only be iterated over; batches() needs __len__ and __getitem__, and "
                "allred.data.stream takes what comes one by one"
            )
        return Rows(arrays.as_host_array(value))
    if not hasattr(value, "__len__"):
        raise InputError(f"batches() needs the length of the dataset, and {type(value).__name__} has no __len__")
    return Samples(value)


Place = tuple[str, str, tuple[int, ...], tuple[int, ...], int]


def _place_in_file(array: Array) -> Place | None:
    """Where an array lies that is a view of a mapped file: its name, dtype, shape, strides, offset in bytes."""
    whole: Any = array
    while isinstance(whole, np.ndarray) and not isinstance(whole.base, mmap.mmap):
        whole = whole.base
    if not isinstance(whole, np.memmap) or whole.filename is None or whole.mode == "c" or array.dtype.hasobject:
        return None
    begin = array.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
    return str(whole.filename), array.dtype.str, array.shape, array.strides, whole.offset + begin


def _map(name: str, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> Rows:
    memory = np.memmap(name, np.uint8, "r")
    return Rows(np.ndarray(shape, dtype, memory, offset, strides))
