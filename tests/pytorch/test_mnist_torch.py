"""examples/mnist_torch.py on CPUs: two ranks learn what one learns. On GPUs it is run by `make test-gpu`."""

import pathlib
import re

import pytest

from allred import testing

pytest.importorskip("torch")

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples/mnist_torch.py"


def test_it_learns():
    result = testing.mpirun(2, str(EXAMPLE), "--steps", "40", timeout_s=120)
    assert result.code == 0, result.text
    assert re.search(r"^\d+ examples/s on 2 ranks, on cpu\nparameters equal on all ranks: yes", result.out, re.M)
    assert float(re.search(r"test accuracy: (\S+)", result.out)[1]) > 0.7, result.text
