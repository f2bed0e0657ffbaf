"""Mode ps with torch optimizers, and training that changes between the modes.

ps_cases_program.py: one job at 3 ranks, whose servers are in Server.join(); about 20 s of CPU time, of which 9 s are
the import of torch. ps_torch_program.py: the servers run the script; 8 s.
"""

import functools
import pathlib
import re

import optimizer_case_runner as cases
import pytest

from allred import testing

pytest.importorskip("torch")

PROGRAM = pathlib.Path(__file__).with_name("ps_torch_program.py")
CASES = pathlib.Path(__file__).with_name("ps_cases_program.py")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "ALLRED_TIMEOUT_S": "200"}


@pytest.mark.limit(300)
@pytest.mark.parametrize("kind", ["groups", *(pytest.param(kind, marks=pytest.mark.full)
                                              for kind in ("sgd", "adam", "halves"))])  # fmt: skip
def test_one_worker_is_bit_identical_to_one_process(kind):
    """The servers run the script. With a schedule of all hyperparameters, and clipping of the worker."""
    result = testing.mpirun(2, PROGRAM, kind, env={**ENVIRONMENT, "ALLRED_MODE": "ps"}, timeout_s=280)
    assert result.code == 0, result.text
    found = re.search(r"loss (\S+) -> (\S+); (\d+) updates", result.out)
    assert found, result.text
    assert float(found[2]) < float(found[1])
    assert found[3] == "10"


@functools.cache
def results(directory):
    result = testing.mpirun(3, CASES, directory, env={**ENVIRONMENT, "ALLRED_BANNER": "0"}, timeout_s=280)
    return cases.results(result.out), result.text


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("ps")


@pytest.mark.limit(300)
@pytest.mark.parametrize("name", cases.names(CASES, r"case\(\d\)"))
def test_cases(name, directory):
    found, text = results(directory)
    assert found.get(name, f"the job ended before this case:\n{text}") == "ok"
