"""Arrays of the real cupy as views of host memory: shapes, addresses and layouts need no GPU."""

import cupy
import ml_dtypes
import numpy as np
import pytest

from allred.comm.device_reduce import check_writable
from allred.errors import InputError
from allred.gpu import device_arrays, streams
from allred.gpu.kernels import Kernels

LAYOUTS = {
    "contiguous": np.s_[:],
    "rows": np.s_[1:3],
    "columns": np.s_[:, 1:4],
    "steps": np.s_[::2, ::3],
    "backwards": np.s_[::-1, ::-1],
}


def on_gpu(value):
    """A cupy array that claims to be on GPU 0, in the memory of a numpy array. It cannot be read."""
    return device_arrays._view(value.ctypes.data, value.shape, value.dtype, value.strides, value, 0)


@pytest.mark.parametrize("dtype", ["float16", "float32", "int64", "bool", ml_dtypes.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, dtype):
    value = np.zeros((4, 6), dtype)[LAYOUTS[layout]]
    array = on_gpu(value)
    assert device_arrays.is_device(array)
    assert device_arrays.layouts([array]) == [(value.ctypes.data, value.shape, value.strides, value.dtype)]
    assert array.flags.c_contiguous == value.flags.c_contiguous
    found = device_arrays.adopt(array)
    assert (found.shape, found.dtype, found.nbytes, found.writable) == (value.shape, value.dtype, value.nbytes, True)
    assert found.array.data.ptr == value.ctypes.data
    assert found.array.dtype == (np.uint16 if dtype is ml_dtypes.bfloat16 else value.dtype)
    assert found.to_caller(found.array).dtype == value.dtype


def test_parts_of_a_flat_array():
    value = np.zeros((4, 6), np.float32)
    flat = device_arrays.adopt(on_gpu(value)).flat()
    assert (flat.data.ptr, flat.shape) == (value.ctypes.data, (24,))
    assert flat[5:9].data.ptr == value.ctypes.data + 20
    assert flat.view(np.uint8)[5:9].data.ptr == value.ctypes.data + 5
    assert (flat.view(np.uint8).size, flat[5:9].nbytes) == (96, 16)


def test_a_table_has_the_addresses_of_its_arrays():
    values = [np.zeros(count, np.float32) for count in (3, 5)]
    kernels = Kernels(cupy)
    table = kernels.table([on_gpu(value) for value in values], 4)
    assert table.addresses == tuple([value.ctypes.data for value in values])
    assert kernels.table([on_gpu(value) for value in values], 4) is table


def test_memory_that_is_in_a_group_twice():
    value = np.zeros(24, np.float32)
    check_writable([device_arrays.adopt(on_gpu(part)) for part in (value[:4], value[4:])])
    for other in (value, value[3:], value[::2]):
        with pytest.raises(InputError, match="arrays 0 and 1 of the group share memory"):
            check_writable([device_arrays.adopt(on_gpu(part)) for part in (value, other)])


def test_the_stream_of_another_framework():
    assert streams.external_stream(4096).ptr == 4096
    assert streams.external_stream(4096) is streams.external_stream(4096)
