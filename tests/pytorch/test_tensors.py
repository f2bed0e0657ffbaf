"""Tensors as numpy arrays: values, layouts, dtypes, lifetime, and what torch's own .numpy() forbids."""

import gc

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from allred import arrays  # noqa: E402
from allred.errors import InputError  # noqa: E402
from allred.torch.tensors import as_array, as_raw_array, as_tensor, copy_to_tensor  # noqa: E402


@pytest.mark.parametrize("name", arrays.DTYPES)
def test_every_dtype_is_the_same_memory(name):
    tensor = torch.ones(2, 3, dtype=getattr(torch, name))
    array = as_array(tensor)
    assert (array.dtype.name, array.shape, array.flags.writeable) == (name, (2, 3), True)
    array[1, 2] = 0
    assert tensor[1, 2] == 0
    assert tensor.sum() == 5


@pytest.mark.parametrize(
    "view",
    [lambda t: t.T, lambda t: t[:, 1:3], lambda t: t[2, 3], lambda t: t[1:1], lambda t: t.expand(2, 4, 5)],
    ids=["transposed", "columns", "0-d", "empty", "expanded"],
)
def test_layouts(view):
    tensor = view(torch.arange(20.0).reshape(4, 5))
    array = as_array(tensor)
    assert array.shape == tuple(tensor.shape)
    assert array.tolist() == tensor.tolist()


def test_a_tensor_that_requires_a_gradient():
    parameter = torch.nn.Parameter(torch.zeros(3))
    as_array(parameter)[:] = 2
    assert parameter.tolist() == [2, 2, 2]


def test_the_storage_can_be_resized():
    tensor = torch.full((3,), 2.0)
    assert as_array(tensor).tolist() == [2, 2, 2]
    tensor.untyped_storage().resize_(0)  # .numpy() would forbid it


def test_the_array_keeps_the_memory():
    array = as_array(torch.full((1 << 20,), 7.0))
    gc.collect()
    torch.zeros(1 << 20)
    assert (array == 7).all()


def test_bfloat16():
    tensor = torch.tensor([1.5, -2])
    assert as_array(tensor.bfloat16()).dtype == ml_dtypes.bfloat16
    assert as_array(tensor.bfloat16()).astype(np.float32).tolist() == [1.5, -2]


def test_bfloat16_without_ml_dtypes(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ml_dtypes", None)
    tensor = torch.ones(2, dtype=torch.bfloat16)
    with pytest.raises(InputError, match="pip install ml_dtypes"):
        as_array(tensor)
    assert as_raw_array(tensor).tolist() == [0x3F80, 0x3F80]


@pytest.mark.parametrize("dtype", [torch.uint16, torch.float8_e4m3fn, torch.complex64, torch.complex128, torch.float32])
def test_any_dtype_can_be_moved(dtype):
    source = torch.arange(6).to(torch.float32).to(dtype).reshape(2, 3)
    target = torch.zeros_like(source)
    as_raw_array(target)[...] = as_raw_array(source)
    arrays.dtype_code(as_raw_array(source).dtype)
    assert torch.equal(target.view(torch.uint8), source.view(torch.uint8))


@pytest.mark.parametrize("name", arrays.DTYPES)
def test_tensors_of_arrays(name):
    """A tensor that shares the memory of an array, and one with a copy of it."""
    array = np.ones((2, 3), arrays.dtype_of(name))
    shared, copied, empty = as_tensor(array), copy_to_tensor(array.T), copy_to_tensor(array[:0])
    array[1, 2] = 0
    assert (shared.dtype, copied.dtype) == (getattr(torch, name),) * 2
    assert (shared[1, 2], copied[2, 1]) == (0, 1)
    assert (tuple(copied.shape), tuple(empty.shape)) == ((3, 2), (0, 3))
    copied.untyped_storage().resize_(0)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (lambda: np.zeros(2), "expected a torch.Tensor, got ndarray"),
        (lambda: torch.zeros(2, device="meta"), "expected a tensor on the CPU, got one on meta"),
        (lambda: torch.eye(2).to_sparse(), "got a sparse_coo one"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 1, 0, torch.qint8), "got a quantized one"),
        (lambda: torch.ones(2, dtype=torch.complex64).conj(), "resolve_conj"),
        (lambda: torch.ones(2).to(torch.float8_e4m3fn), "dtype torch.float8_e4m3fn is not supported; use one of bool"),
    ],
    ids=["numpy", "meta", "sparse", "quantized", "conjugate", "float8"],
)
@pytest.mark.filterwarnings("ignore")
def test_unsupported_tensors_are_errors(value, words):
    with pytest.raises(InputError, match=words):
        as_array(value())
