"""A Spark of four slots in this process, for all tests of this tier.

    .venv/bin/python -m pytest tests/spark      skips, with the reason, if Java or pyspark is missing

Other tiers do not need them.
"""

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS / "integration")]

pytest.importorskip("pyspark", reason="pip install pyspark pyarrow 'pandas<3' cloudpickle")
if shutil.which("java") is None:
    pytest.skip("Spark needs Java: apt-get install openjdk-17-jre-headless", allow_module_level=True)

from spark_session import build  # noqa: E402


@pytest.fixture(scope="session")
def spark(tmp_path_factory) -> Iterator[object]:
    """The session. Its processes have a TMPDIR of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("t")))
        patch.setattr(tempfile, "tempdir", None)
        session = build("local[4]")
        yield session
        session.stop()


@pytest.fixture(scope="session")
def sc(spark):
    """Its SparkContext."""
    return spark.sparkContext
