"""Readers of arrays: .npy and IDX, and what they say of files that are damaged."""

import contextlib
import gzip
import re
import struct

import numpy as np
import pytest

from allred.data import idx, npy
from allred.errors import DataError

CODES = {"uint8": 8, "int8": 9, "int16": 11, "int32": 12, "float32": 13, "float64": 14}


def idx_bytes(array):
    head = struct.pack(f">HBB{array.ndim}I", 0, CODES[array.dtype.name], array.ndim, *array.shape)
    return head + array.astype(array.dtype.newbyteorder(">")).tobytes()


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("shape", [(3, 2, 2), (5,), (0, 4), ()])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_idx_of_every_dtype(tmp_path, dtype, shape, pack):
    array = (np.arange(np.prod(shape, dtype=int)) * 3 - 7).astype(dtype).reshape(shape)
    path = tmp_path / "x-ubyte"
    path.write_bytes(pack(idx_bytes(array)))
    got = idx(path)
    assert got.dtype == array.dtype
    assert got.dtype.isnative
    assert got.flags.writeable
    np.testing.assert_array_equal(got, array)


GOOD = idx_bytes(np.arange(6, dtype=np.int16).reshape(3, 2))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"offset 0: expected IDX \(two zero bytes and one of 0x08, .*\), got an empty file"),
        (b"\x00\x00\x07\x01abcd", "offset 0: expected IDX .* got 00 00 07 01"),
        (b"GIF89a", "got 47 49 46 38"),
        (GOOD[:9], "offset 4: expected 2 dimensions, 8 bytes, got 5"),
        (GOOD[:-1], r"offset 12: expected 12 bytes of int16 \(3, 2\), got 11"),
        (GOOD + b"\x00", r"offset 12: expected 12 bytes of int16 \(3, 2\), got 13"),
        (b"\x00\x00\x08\x03" + b"\xff" * 12, r"offset 16: expected 79\d+ bytes of uint8 \(4294967295, "),
        (gzip.compress(GOOD[:-1], mtime=0), "unpacked: offset 12: expected 12 bytes"),
        (gzip.compress(GOOD, mtime=0)[:-9], "damaged gzip file of .* bytes"),
        (gzip.compress(GOOD, mtime=0)[:-5] + b"\x00\x00\x00\x00\x00", "damaged gzip file of .* bytes"),
    ],
)
def test_idx_that_is_none(tmp_path, content, message):
    path = tmp_path / "labels"
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"{re.escape(str(path))}.*{message}"):
        idx(path)


def test_npy_is_mapped(tmp_path):
    for number, array in enumerate(
        (np.arange(12.0).reshape(3, 4), np.asfortranarray(np.ones((2, 3), np.int16)), np.array(5), np.zeros((0, 3)))
    ):
        path = tmp_path / f"{number}.npy"
        np.save(path, array)
        got = npy(path)
        assert isinstance(got, np.memmap)
        assert not got.flags.writeable
        assert got.dtype == array.dtype
        np.testing.assert_array_equal(got, array)


def test_npy_that_is_none(tmp_path):
    path = tmp_path / "x.npy"
    np.save(path, np.arange(10))
    good = path.read_bytes()
    for end in range(len(good)):
        path.write_bytes(good[:end])
        with pytest.raises(DataError, match=f"{re.escape(str(path))}: expected an array .* got {end} bytes: "):
            npy(path)
    np.save(path, np.array([None, 1], object), allow_pickle=True)
    with pytest.raises(DataError, match="objects"):
        npy(path)
    for place in range(128):  # of the header: nothing but DataError, or an array
        path.write_bytes(good[:place] + bytes([good[place] ^ 0x15]) + good[place + 1 :])
        with contextlib.suppress(DataError):
            npy(path)
    with pytest.raises(FileNotFoundError, match="missing"):
        npy(tmp_path / "missing.npy")
    with pytest.raises(FileNotFoundError, match="missing"):
        idx(tmp_path / "missing")
