"""The Grid Engine of the tests, and the modules that they share with other tiers.

.venv/bin/python -m pytest tests/sge          skips, with the reason, if Grid Engine or root is missing
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS / "integration"), str(TESTS / "slurm")]

import cell  # noqa: E402


@pytest.fixture(scope="session")
def grid_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[cell.Cell]:
    if reason := cell.why_not():
        pytest.skip(reason)
    with cell.private_cell(tmp_path_factory.mktemp("sge")) as running:
        yield running
