"""The examples with torch, as their first lines say. Each job takes about 7 s of CPU time, the import of torch."""

import pathlib
import re

import pytest

from allred import testing

pytest.importorskip("torch")

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


@pytest.mark.limit(300)
@pytest.mark.parametrize(
    ("name", "ranks", "mode"),
    [
        ("torch_digits", 2, "sync"),
        ("torch_ps", 3, "ps"),
        pytest.param("torch_digits", 1, "sync", marks=pytest.mark.full),
        pytest.param("torch_ps", 2, "sync", marks=pytest.mark.full),
    ],
)
def test_it_learns(name, ranks, mode):
    env = {"ALLRED_MODE": mode, "OMP_NUM_THREADS": "1"}
    result = testing.mpirun(ranks, EXAMPLES / f"{name}.py", env=env, timeout_s=280)
    assert result.code == 0, result.text
    accuracy = re.fullmatch(r"test accuracy: (0\.\d{3})", result.out.splitlines()[-1])
    assert accuracy, result.text
    assert float(accuracy[1]) > 0.9
