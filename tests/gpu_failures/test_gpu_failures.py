"""A rank that ends or stops never leaves the others in a kernel: it starts its own mpirun (`make test-gpu`)."""

import os
import pathlib

import pytest

from allred import testing

PROGRAM = pathlib.Path(__file__).with_name("failing_program.py")


@pytest.mark.limit(170)
@pytest.mark.parametrize(("signal", "words"), [("SIGKILL", "killed by signal 9"), ("SIGSTOP", "stopped")])
def test_the_job_ends_with_words(signal, words):
    env = {**os.environ, "ALLRED_GPU_OVERSUBSCRIBE": "1", "ALLRED_STALL_WARNING_S": "3"}
    result = testing.mpirun(2, str(PROGRAM), signal, timeout_s=120, env=env)
    assert result.code != 0, result.text
    assert words in result.text
    assert result.left == [], result.text
