"""The safety net of tests/parallel: a rank that fails or hangs ends the run, with that rank's traceback."""

import re
import shutil

import pytest
from harness import MPICH_BY_DEFAULT, MPIS, ROOT, mpirun


def pytest_under_mpirun(mpi, tmp_path, test, limit_s, ranks=2):
    for file in ("conftest.py", "covering.py"):
        shutil.copy(ROOT / "tests" / file, tmp_path)
    (tmp_path / "parallel").mkdir()
    shutil.copy(ROOT / "tests/parallel/conftest.py", tmp_path / "parallel")
    marks = f"pytestmark = [pytest.mark.mpi, pytest.mark.limit({limit_s})]"
    beginning = f"import pytest, allred, time\n{marks}\n"
    (tmp_path / "parallel/test_it.py").write_text(beginning + test)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    pytest_ = ["-m", "pytest", "--with-mpi", "--color=no", "parallel"]
    return mpirun(ranks, *pytest_, mpi=mpi, timeout_s=40, cwd=tmp_path)


FAILURES = """
odd = lambda rank: rank != 1
@pytest.fixture
def setup(rank):
    assert odd(rank), "odd in setup"
@pytest.fixture
def teardown(rank):
    yield
    assert odd(rank), "odd in teardown"
def test_alone(rank): assert odd(rank), "odd in the test"
def test_setup(setup): allred.barrier()
def test_teardown(teardown): allred.barrier()
def test_good(): allred.barrier()
"""


@pytest.mark.parametrize("mpi", MPIS)
def test_a_rank_that_fails_alone_in_a_test_or_a_fixture(mpi, tmp_path):
    """No rank goes on to the barrier behind the failure, and all ranks run the next test."""
    result = pytest_under_mpirun(mpi, tmp_path, FAILURES, limit_s=60)
    assert result.code == 1, result.text
    for place in ("the test", "setup", "teardown"):
        assert re.search(rf"--- rank 1\n(?:(?!--- ).*\n)*.*AssertionError: odd in {place}", result.out), result.text
    assert "1 failed, 2 passed" in result.out, result.text
    assert "2 errors" in result.out, result.text


@pytest.mark.parametrize("mpi", MPIS)
def test_a_rank_that_fails_while_the_others_wait_for_it(mpi, tmp_path):
    test = "def test_x(rank):\n    assert rank != 1, 'odd one'\n    allred.barrier()\n"
    result = pytest_under_mpirun(mpi, tmp_path, test, limit_s=30)
    assert result.code != 0, result.text
    assert result.err.count("rank 1 failed while others wait") == 1, result.text  # it ends the job at once
    assert "odd one" in result.err, result.text


@pytest.mark.parametrize("mpi", MPICH_BY_DEFAULT)
def test_a_rank_that_hangs(mpi, tmp_path):
    hangs = "@pytest.mark.limit(2)\ndef test_x(rank):\n    while rank == 1: time.sleep(0.1)\n    allred.barrier()\n"
    test = f"def test_w(): pass  # starts MPI, within another limit\n{hangs}"
    result = pytest_under_mpirun(mpi, tmp_path, test, limit_s=60)
    assert result.code != 0, result.text
    assert "Timeout" in result.err, result.text
    assert 'test_it.py", line 6 in test_x' in result.err, result.text
