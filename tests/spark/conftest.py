"""A Spark of four slots in this process, for all tests of this tier.

.venv/bin/python -m pytest tests/spark          skips, with the reason, if Java or pyspark is missing
"""

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS / "integration")]

pytest.importorskip("pyspark", reason="pip install 'allred[spark]'")
if shutil.which("java") is None:
    pytest.skip("Spark needs Java: apt-get install openjdk-17-jre-headless", allow_module_level=True)

from spark_session import ENVIRONMENT, build  # noqa: E402


@pytest.fixture(scope="session")
def spark() -> Iterator[object]:
    """The session."""
    os.environ.update(ENVIRONMENT)
    session = build("local[4]")
    yield session
    session.stop()


@pytest.fixture(scope="session")
def sc(spark):
    """Its SparkContext."""
    return spark.sparkContext
