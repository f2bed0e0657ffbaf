"""Backend allred of torch.distributed. A test runs a program with many cases, because importing torch is slow."""

import pathlib
import sys

import pytest

pytest.importorskip("torch")

from allred import testing

HERE = pathlib.Path(__file__).parent
BIN = pathlib.Path(sys.executable).parent
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "ALLRED_BANNER": "0", "PYTHONWARNINGS": "ignore", "ALLRED_TIMEOUT_S": "60"}


def run(ranks, *arguments, env=None):
    where = {"mpirun": BIN / "mpirun", "python": sys.executable}
    return testing.mpirun(ranks, *arguments, timeout_s=110, env={**ENVIRONMENT, **(env or {})}, **where)


def passed(result):
    assert result.code == 0, result.text
    return [line.split()[1] for line in result.out.splitlines() if line.startswith("passed ")]


def cases_of(program):
    """The names in the list CASES of a program, without importing it."""
    text = (HERE / program).read_text().partition("\nCASES = [")[2].partition("]")[0]
    return text.replace(",", " ").split()


@pytest.mark.parametrize(
    ("program", "ranks"),
    [
        ("collectives_program.py", 2),
        ("collectives_program.py", 3),
        ("ddp_program.py", 2),
        pytest.param("ddp_program.py", 3, marks=pytest.mark.full),
    ],
)
def test_cases(program, ranks):
    assert passed(run(ranks, HERE / program)) == cases_of(program)
