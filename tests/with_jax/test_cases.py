"""The cases of collectives_program.py and training_program.py: 2 ranks over shared memory by default, 14 s each; with
--full 1 and 3 ranks, TCP, MPI, and two devices in each process."""

import functools
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
    "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
}
JOBS = {
    "2 ranks": (2, {}),
    "1 rank": (1, {}),
    "3 ranks": (3, {}),
    "2 hosts": (2, {"ALLRED_TRANSPORT": "tcp", "ALLRED_PRETEND_NODES": "1,1"}),
    "mpi": (2, {"ALLRED_BACKEND": "mpi"}),
    "2 devices": (2, {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}),
}


@functools.cache
def results(program, job):
    ranks, env = JOBS[job]
    result = testing.mpirun(ranks, HERE / program, env={**ENV, **env}, timeout_s=200)
    return cases.results(result.out), result.text


def check(program, job, name):
    found, text = results(program, job)
    assert found.get(name, f"the job ended before this case:\n{text}") == "ok"


every_job = pytest.mark.parametrize(
    "job", [pytest.param(job, marks=[] if job == "2 ranks" else pytest.mark.full) for job in JOBS]
)


@every_job
@pytest.mark.limit(220)
@pytest.mark.parametrize("name", cases.names(HERE / "collectives_program.py"))
def test_collectives(job, name):
    check("collectives_program.py", job, name)


@every_job
@pytest.mark.limit(220)
@pytest.mark.parametrize("name", cases.names(HERE / "training_program.py"))
def test_training(job, name):
    check("training_program.py", job, name)
