"""Reduces parametrized tests to a covering subset: every row of every table occurs, not every combination of rows.

A table is one `@pytest.mark.parametrize` or one parametrized fixture. A test with two tables, mpi (2 rows) and failure
(16 rows), runs 16 times instead of 32. `--full` runs all
combinations; `--full --part 3/10` runs the third of ten parts of them. `@pytest.mark.cover(2)` keeps every pair of
rows of two tables, `@pytest.mark.cover(3)` every triple, and so on.

A test whose only table with more than one row is `mpi` runs under one MPI, chosen by the name of the test;
`@pytest.mark.cover(1)` keeps both. A test or a row with `@pytest.mark.full` runs with `--full` only.
"""

import itertools
import random
import zlib
from collections.abc import Sequence
from typing import Any

MARKERS = (
    "cover(strength): keep all combinations of rows of this many tables of parameters (default 1)",
    "full: run this test, or this row of a table, with --full only",
)


def covering(cases: Sequence[Sequence[Any]], strength: int, seed: str) -> list[int]:
    """The positions of a subset of `cases` that has every combination of `strength` values that `cases` has.

    Greedy: it always takes the case with the most missing combinations. `seed` breaks ties, so that different tests
    combine values differently. Deterministic.

    >>> covering([(mpi, failure) for mpi in range(2) for failure in range(3)], 1, "")
    [0, 2, 4]
    """
    combinations = []
    for case in cases:
        columns = itertools.combinations(range(len(case)), min(strength, len(case)))
        combinations.append({(chosen, tuple(case[column] for column in chosen)) for chosen in columns})
    missing = set().union(*combinations)
    order = list(range(len(cases)))
    random.Random(zlib.crc32(seed.encode())).shuffle(order)
    kept = []
    while missing:
        best = max(order, key=lambda position: len(combinations[position] & missing))
        missing -= combinations[best]
        kept.append(best)
    return sorted(kept)


def pytest_configure(config):
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)


def pytest_addoption(parser):
    group = parser.getgroup("covering")
    group.addoption("--full", action="store_true", help="run all combinations of parameters, not a covering subset")
    group.addoption("--part", metavar="K/N", help="run the K-th of N parts of what was collected")


def pytest_collection_modifyitems(config, items):
    kept = items if config.getoption("--full") else _reduced(items)
    if config.getoption("--part"):
        part, parts = map(int, config.getoption("--part").split("/"))
        kept = [item for item in kept if zlib.crc32(item.nodeid.encode()) % parts == part - 1]
    if len(kept) < len(items):
        keep = set(kept)
        config.hook.pytest_deselected(items=[item for item in items if item not in keep])
        items[:] = kept


def _reduced(items):
    functions: dict[str, list] = {}
    keep = set()
    for item in items:
        if "unit" in item.path.parts:  # cheap: always complete
            keep.add(item)
            continue
        if item.get_closest_marker("full"):
            continue
        functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, group in functions.items():
        if not hasattr(group[0], "callspec"):
            keep.update(group)
            continue
        marker = group[0].get_closest_marker("cover")
        cases = [_rows(item) for item in group]
        strength = marker.args[0] if marker else _default_strength(group)
        keep.update(group[position] for position in covering(cases, strength, name))
    return [item for item in items if item in keep]


def _default_strength(items):
    """0, which keeps one case, if the cases differ in the MPI only; else 1."""
    others = {tuple(id(value) for name, value in item.callspec.params.items() if name != "mpi") for item in items}
    return int(len(others) > 1)


def _rows(item):
    """What identifies the row of each table of parameters that this item uses; a parametrized fixture is a table."""
    params = dict(item.callspec.params)
    rows = []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        rows.append(tuple(id(params.pop(name.strip())) for name in names))
    return [*rows, *map(id, params.values())]
