"""A failure while ranks are in a graph of TensorFlow: all ranks end soon, and the cause is named once."""

import pathlib
import re

import pytest

from allred import testing

pytest.importorskip("tensorflow")

PROGRAM = pathlib.Path(__file__).with_name("tensorflow_failures_program.py")
ENV = {"OMP_NUM_THREADS": "1", "KERAS_BACKEND": "tensorflow"}


def run(*arguments, **env):
    return testing.mpirun(2, PROGRAM, *arguments, env={**ENV, **env}, timeout_s=90)


@pytest.mark.full
def test_a_difference_between_ranks_is_shown_as_an_error_of_allred():
    result = run("mismatch")
    assert result.code != 0
    assert "MismatchError: ranks called different operations: allreduce(Average) 'allreduce 1" in result.text, (
        result.text
    )
    assert "Graph execution error" not in result.text, result.text


@pytest.mark.parametrize(
    ("failure", "text"),
    [
        pytest.param("killed", "rank 1 on .* was killed by signal 9", marks=pytest.mark.full),
        pytest.param("raises", "ArithmeticError: the reason", marks=pytest.mark.full),
    ],
)
def test_a_rank_that_fails_is_named(failure, text):
    result = run(failure)
    assert result.code != 0
    assert re.search(text, result.text), result.text


@pytest.mark.full
def test_a_wait_has_the_time_limit():
    result = run("late", ALLRED_TIMEOUT_S="2")
    assert result.code != 0
    assert "CollectiveTimeout: opt.step()" in result.text, result.text


def test_ctrl_c_ends_a_wait():
    result = run("interrupted")
    assert result.code != 0
    assert "KeyboardInterrupt in the program" in result.text, result.text


def test_sigterm_ends_training_within_an_epoch_that_begins_again(tmp_path):
    for step in (3, 6):  # the second job is stopped in the same epoch
        result = run("terminated", tmp_path)
        assert result.code == 0, result.text
        assert [line for line in result.out.splitlines() if line] == [f"epoch 0, step {step}"] * 2, result.text
