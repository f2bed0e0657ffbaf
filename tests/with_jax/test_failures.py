"""A failure while ranks are in a program of JAX: all ranks end soon, and the cause is named once."""

import pathlib
import re
import sys

import pytest

from allred import testing

pytest.importorskip("jax")

PROGRAM = pathlib.Path(__file__).with_name("failures_program.py")
ENV = {"OMP_NUM_THREADS": "1"}


def run(failure, **env):
    return testing.mpirun(2, PROGRAM, failure, env={**ENV, **env}, timeout_s=90)


def test_a_difference_between_ranks_is_shown_as_an_error_of_allred_at_the_line_of_the_program():
    result = run("mismatch")
    assert result.code != 0
    assert "allred.errors.MismatchError: grouped_allreduce(Average) 'loss (jit_program, operation 1)'" in result.text
    assert "JaxRuntimeError" not in result.text
    assert "program(jnp.ones(3 + RANK))" in result.text


@pytest.mark.parametrize(
    ("failure", "text"), [("killed", "rank 1 on .* was killed by signal 9"), ("raises", "ArithmeticError: the reason")]
)
def test_a_rank_that_fails_is_named(failure, text):
    result = run(failure)
    assert result.code != 0
    assert re.search(text, result.text), result.text
    assert result.text.count("Traceback") == (failure == "raises"), result.text


def test_a_wait_has_the_time_limit():
    result = run("late", ALLRED_TIMEOUT_S="2")
    assert result.code != 0
    assert "CollectiveTimeout: grouped_allreduce(Average) #2 'loss (jit_program, operation 1)'" in result.text


@pytest.mark.parametrize("where", ["interrupted", "interrupted in a loop"])
def test_ctrl_c_ends_a_wait(where):
    result = run(where)
    assert result.code != 0
    assert "KeyboardInterrupt in the program" in result.text


def test_ctrl_c_ends_a_session_after_the_step():
    result = run("interrupted in a session")
    assert (result.code, result.out) == (0, "stopped at step 3\n" * 2), result.text


LATE = "jax.numpy.ones(2).sum(); import allred.jax; print('imported')"


def test_an_import_after_the_first_computation_is_refused():
    result = testing.run([sys.executable, "-c", f"import jax; {LATE}"], 60, ENV)
    assert result.code == 1
    assert "allred.errors.InputError: allred.jax must be imported before the first computation" in result.text
    setting = 'jax.config.update("jax_cpu_enable_async_dispatch", False)'
    assert setting in result.text
    result = testing.run([sys.executable, "-c", f"import jax; {setting}; {LATE}"], 60, ENV)
    assert result.out == "imported\n", result.text
