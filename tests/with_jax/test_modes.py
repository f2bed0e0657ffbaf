"""The cases of modes_program.py in each mode, 3 s each; with --full also with more ranks and servers."""

import functools
import pathlib

import optimizer_case_runner as cases
import pytest

from allred import testing

pytest.importorskip("jax")
pytest.importorskip("optax")

PROGRAM = pathlib.Path(__file__).with_name("modes_program.py")
JOBS = {
    "sync, 2 ranks": (2, {"ALLRED_MODE": "sync"}, ()),
    "sync, 3 ranks": (3, {"ALLRED_MODE": "sync"}, ()),
    "sync, 1 rank": (1, {"ALLRED_MODE": "sync"}, ()),
    "local, 2 ranks": (2, {"ALLRED_MODE": "local"}, ("steps", "in_a_program_only_mode_sync")),
    "ps, 1 worker": (2, {"ALLRED_MODE": "ps"}, ("in_a_program_only_mode_sync", "steps")),
    "ps, 2 servers": (3, {"ALLRED_MODE": "ps", "ALLRED_NUM_PS": "2"}, ("steps",)),
    "ps, a checkpoint": (2, {"ALLRED_MODE": "ps"}, ("save_and_restore",)),
}
DEFAULT = "sync, 2 ranks", "local, 2 ranks", "ps, 1 worker"


@functools.cache
def results(job):
    ranks, env, names = JOBS[job]
    env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROGRAM.parents[1] / "pytorch"), "ALLRED_TIMEOUT_S": "60", **env}
    env["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # compiles faster
    result = testing.mpirun(ranks, PROGRAM, *names, env=env, timeout_s=150)
    return cases.results(result.out), result.text


def names_of(job):
    return JOBS[job][2] or cases.names(PROGRAM)


@pytest.mark.limit(170)
@pytest.mark.parametrize(("job", "name"), [(job, name) for job in DEFAULT for name in names_of(job)])
def test_cases(job, name):
    found, text = results(job)
    assert found.get(name, f"the job ended before this case:\n{text}") == "ok"


@pytest.mark.full
@pytest.mark.limit(170)
@pytest.mark.parametrize("job", [job for job in JOBS if job not in DEFAULT])
def test_other_jobs(job):
    found, text = results(job)
    assert found == dict.fromkeys(names_of(job), "ok"), text
