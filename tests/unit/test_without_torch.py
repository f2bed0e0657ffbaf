"""Where torch is missing, errors name the extra."""

import importlib
import pathlib
import runpy
import sys
import traceback

import pytest

import allred

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def without_torch(monkeypatch):
    """`import torch` raises ModuleNotFoundError."""
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in [name for name in sys.modules if name.startswith("allred.torch")]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize("name", ["allred.torch", "allred.torch.process_group", "allred.torch.hooked_optimizer"])
def test_import(name):
    with pytest.raises(ModuleNotFoundError, match=r"allred\.torch needs PyTorch.*: pip install torch ml_dtypes "):
        importlib.import_module(name)


@pytest.mark.parametrize("name", ["torch_digits", "torch_ddp", "torch_ps"])
def test_examples_name_the_extra(name):
    with pytest.raises(ModuleNotFoundError) as caught:
        runpy.run_path(str(EXAMPLES / f"{name}.py"))
    lines = traceback.format_exception(caught.value)
    assert "import torch  # pip install torch; the CPU build: docs/install.md" in lines[-2]


def test_distributed_does_not_import_torch():
    with pytest.raises(TypeError, match=r"allred.distributed cannot wrap 'adam'"):
        allred.distributed("adam")
