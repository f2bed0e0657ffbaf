"""The default subset of a parametrized test's cases contains every required combination of values."""

import itertools

import pytest
from covering import covering

SIZES = [(2, 16, 2), (3, 9, 8), (1,), (5,), (1, 1, 4), (2, 3, 4, 5)]


@pytest.mark.parametrize("strength", [1, 2, 3])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_combination_of_that_many_values_occurs(sizes, strength):
    cases = list(itertools.product(*map(range, sizes)))
    kept = [cases[position] for position in covering(cases, strength, "any")]
    for columns in itertools.combinations(range(len(sizes)), min(strength, len(sizes))):
        wanted = {tuple(case[column] for column in columns) for case in cases}
        assert {tuple(case[column] for column in columns) for case in kept} == wanted


def test_one_value_of_each_parameter_takes_as_many_cases_as_the_longest_has_values():
    for sizes in SIZES:
        cases = list(itertools.product(*map(range, sizes)))
        assert len(covering(cases, 1, "any")) == max(sizes)


def test_a_table_with_missing_combinations_is_covered_where_possible():
    cases = [(0, 0), (0, 1), (1, 2)]
    assert covering(cases, 1, "any") == [0, 1, 2]
    assert covering([], 1, "any") == []
