"""Tests for a machine with a GPU, run by all ranks of an mpirun: `make test-gpu`. What cannot be tested is a failure.

They need cupy with NCCL, torch with CUDA, mpi4py and pytest; two ranks share the GPU where there is but one.
"""

import importlib.util
import os
import pathlib

import pytest

_PARALLEL = pathlib.Path(__file__).parents[1] / "parallel/conftest.py"
_spec = importlib.util.spec_from_file_location("parallel_conftest", _PARALLEL)
_parallel = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_parallel)
pytest_runtest_makereport = _parallel.pytest_runtest_makereport  # the outcome of a test is the same on all ranks


@pytest.hookimpl(trylast=True)  # after the reporter of pytest, which the next line needs
def pytest_configure(config):
    _parallel.pytest_configure(config)
    config.addinivalue_line("markers", "mpi: for all ranks of an mpirun")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    """A skip is a failure here."""
    try:
        return (yield)
    except pytest.skip.Exception as skipped:
        pytest.fail(f"skipped on a machine for GPU tests: {skipped}")


@pytest.fixture(scope="session", autouse=True)
def world():
    os.environ.setdefault("ALLRED_GPU_OVERSUBSCRIBE", "1")
    import allred

    allred.init(backend="nccl")
    yield
    allred.shutdown()
