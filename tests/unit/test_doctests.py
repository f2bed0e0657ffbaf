"""The examples in docstrings say what really happens."""

import doctest
import importlib
import pkgutil

import pytest

import allred

MODULES = [
    m.name for m in pkgutil.walk_packages(allred.__path__, "allred.") if not m.name.endswith(("__main__", "._kernels"))
]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    if name.startswith(("allred.torch", "allred.bench.torch")):
        pytest.importorskip("torch")
    if name.startswith("allred.jax"):
        pytest.importorskip("optax")
    if name.startswith(("allred.tensorflow", "allred.keras", "allred.compat.horovod_")):
        pytest.importorskip("tensorflow")
    if name.startswith("allred.spark"):
        pytest.importorskip("pyarrow")
    assert doctest.testmod(importlib.import_module(name)).failed == 0
