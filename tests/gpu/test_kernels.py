"""The kernels of csrc/fuse.cu on a real GPU. tests/unit/test_fuse_cu.py has more cases, with kernels compiled as C."""

import cupy
import numpy as np
import pytest

from allred import arrays
from allred.gpu.kernels import Kernels, aligned_offsets

COUNTS = [3, 8192, 1, 100003]


def packed(dtype, offset):
    """Tensors, the kernels, and a buffer that they are packed into."""
    kernels, dtype = Kernels(cupy), np.dtype(dtype)
    rngs = [np.random.default_rng(count) for count in COUNTS]
    whole = [rng.integers(0, 100, count + offset) for rng, count in zip(rngs, COUNTS, strict=True)]
    parts = [cupy.asarray(each.astype(dtype))[offset:] for each in whole]
    buffer = cupy.zeros(aligned_offsets(COUNTS, dtype.itemsize)[-1], dtype)
    return kernels, parts, buffer


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32, np.float64])
@pytest.mark.parametrize("offset", [0, 1])
def test_pack_and_unpack(dtype, offset):
    kernels, parts, buffer = packed(dtype, offset)
    name, here = np.dtype(dtype).name, kernels.table(parts, buffer.itemsize)
    kernels.pack(here, name, buffer, name, None)
    for start, part in zip(aligned_offsets(COUNTS, buffer.itemsize), parts, strict=False):
        cupy.testing.assert_array_equal(buffer[start : start + part.size], part)
    back = [cupy.zeros_like(part) for part in parts]
    there = kernels.table(back, buffer.itemsize)
    kernels.unpack(buffer, there, name, name, None)
    for part, other in zip(parts, back, strict=True):
        cupy.testing.assert_array_equal(part, other)
    if dtype in (np.float32, np.float64):
        kernels.pack(here, name, buffer, name, 3.0)
        kernels.unpack(buffer, there, name, name, 4.0)
        for part, other in zip(parts, back, strict=True):
            np.testing.assert_array_equal(other.get(), part.get() * dtype(3) / dtype(4))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_results_that_are_not_finite_are_not_written(dtype):
    kernels, parts, buffer = packed(dtype, 0)
    name, table = np.dtype(dtype).name, kernels.table(parts, buffer.itemsize)
    kernels.pack(table, name, buffer, name, None)
    buffer[aligned_offsets(COUNTS, buffer.itemsize)[3] + 70000] = cupy.inf
    for part in parts:
        part.fill(7)
    flags = cupy.zeros(len(parts), np.uint32)
    kernels.unpack(buffer, table, name, name, None, flags)
    assert flags.get().tolist() == [0, 0, 0, 1]
    assert parts[3][70000] == 7


WIRE_DTYPES = [
    *(("float16", "float32"), ("bfloat16", "float32"), ("float32", "float16"), ("float32", "bfloat16")),
    *(("float64", "float16"), ("float64", "bfloat16"), ("float16", "float16"), ("bfloat16", "bfloat16")),
]


def as_bits(array, name):
    return array.view(np.uint16) if name == "bfloat16" else array


@pytest.mark.parametrize(("name", "wire"), WIRE_DTYPES)
def test_casts_and_checks(name, wire):
    """Small whole numbers are exact in each dtype."""
    kernels, dtype, wire_dtype = Kernels(cupy), arrays.dtype_of(name), arrays.dtype_of(wire)
    numbers = [np.random.default_rng(count).integers(0, 64, count) for count in COUNTS]
    parts = [cupy.asarray(as_bits(each.astype(dtype), name)) for each in numbers]
    offsets = aligned_offsets(COUNTS, wire_dtype.itemsize)
    buffer = cupy.zeros(offsets[-1], as_bits(np.zeros(0, wire_dtype), wire).dtype)
    table = kernels.table(parts, wire_dtype.itemsize)
    kernels.pack(table, name, buffer, wire, None if name == wire else 2.0)
    flags = cupy.zeros(len(parts), np.uint32)
    infinity = cupy.asarray(as_bits(np.array([np.inf], wire_dtype), wire))
    buffer[offsets[1] + 8000 : offsets[1] + 8001] = infinity
    kernels.unpack(buffer, table, name, wire, None if name == wire else 4.0, flags)
    assert flags.get().tolist() == [0, 1, 0, 0]
    for part, each in zip(parts, numbers, strict=True):
        expected = (each if name == wire else each / 2).astype(dtype)
        if part is parts[1]:
            expected[8000] = each[8000]
        np.testing.assert_array_equal(part.get(), as_bits(expected, name))


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
@pytest.mark.parametrize("count", [8, 1000003])
def test_combine(count, name):
    stride, dtype = -(-count // 8) * 8, arrays.dtype_of(name)
    rows = np.random.default_rng(0).normal(size=(3, stride)).astype(dtype)
    own = cupy.asarray(as_bits(rows[1, :count], name))
    on_gpu = cupy.asarray(as_bits(rows.reshape(-1), name))
    Kernels(cupy).combine(name, on_gpu, 3, 1, own, own, False, 3.0)
    wide = rows[:, :count].astype(np.float32)
    expected = ((wide[0] + wide[1] + wide[2]) / np.float32(3)).astype(dtype)
    np.testing.assert_array_equal(own.get(), as_bits(expected, name))
