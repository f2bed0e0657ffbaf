"""Hooked torch optimizers: the cases of hooked_program.py, in one job at 2 ranks; with --full at 3 ranks too.

hooked_edge_cases.py and hooked_gradient_cases.py have more of them. Gradients are sent at the end of the backward pass
(no_overlap); some cases are repeated with gradients that are sent during it (overlap). The job takes about 40 s of CPU
time, of which 6 s are the import of torch; more on a busy machine.
"""

import functools
import pathlib

import optimizer_case_runner as cases
import pytest

from allred import testing

pytest.importorskip("torch")

PROGRAM = pathlib.Path(__file__).with_name("hooked_program.py")
FILES = PROGRAM, *map(PROGRAM.with_name, ("hooked_edge_cases.py", "hooked_gradient_cases.py"))
NAMES = [f"no_overlap {name}" for file in FILES for name in cases.names(file)]
NAMES += [f"overlap {name}" for file in FILES for name in cases.names(file, "case_with_overlap")]


@functools.cache
def results(ranks):
    options = {"OMP_NUM_THREADS": "1", "ALLRED_OVERLAP": "never", "ALLRED_TIMEOUT_S": "200"}
    result = testing.mpirun(ranks, PROGRAM, env=options, timeout_s=280)
    found = cases.results(result.out)
    assert result.code == 0 or found, result.text
    return found, result.text


@pytest.mark.limit(300)
@pytest.mark.parametrize("name", NAMES)
def test_hooked(name):
    found, text = results(2)
    assert found.get(name, f"the job ended before this case:\n{text}") == "ok"


@pytest.mark.full
@pytest.mark.limit(300)
def test_hooked_at_3_ranks():
    found, text = results(3)
    assert found == dict.fromkeys(NAMES, "ok"), text


@pytest.mark.full
@pytest.mark.limit(300)
def test_bit_identical_to_ddp_with_gloo():
    program = PROGRAM.with_name("bit_identical_to_ddp_program.py")
    result = testing.mpirun(2, program, env={"OMP_NUM_THREADS": "1"}, timeout_s=280)
    assert "equal: [True, True]" in result.out, result.text
