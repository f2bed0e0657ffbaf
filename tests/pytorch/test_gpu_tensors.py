"""Conversion of torch tensors to device arrays, with CPU tensors and a fake cupy. On a GPU: tests/gpu."""

import pathlib
import sys

import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "unit"))

import fake_cupy

from allred.errors import InputError
from allred.gpu import device_arrays

torch = pytest.importorskip("torch")

NAMES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")


@pytest.fixture(autouse=True)
def cupy(monkeypatch):
    made = fake_cupy.module()
    for name, module in {"cupy": made, "cupy.cuda": made.cuda}.items():
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("layout", [np.s_[:], np.s_[:, ::2], np.s_[1:1], np.s_[2, 3]])
@pytest.mark.parametrize("name", NAMES)
def test_dtypes_and_strides_are_kept(name, layout):
    tensor = torch.arange(24).reshape(4, 6).to(getattr(torch, name))[layout]
    found = device_arrays._from_torch(torch, tensor)
    assert (found.dtype.name, found.shape, found.writable) == (name, tuple(tensor.shape), True)
    same = tensor.view(torch.int16).numpy().view(np.uint16) if name == "bfloat16" else tensor.numpy()
    np.testing.assert_array_equal(found.array, same, strict=True)
    assert np.shares_memory(found.array, same) or not tensor.numel()
    back = found.to_caller(np.array(found.array))
    assert back.dtype is tensor.dtype
    assert torch.equal(back, tensor)
    other = found.convert(np.array([1.5], np.float32), np.dtype(np.float32))
    assert torch.equal(other, torch.tensor([1.5]))


def test_stream_function_is_shared():
    one, other = (device_arrays._from_torch(torch, torch.ones(n)) for n in (1, 2))
    assert one.stream is other.stream


def test_unsupported_dtype_is_an_error():
    with pytest.raises(InputError, match=r"torch.quint8 is not supported; use one of bool, uint8"):
        device_arrays._numpy_dtype(torch.quint8)


def test_equal_layouts():
    tensor = torch.arange(24.0).reshape(4, 6)
    here = device_arrays.layouts([tensor])
    assert here == device_arrays.layouts([tensor.detach()]) == device_arrays.layouts([tensor.view(4, 6)])
    others = [tensor.view(6, 4), tensor[:, ::2], tensor[1:], tensor.view(torch.int32), tensor.clone(), tensor.T]
    for other in others:
        assert device_arrays.layouts([other]) != here
    assert device_arrays.layouts([tensor, np.ones(3)]) is None
    assert device_arrays.layouts([]) is None
