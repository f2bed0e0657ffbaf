import ml_dtypes
import numpy as np
import pytest

from allred import arrays
from allred.errors import InputError


def test_codes_are_unique_and_stable():
    dtypes = [ml_dtypes.bfloat16 if name == "bfloat16" else name for name in arrays.DTYPES]
    assert [arrays.dtype_code(np.dtype(d)) for d in dtypes] == list(range(len(arrays.DTYPES)))
    assert arrays.DTYPES.index("float32") == 8  # a code is written on the wire: only append


@pytest.mark.parametrize("dtype", ["longdouble", "U3", "M8[s]", "f4,i4", "O"])
def test_other_dtypes_are_refused_by_name(dtype):
    with pytest.raises(InputError, match=r"cannot be reduced; use one of bool, uint8"):
        arrays.dtype_code(np.dtype(dtype))


def test_what_can_be_copied():
    for dtype in ("longdouble", "U3", "S1", "M8[s]", "f4,i4", [("name", "S3"), ("xy", ">f8", (2,))]):
        assert arrays.copied_code(np.dtype(dtype)) == arrays.OTHER_DTYPE
    assert arrays.copied_code(np.dtype("complex64")) == arrays.DTYPES.index("complex64")
    for dtype in ("O", [("name", "O")], "V0"):
        with pytest.raises(InputError, match="holds Python objects or no bytes; use broadcast_object"):
            arrays.copied_code(np.dtype(dtype))


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
@pytest.mark.parametrize("key", [(0, 0), np.s_[:0], np.s_[:], np.s_[::2, ::-3]], ids=str)
@pytest.mark.parametrize("order", ["C", "F"])
def test_complex_numbers_as_real_ones(dtype, key, order):
    numbers = np.zeros((4, 6), dtype, order)[key] if key != (0, 0) else np.zeros((), dtype)
    real = arrays.view_as_real(numbers)
    assert real.shape == (*numbers.shape, 2)
    real[..., 0], real[..., 1] = 3, -4
    assert (numbers == 3 - 4j).all()
    assert np.shares_memory(real, numbers) == (numbers.size > 0)
    back = arrays.view_as_complex(real.copy())
    assert back.dtype == numbers.dtype
    np.testing.assert_array_equal(back, numbers)


def test_byte_swapped_arrays_are_refused_with_the_remedy():
    with pytest.raises(InputError, match=r"byte-swapped; convert it with array.astype"):
        arrays.dtype_code(np.dtype(">f4"))


def test_what_lives_elsewhere_is_refused_with_the_remedy():
    class OnDevice:
        __cuda_array_interface__ = {}  # noqa: RUF012

    with pytest.raises(InputError, match="is on a GPU"):
        arrays.as_host_array(OnDevice())
    tensor = type("Tensor", (), {"__module__": "torch"})()
    with pytest.raises(InputError, match=r"tensor.detach\(\).numpy\(\)"):
        arrays.as_host_array(tensor)
    with pytest.raises(InputError, match="expected an array or a number, got object"):
        arrays.as_host_array(object())


def test_arrays_are_not_copied():
    x = np.zeros(3)
    assert arrays.as_host_array(x) is x
    assert np.shares_memory(arrays.as_bytes(x), x)


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (5,), (2, 3)])
def test_bytes_of_any_shape(shape):
    x = np.ones(shape, ml_dtypes.bfloat16)
    assert arrays.as_bytes(x).shape == (x.nbytes,)


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
@pytest.mark.parametrize("total", [0, 1, 2, 6, 7, 100, 1437])
def test_split_sizes_is_numpys_rule(total, parts):
    assert arrays.split_sizes(total, parts) == [len(part) for part in np.array_split(np.arange(total), parts)]
