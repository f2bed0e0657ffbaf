"""A session that no with statement ends writes its last checkpoint, however the program ends."""

import pathlib

import pytest
from harness import mpirun, python

from allred import checkpoint

PROGRAM = pathlib.Path(__file__).with_name("supervisor_program.py")


@pytest.mark.parametrize(
    ("way", "mode", "mpi", "code", "steps"),
    [
        # by default in test_the_ranks_may_end_at_different_times
        pytest.param("end", "sync", "mpich", 0, {6}, marks=pytest.mark.full),
        pytest.param("exit 3", "sync", "mpich", 3, {3}, marks=pytest.mark.full),
        ("SIGTERM", "sync", "mpich", 0, {4}),
        ("raise, then stop", "sync", "mpich", 1, {3}),
        pytest.param("raise", "sync", "openmpi", 1, {3}, marks=pytest.mark.full),
        ("end", "ps", "mpich", 0, {12}),  # six of each worker
        pytest.param("exit 3", "ps", "mpich", 3, {3}, marks=pytest.mark.full),  # one worker
    ],
)
def test_the_last_checkpoint_is_written(way, mode, mpi, code, steps, tmp_path):
    env = {"ALLRED_MODE": mode, "ALLRED_CHECK_STEPS": "0"}
    result = mpirun(2 + (mode == "ps" and way == "end"), PROGRAM, tmp_path, way, mpi=mpi, env=env)
    assert result.code == code, result.text
    [path] = checkpoint.list_complete(tmp_path)
    assert checkpoint.read_manifest(path).step in steps, result.text
    assert "MismatchError" not in result.err, result.text


STOP = """
import sys, time
import numpy as np
import allred
from allred.compat import tf1
allred.init(banner=False)
w, made = np.zeros(3), 0
opt = allred.distributed(allred.optim.SGD(lr=1.0))
supervisor = tf1.Supervisor(logdir=sys.argv[1], save_summaries_secs=0, params=[w], optimizer=opt)
with supervisor.managed_session() as session:
    while not supervisor.should_stop():
        if made == 3 and allred.rank() == 1:
            supervisor.request_stop()
        while made == 3 and allred.rank() == 0 and not allred.checkpoint.list_complete(sys.argv[1]):
            time.sleep(0.01)  # so that this update follows the checkpoint that the other worker requests
        opt.step([w], [np.ones(3)])
        made += 1
print("ended at", session.step, w[0], flush=True)
"""


def test_the_last_checkpoint_has_updates_that_follow_a_stop_request(tmp_path):
    """Of another worker, in mode ps with policy async."""
    result = mpirun(3, "-c", STOP, tmp_path, env={"ALLRED_MODE": "ps", "ALLRED_CHECK_STEPS": "0"})
    assert result.code == 0, result.text
    newest = checkpoint.newest(tmp_path)
    step = checkpoint.read_manifest(newest).step
    assert result.out.splitlines() == [f"ended at {step} {-float(step)}"] * 2, result.text
    assert (checkpoint.read_checkpoint(newest).params["0"] == -step).all()


@pytest.mark.parametrize(
    ("way", "code", "step"),
    [("raise", 1, 3), *(pytest.param(*each, marks=pytest.mark.full) for each in [("exit 3", 3, 3), ("end", 0, 6)])],
)
def test_of_one_process(way, code, step, tmp_path):
    result = python(PROGRAM, tmp_path, way)
    assert result.code == code, result.text
    assert [path.name for path in checkpoint.list_complete(tmp_path)] == [f"step-{step:08d}"], result.text


def test_the_ranks_may_end_at_different_times(tmp_path):
    """The end of one rank's program waits for the other without a time limit."""
    late = """
import time
from allred.comm import functions
functions.current().queue.timeout_s = 0.5
time.sleep(2 * allred.is_chief())
"""
    program = PROGRAM.read_text() + late
    result = mpirun(2, "-c", program, tmp_path, "end", env={"ALLRED_CHECK_STEPS": "0"})
    assert (result.code, result.err) == (0, ""), result.text
    assert [path.name for path in checkpoint.list_complete(tmp_path)] == ["step-00000006"]
