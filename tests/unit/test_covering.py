"""The default subset of a parametrized test's cases contains every required combination of values."""

import itertools
import os
import pathlib
import re
import subprocess
import sys

import pytest
from covering import covering

SIZES = [(2, 16, 2), (3, 9, 8), (1,), (5,), (1, 1, 4), (2, 3, 4, 5)]


@pytest.mark.parametrize("strength", [1, 2, 3])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_combination_of_so_many_values_occurs(sizes, strength):
    cases = list(itertools.product(*map(range, sizes)))
    kept = [cases[position] for position in covering(cases, strength, "any")]
    for columns in itertools.combinations(range(len(sizes)), min(strength, len(sizes))):
        wanted = {tuple(case[column] for column in columns) for case in cases}
        assert {tuple(case[column] for column in columns) for case in kept} == wanted


def test_one_value_of_each_parameter_takes_as_many_cases_as_the_longest_has_values():
    for sizes in SIZES:
        cases = list(itertools.product(*map(range, sizes)))
        assert len(covering(cases, 1, "any")) == max(sizes)


def test_a_table_with_holes_is_covered_as_far_as_it_goes():
    cases = [(0, 0), (0, 1), (1, 2)]
    assert covering(cases, 1, "any") == [0, 1, 2]
    assert covering([], 1, "any") == []


TESTS = """
import pytest

MPIS = ["mpich", "openmpi"]

@pytest.mark.parametrize("mpi", MPIS)
def test_mpi(mpi): ...

@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize("one", [1])
def test_one_row(mpi, one): ...

@pytest.mark.cover(1)
@pytest.mark.parametrize("mpi", MPIS)
def test_both(mpi): ...

@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize("row", [1, 2, pytest.param(3, marks=pytest.mark.full)])
def test_rows(mpi, row): ...

@pytest.mark.full
def test_full(): ...
"""


def test_what_runs_by_default(tmp_path):
    """Costs 1 s."""
    (tmp_path / "test_it.py").write_text(TESTS)
    default, full = ran(tmp_path), ran(tmp_path, "--full")
    assert {name: len(cases) for name, cases in default.items()} == {
        "test_mpi": 1, "test_one_row": 1, "test_both": 2, "test_rows": 2,
    }  # fmt: skip
    assert {case.partition("-")[0] for case in default["test_rows"]} == {"1", "2"}
    assert {case.partition("-")[2] for case in default["test_rows"]} == {"mpich", "openmpi"}
    assert {name: len(cases) for name, cases in full.items()} == {
        "test_mpi": 2, "test_one_row": 2, "test_both": 2, "test_rows": 6, "test_full": 1,
    }  # fmt: skip


def ran(directory, *options):
    """The cases of each test that pytest selects: {name: [parameters]}."""
    command = [sys.executable, "-m", "pytest", "-p", "covering", "--collect-only", "-q", *options]
    env = {**os.environ, "PYTHONPATH": str(pathlib.Path(covering.__code__.co_filename).parent)}
    result = subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, timeout=60)
    cases = {}
    for name, parameters in re.findall(r"::(test_\w+)(?:\[(.*)\])?$", result.stdout, re.MULTILINE):
        cases.setdefault(name, []).append(parameters)
    return cases
