"""Rows as Arrow batches, and as NumPy arrays."""

import pickle
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from allred.errors import InputError

_PICKLED = "__pickled__"  # the only column of batches that carry Python objects
_OBJECTS_PER_BATCH = 1000


def pickled_batches(objects: Iterable[Any]) -> Iterator[pa.RecordBatch]:
    """Return Python objects in batches of one binary column."""
    rows: list[bytes] = []
    for each in objects:
        rows.append(pickle.dumps(each, pickle.HIGHEST_PROTOCOL))
        if len(rows) == _OBJECTS_PER_BATCH:
            yield _pickled_batch(rows)
            rows = []
    if rows:
        yield _pickled_batch(rows)


def _pickled_batch(rows: list[bytes]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(rows, pa.binary())], names=[_PICKLED])


def to_rows(pieces: list[pa.RecordBatch], names: Mapping[str, str] | None) -> list[Any] | dict[str, np.ndarray]:
    """Return the objects of `pickled_batches` as a list, and other batches as a dict of arrays.

    names: {column: name in the dict}; None: all columns. Raises InputError if a column is missing.
    """
    if pieces[0].schema.names == [_PICKLED]:
        objects = [pickle.loads(row.as_buffer()) for piece in pieces for row in piece.column(0)]
        return [tuple(each[column] for column in names) for each in objects] if names else objects
    columns = pieces[0].schema.names
    if missing := [column for column in names or () if column not in columns]:
        raise InputError(f"no column {missing[0]!r} in the DataFrame (input_mapping); it has {', '.join(columns)}")
    wanted = names if names is not None else {column: column for column in columns}
    return {name: _concatenate([to_array(piece.column(column)) for piece in pieces]) for column, name in wanted.items()}


def _concatenate(arrays: list[np.ndarray]) -> np.ndarray:
    if len(arrays) == 1:
        return arrays[0]
    if len({each.shape[1:] for each in arrays}) > 1:  # lists of different lengths
        return np.concatenate([each if each.dtype == object else _objects(list(each)) for each in arrays])
    return np.concatenate(arrays)


def to_array(column: pa.Array) -> np.ndarray:
    """Return a column as an array: numbers with their dtype, lists of one length as further dimensions, other values as
    objects. Integers with nulls become floats with NaN. The arrays are writable."""
    kind = column.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        inner = to_array(column.flatten())
        lengths = column.value_lengths().to_numpy(zero_copy_only=False)
        if len(lengths) and not column.null_count and (lengths == lengths[0]).all():
            return inner.reshape(len(lengths), int(lengths[0]), *inner.shape[1:])
        ends = np.cumsum(np.nan_to_num(lengths).astype(int))
        values: list[Any] = np.split(inner, ends[:-1]) if len(lengths) else []
        return _objects(
            [None if null else value for value, null in zip(values, column.is_null().to_pylist(), strict=True)]
        )
    if pa.types.is_struct(kind):
        raise InputError(
            f"a column of type {kind} cannot be an array; select its fields, or convert a vector of Spark ML with "
            "pyspark.ml.functions.vector_to_array"
        )
    found = np.asarray(column.to_numpy(zero_copy_only=False))
    return found if found.flags.writeable else found.copy()


def _objects(values: list[Any]) -> np.ndarray:
    found = np.empty(len(values), object)
    found[:] = values
    return found
