"""allred.torch, the interface of horovod.torch: the cases of two programs in one job, with MPICH at 3 ranks; with
--full at 2 and 3 ranks with both MPIs.

A job takes about 8 s of CPU time for each rank, of which 3 s are the import of torch.
"""

import functools
import pathlib

import open_mpi
import optimizer_case_runner as cases
import pytest

from allred import testing

pytest.importorskip("torch")

PROGRAM = pathlib.Path(__file__).with_name("horovod_program.py")
FILES = [PROGRAM.with_name(f"horovod_{what}_program.py") for what in ("collectives", "training")]
NAMES = [name for file in FILES for name in cases.names(file)]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "ALLRED_OVERLAP": "never", "ALLRED_TIMEOUT_S": "200", "ALLRED_BANNER": "0"}


@functools.cache
def results(ranks):
    result = testing.mpirun(ranks, PROGRAM, env=ENVIRONMENT, timeout_s=280)
    return cases.results(result.out), result


@pytest.mark.limit(300)
@pytest.mark.parametrize("name", NAMES)
def test_horovod(name):
    found, result = results(3)
    assert found.get(name, f"the job ended before this case:\n{result.text}") == "ok"


@pytest.mark.limit(300)
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.full), 3])
def test_all_cases(ranks):
    found, result = results(ranks)
    assert found == dict.fromkeys(NAMES, "ok"), result.text
    assert result.code == 0, result.text


@open_mpi.needs_open_mpi
@pytest.mark.full  # by default in test_backend.py
@pytest.mark.limit(300)
@pytest.mark.parametrize("ranks", [2, 3])
def test_open_mpi(ranks):
    result = open_mpi.mpirun(ranks, PROGRAM, env=ENVIRONMENT, timeout_s=280)
    assert cases.results(result.out) == dict.fromkeys(NAMES, "ok"), result.text
    assert result.code == 0, result.text
