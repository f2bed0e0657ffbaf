"""Uneven data in a session: the last checkpoint contains the updates of the rank that joined last."""

import pathlib

import pytest
from harness import mpirun, python

from allred import checkpoint

PROGRAM = pathlib.Path(__file__).with_name("join_program.py")

RESTORE = """
import sys
import numpy as np
import allred

allred.init(banner=False)
for directory in sys.argv[1:]:
    w = np.zeros(3)
    with allred.Session(directory) as session:
        print(session.track(params=[w], optimizer=allred.distributed(allred.optim.SGD(lr=1.0))), w[0])
"""


@pytest.mark.parametrize(
    ("mode", "ranks", "trainings", "step"),
    [
        # 001: the chief must not write what it had before; 010: the chief fails after all have joined
        ("sync", 3, ["100", "000", "001", "010"], 7),
        pytest.param("ps", 3, ["000"], 8, marks=pytest.mark.full),  # updates of both workers
    ],
)
def test_the_rank_that_joins_last_writes_a_checkpoint(mode, ranks, trainings, step, tmp_path):
    env = {"ALLRED_MODE": mode, "ALLRED_CHECK_STEPS": "0"}
    result = mpirun(ranks, PROGRAM, tmp_path, *trainings, env=env)
    assert result.code == ("010" in trainings), result.text
    for digits in trainings:
        newest = checkpoint.newest(tmp_path / digits)
        assert str(newest) == str(tmp_path / digits / f"step-{step:08d}"), result.text
        assert digits != "001" or len(list((tmp_path / digits).glob("step-*"))) == 1, result.text
    again = python("-c", RESTORE, *(tmp_path / digits for digits in trainings))
    assert again.out == f"{step} {-step}.0\n" * len(trainings), again.text
