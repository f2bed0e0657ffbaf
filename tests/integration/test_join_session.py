"""Uneven data in a session: the last checkpoint contains the updates of the rank that joined last."""

import pathlib

import pytest
from harness import mpirun, python

from allred import checkpoint

PROGRAM = pathlib.Path(__file__).with_name("join_program.py")


@pytest.mark.parametrize(
    ("mode", "ranks", "broadcasts", "fails", "breaks", "step"),
    [
        ("sync", 2, 1, 0, 0, 5),
        ("sync", 3, 0, 0, 0, 7),
        ("sync", 2, 0, 0, 1, 5),  # the chief must not write what it had before
        ("sync", 2, 0, 1, 0, 5),  # the chief fails after all have joined
        ("ps", 3, 0, 0, 0, 8),  # updates of both workers
    ],
)
def test_the_rank_that_joins_last_writes_a_checkpoint(mode, ranks, broadcasts, fails, breaks, step, tmp_path):
    env = {"ALLRED_MODE": mode, "ALLRED_CHECK_STEPS": "0"}
    result = mpirun(ranks, PROGRAM, tmp_path, broadcasts, fails, breaks, env=env)
    assert result.code == fails, result.text
    assert str(checkpoint.newest(tmp_path)) == str(tmp_path / f"step-{step:08d}"), result.text
    assert not breaks or len(list(tmp_path.glob("step-*"))) == 1, result.text
    again = python(PROGRAM, tmp_path, 0, 0, 0)
    assert f"from step {step} with {-step}.0\n" in again.out, again.text
