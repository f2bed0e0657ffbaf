"""Sessions with torch modules, optimizers, schedules and loaders: session_torch_program.py, in one job of 2 ranks,
which takes about 16 s of CPU time."""

import functools
import pathlib

import optimizer_case_runner as cases
import pytest

from allred import testing

pytest.importorskip("torch")

PROGRAM = pathlib.Path(__file__).with_name("session_torch_program.py")


@functools.cache
def results(directory):
    env = {"OMP_NUM_THREADS": "1", "ALLRED_TIMEOUT_S": "200"}
    result = testing.mpirun(2, PROGRAM, directory, env=env, timeout_s=280)
    return cases.results(result.out), result.text


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("sessions")


@pytest.mark.limit(300)
@pytest.mark.parametrize("name", cases.names(PROGRAM))
def test_sessions(name, directory):
    found, text = results(directory)
    assert found.get(name, f"the job ended before this case:\n{text}") == "ok"
