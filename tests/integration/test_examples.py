"""Every example, run as its first lines say, ends in the lines it promises."""

import re

import pytest
from harness import ROOT, mpirun, python

DIGITS = ROOT / "examples/digits_sync.py"


def check_digits(result, ranks):
    assert result.code == 0, result.text
    lines = result.out.strip().split("\n")
    assert f"world: {ranks} rank" in result.out, result.text
    assert re.search(r"backend: \w+ \(.+\)", result.out), result.text
    assert re.search(r"examples/s over all ranks; of a step \d+ % communicating, \d+ % waiting", result.out), (
        result.text
    )
    assert re.fullmatch(r"parameters equal on all ranks: yes \(hash [0-9a-f]{12}\)", lines[-3]), result.text
    assert re.fullmatch(r"same as one rank on the global batch: yes \(max difference \d\.\de[-+]\d\d\)", lines[-2]), (
        result.text
    )
    accuracy = re.fullmatch(r"test accuracy: (0\.\d{3})", lines[-1])
    assert accuracy, result.text
    assert float(accuracy[1]) >= 0.95
    assert "epoch 30 of 30, loss" in result.out
    assert result.seconds < 30


@pytest.mark.parametrize(("mpi", "ranks"), [("mpich", 1), ("mpich", 2), ("mpich", 4), ("openmpi", 2), ("openmpi", 3)])
def test_digits_under_mpirun(mpi, ranks):
    result = mpirun(ranks, DIGITS, mpi=mpi)
    check_digits(result, ranks)
    assert result.err.count("allred: ") == 2, result.text  # the banner and the first step, from the chief alone
    assert f"{ranks} rank{'s' * (ranks > 1)} on " in result.err


def test_digits_without_mpirun():
    check_digits(python(DIGITS), 1)


def test_digits_without_the_extension():
    hide = "import runpy, sys; sys.modules['allred.native._kernels'] = None"
    code = f"{hide}; runpy.run_path({str(DIGITS)!r}, run_name='__main__')"
    result = mpirun(2, "-c", code)
    check_digits(result, 2)
    assert result.err.count("no C extension (") == 1


def test_more_ranks_than_cores():
    check_digits(mpirun(8, DIGITS), 8)
