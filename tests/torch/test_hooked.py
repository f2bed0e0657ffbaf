"""Hooked torch optimizers: the cases of hooked_program.py, in one job at 2 ranks; with --full at 3 ranks too.

Each case runs twice: gradients are sent at the end of the backward pass (late) or during it (early). The job takes
about 20 s of CPU time on a quiet machine, 6 s of which are the import of torch.
"""

import functools
import pathlib

import cases
import pytest

from allred import testing

pytest.importorskip("torch")

PROGRAM = pathlib.Path(__file__).with_name("hooked_program.py")


@functools.cache
def results(ranks):
    options = {"OMP_NUM_THREADS": "1", "ALLRED_OVERLAP": "never", "ALLRED_TIMEOUT_S": "200"}
    result = testing.mpirun(ranks, PROGRAM, env=options, timeout_s=280)
    found = cases.results(result.out)
    assert result.code == 0 or found, result.text
    return found, result.text


@pytest.mark.limit(300)
@pytest.mark.cover(2)
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", cases.names(PROGRAM))
@pytest.mark.parametrize("when", ["late", "early"])
def test_hooked(when, name, ranks):
    found, text = results(ranks)
    assert found.get(f"{when} {name}", f"the job ended before this case:\n{text}") == "ok"


@pytest.mark.full
@pytest.mark.limit(300)
def test_the_same_bits_as_ddp_with_gloo():
    program = PROGRAM.with_name("ddp_program.py")
    result = testing.mpirun(2, program, env={"OMP_NUM_THREADS": "1"}, timeout_s=280)
    assert "equal: [True, True]" in result.out, result.text
