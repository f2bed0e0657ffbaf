"""The safety net of tests/parallel: a rank that fails or hangs ends the run, with that rank's traceback."""

import shutil

import pytest
from harness import ROOT, mpirun

MPIS = ["mpich", "openmpi"]


def pytest_under_mpirun(mpi, tmp_path, test, limit_s=3, ranks=2):
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


@pytest.mark.parametrize("mpi", MPIS)
def test_a_rank_that_fails_alone(mpi, tmp_path):
    result = pytest_under_mpirun(
        mpi, tmp_path, "def test_x(rank):\n    assert rank != 2, 'odd one'\ndef test_y(): pass\n", ranks=3
    )
    assert result.code == 1, result.text
    assert "--- rank 2" in result.out, result.text
    assert "AssertionError: odd one" in result.out, result.text
    assert "1 failed, 1 passed" in result.out, result.text


@pytest.mark.parametrize("phase", ["setup", "teardown"])
def test_a_rank_that_fails_in_a_fixture(phase, tmp_path):
    odd = "assert rank != 1, 'odd one'"
    before, after = (odd, "") if phase == "setup" else ("", odd)
    fixture = f"@pytest.fixture\ndef odd(rank):\n    {before}\n    yield\n    {after}\n"
    test = f"{fixture}def test_x(odd): allred.barrier()\ndef test_y(): pass\n"
    result = pytest_under_mpirun("mpich", tmp_path, test, limit_s=30)
    assert result.code != 0, result.text
    assert "odd one" in result.text, result.text
    assert "rank 1" in result.text, result.text


@pytest.mark.parametrize("mpi", MPIS)
def test_a_rank_that_fails_while_the_others_wait_for_it(mpi, tmp_path):
    test = "def test_x(rank):\n    assert rank != 1, 'odd one'\n    allred.barrier()\n"
    result = pytest_under_mpirun(mpi, tmp_path, test, limit_s=30)
    assert result.code != 0, result.text
    assert "rank 1 failed while others wait" in result.err, result.text
    assert "odd one" in result.err, result.text


@pytest.mark.parametrize("mpi", MPIS)
def test_a_rank_that_hangs(mpi, tmp_path):
    test = "def test_x(rank):\n    while rank == 1: time.sleep(0.1)\n    allred.barrier()\n"
    result = pytest_under_mpirun(mpi, tmp_path, test)
    assert result.code != 0, result.text
    assert "Timeout" in result.err, result.text
    assert 'test_it.py", line 4 in test_x' in result.err, result.text
