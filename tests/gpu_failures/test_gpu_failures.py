"""What starts its own mpirun on a GPU (`make test-gpu`): a rank that ends or stops never leaves the others in a kernel;
mode ps."""

import os
import pathlib

import pytest

from allred import testing

PROGRAM = pathlib.Path(__file__).with_name("failing_program.py")
PS_PROGRAM = pathlib.Path(__file__).parents[1] / "integration/ps_gpu_program.py"


def test_mode_ps_through_pinned_memory():
    env = {**os.environ, "ALLRED_MODE": "ps", "ALLRED_BACKEND": "nccl"}
    result = testing.mpirun(2, str(PS_PROGRAM), "cupy", timeout_s=120, env=env)
    assert result.code == 0, result.text
    assert "the same" in result.out


@pytest.mark.limit(170)
@pytest.mark.parametrize(("signal", "words"), [("SIGKILL", "killed by signal 9"), ("SIGSTOP", "stopped")])
def test_the_job_ends_with_words(signal, words):
    env = {**os.environ, "ALLRED_GPU_OVERSUBSCRIBE": "1", "ALLRED_STALL_WARNING_S": "3"}
    result = testing.mpirun(2, str(PROGRAM), signal, timeout_s=120, env=env)
    assert result.code != 0, result.text
    assert words in result.text
    assert result.left == [], result.text
