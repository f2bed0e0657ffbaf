"""`allred.torch.Embedding` and `EmbeddingBag`: in mode sync, and on parameter servers with the policy sync."""

import pathlib
import re

import pytest

from allred import testing

HERE = pathlib.Path(__file__).parent
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "ALLRED_BANNER": "0"}


@pytest.mark.parametrize(
    ("ranks", "mode"), [(2, "sync"), (3, "ps"), *(pytest.param(n, "sync", marks=pytest.mark.full) for n in (1, 3))]
)
def test_modules_give_the_results_of_torch_on_one_process(ranks, mode):
    env = {**ENVIRONMENT, "ALLRED_MODE": mode, "ALLRED_CONSISTENCY": "sync"}
    result = testing.mpirun(ranks, HERE / "embedding_program.py", env=env, timeout_s=60)
    assert result.code == 0, result.text
    difference, again = map(float, result.out.split())
    assert difference < 1e-6, result.text
    assert again < 1e-6, result.text


def test_the_example():
    program = HERE.parents[1] / "examples/click_through_torch.py"
    result = testing.mpirun(3, program, env={**ENVIRONMENT, "ALLRED_MODE": "ps"}, timeout_s=60)
    assert result.code == 0, result.text
    found = re.fullmatch(r"AUC (0\.\d{3}) after 150 steps of 2 workers\n", result.out)
    assert found, result.text
    assert float(found[1]) > 0.83, result.text
