"""Gradients of torch in the arena: the cases of arena_program.py give the same results, bit for bit, as without it.

A job takes 10 s of CPU time, of which most is the import of torch; the compilation of the allocator takes 1 s a rank.
"""

import functools
import pathlib

import open_mpi
import pytest

from allred import testing

pytest.importorskip("torch")

PROGRAM = pathlib.Path(__file__).with_name("arena_program.py")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "ALLRED_BANNER": "0", "PYTHONWARNINGS": "ignore", "ALLRED_TIMEOUT_S": "60"}
LIMIT_S = 150
ON = {"ALLRED_TORCH_ARENA": "1"}


@functools.cache
def plain(ranks):
    """The lines of a job in which torch allocates as always."""
    return lines(testing.mpirun(ranks, PROGRAM, env=ENVIRONMENT, timeout_s=LIMIT_S))


def lines(result, stderr=""):
    """Return {case: (hashes, percentage of reduced bytes, bytes read)} of a job without errors, and the summaries."""
    assert result.code == 0, result.text
    assert stderr in result.err
    assert result.err.count("\n") == bool(stderr), result.text
    words = [line.split() for line in result.out.splitlines()]
    found = {line[1]: (line[2], int(line[3]), int(line[4])) for line in words if line[0] == "case"}
    assert "\ngroup allreduce: " in result.out
    return found, [line for line in result.out.splitlines() if line.startswith("summary ")]


def hashes(found):
    return {name: line[0] for name, line in found.items()}


def check_in_place(found, summaries, ranks):
    expected = plain(ranks)[0]
    assert hashes(found) == hashes(expected)
    assert all(line[1:] == (0, 0) for line in expected.values())
    for name, (_, percent, read) in found.items():
        if name.startswith("fsdp"):
            assert read > 0
        else:  # the first steps of what has to be learned, and small tensors, are not
            assert percent >= (70 if name == "ddp_after_backward" else 98), name
    assert all("; 98 % reduced in place" in line for line in summaries), summaries


@pytest.mark.limit(2 * LIMIT_S + 10)
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.full)])
def test_the_same_results_in_place(ranks):
    found = lines(testing.mpirun(ranks, PROGRAM, env=ENVIRONMENT | ON, timeout_s=LIMIT_S))
    check_in_place(*found, ranks)


@pytest.mark.full
@pytest.mark.limit(2 * LIMIT_S + 10)
def test_an_arena_that_is_too_small():
    settings = ON | {"ALLRED_ARENA": "200KiB"}
    found, summaries = lines(testing.mpirun(2, PROGRAM, env=ENVIRONMENT | settings, timeout_s=LIMIT_S))
    assert hashes(found) == hashes(plain(2)[0])
    assert all(line[1] < 60 for line in found.values())
    assert all("kB: allocated when the arena was full;" in line for line in summaries)


@pytest.mark.limit(2 * LIMIT_S + 10)
def test_without_a_compiler():
    settings = ON | {"CXX": "/nonexistent/c++"}
    result = testing.mpirun(2, PROGRAM, env=ENVIRONMENT | settings, timeout_s=LIMIT_S)
    problem = "allred: ALLRED_TORCH_ARENA=1: torch's allocator cannot be made: [Errno 2] No such file or directory: "
    found, summaries = lines(result, problem + "'/nonexistent/c++'; gradients are not reduced in place")
    assert (found, len(summaries)) == (plain(2)[0], 4)


@open_mpi.needs_open_mpi
@pytest.mark.full
@pytest.mark.limit(2 * LIMIT_S + 10)
def test_open_mpi():
    found = lines(open_mpi.mpirun(2, PROGRAM, env=ENVIRONMENT | ON, timeout_s=LIMIT_S))
    check_in_place(*found, 2)
