"""The cases of collectives_program.py and training_program.py: 2 ranks over shared memory by default, 14 s each; with
--full 1 and 3 ranks, TCP, MPI, and two devices in each process."""

import functools
import os
import pathlib

import optimizer_case_runner as cases
import pytest

from allred import testing

pytest.importorskip("jax")

HERE = pathlib.Path(__file__).parent
ENV = {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(HERE.parent / "pytorch"),
    "ALLRED_TIMEOUT_S": "60",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # compiles faster
}
JOBS = {
    "2 ranks": (2, {}),
    "1 rank": (1, {}),
    "3 ranks": (3, {}),
    "2 hosts": (2, {"ALLRED_TRANSPORT": "tcp", "ALLRED_PRETEND_NODES": "1,1"}),
    "mpi": (2, {"ALLRED_BACKEND": "mpi"}),
    "2 devices": (2, {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"}),
}


@functools.cache
def results(program, job):
    ranks, env = JOBS[job]
    result = testing.mpirun(ranks, HERE / program, env={**ENV, **env}, timeout_s=200)
    return cases.results(result.out), result.text


PROGRAMS = "collectives_program.py", "training_program.py"


@pytest.mark.limit(220)
@pytest.mark.parametrize(
    ("program", "name"), [(program, name) for program in PROGRAMS for name in cases.names(HERE / program)]
)
def test_cases(program, name):
    found, text = results(program, "2 ranks")
    assert found.get(name, f"the job ended before this case:\n{text}") == "ok"


@pytest.mark.full
@pytest.mark.limit(220)
@pytest.mark.parametrize("job", [job for job in JOBS if job != "2 ranks"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_other_jobs(program, job):
    found, text = results(program, job)
    assert found == dict.fromkeys(cases.names(HERE / program), "ok"), text
