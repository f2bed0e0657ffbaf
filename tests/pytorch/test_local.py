"""Mode local with torch: the cases of local_program.py at 2 ranks, 8 s; with --full at 3 ranks too."""

import functools
import pathlib

import optimizer_case_runner as cases
import pytest

from allred import testing

pytest.importorskip("torch")

PROGRAM = pathlib.Path(__file__).with_name("local_program.py")


@functools.cache
def results(ranks):
    env = {"OMP_NUM_THREADS": "1", "ALLRED_MODE": "local", "ALLRED_TIMEOUT_S": "60"}
    result = testing.mpirun(ranks, PROGRAM, env=env, timeout_s=150)
    return cases.results(result.out), result.text


@pytest.mark.parametrize("name", cases.names(PROGRAM))
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.full)])
def test_cases(ranks, name):
    found, text = results(ranks)
    assert found.get(name, f"the job ended before this case:\n{text}") == "ok"
