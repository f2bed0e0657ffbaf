"""Columns of Arrow as arrays."""

import numpy as np
import pytest

from allred.errors import InputError

pa = pytest.importorskip("pyarrow")

from allred.spark.arrow_columns import pickled_batches, to_array, to_rows  # noqa: E402


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array([1, 2], pa.int32()), np.array([1, 2], np.int32)),
        (pa.array([1, None]), np.array([1.0, np.nan])),
        (pa.array([True, False]), np.array([True, False])),
        (pa.array([[1.0, 2.0], [3.0, 4.0]]), np.array([[1.0, 2.0], [3.0, 4.0]])),
        (pa.array([[[1], [2]], [[3], [4]]]), np.array([[[1], [2]], [[3], [4]]])),
        (pa.array(["a", None]), np.array(["a", None], object)),
        (pa.array([], pa.float32()), np.zeros(0, np.float32)),
    ],
)
def test_columns(column, expected):
    found = to_array(column)
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)
    found[:] = found  # writable


def test_lists_of_different_lengths_and_nulls():
    found = to_array(pa.array([[1, 2], None, [], [3]]))
    assert [None if each is None else each.tolist() for each in found] == [[1, 2], None, [], [3]]


def test_slices():
    column = pa.array([[0, 1], [2, 3], [4, 5]]).slice(1, 2)
    assert to_array(column).tolist() == [[2, 3], [4, 5]]


def test_a_struct():
    with pytest.raises(InputError, match="vector_to_array"):
        to_array(pa.array([{"a": 1}]))


def test_batches_of_different_shapes_are_joined():
    pieces = [pa.RecordBatch.from_pydict({"x": rows}) for rows in ([[1, 2]], [[3], [4, 5, 6]])]
    found = to_rows(pieces, {"x": "y"})
    assert [each.tolist() for each in found["y"]] == [[1, 2], [3], [4, 5, 6]]


def test_objects():
    rows = [(number, {"text": str(number)}) for number in range(2500)]
    pieces = list(pickled_batches(iter(rows)))
    assert [len(piece) for piece in pieces] == [1000, 1000, 500]
    assert to_rows(pieces, None) == rows
