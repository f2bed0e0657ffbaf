"""The cases of tensorflow_program.py, keras_program.py and keras2_program.py: one job of 2 ranks for each program and
backend of Keras; with --full all cases on each backend, 1 and 3 ranks, and two hosts."""

import functools
import importlib.util
import pathlib

import optimizer_case_runner as cases
import pytest

from allred import testing

pytest.importorskip("tensorflow")

HERE = pathlib.Path(__file__).parent
ENV = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent / "pytorch"), "ALLRED_TIMEOUT_S": "60"}
KERAS = "keras_program.py"
PROGRAMS = {  # by name: the file, and variables
    "TensorFlow": ("tensorflow_program.py", {}),
    "Keras 2": ("keras2_program.py", {"TF_USE_LEGACY_KERAS": "1"}),
    "Keras on TensorFlow": (KERAS, {"KERAS_BACKEND": "tensorflow"}),
    "Keras on JAX": (KERAS, {"KERAS_BACKEND": "jax"}),
    "Keras on torch": (KERAS, {"KERAS_BACKEND": "torch"}),
}
SOME = {  # the cases that run without --full
    "Keras on JAX": [
        "training_equals_one_process_on_the_global_batches", "accumulation_communicates_once_for_several_batches",
        "a_loss_scale", "training_continues_from_a_checkpoint",
    ],
    "Keras on torch": [
        "training_equals_one_process_on_the_global_batches", "accumulation_communicates_once_for_several_batches",
    ],
}  # fmt: skip
JOBS = {
    "2 ranks": (2, {}),
    "1 rank": (1, {}),
    "3 ranks": (3, {}),
    "2 hosts": (2, {"ALLRED_TRANSPORT": "tcp", "ALLRED_PRETEND_NODES": "1,1"}),
}


@functools.cache
def results(program, ranks=2, job="", names=()):
    file, env = PROGRAMS[program]
    if program == "Keras 2" and not importlib.util.find_spec("tf_keras"):
        pytest.skip("tf_keras is not installed")
    more = JOBS[job][1] if job else {}
    result = testing.mpirun(ranks, HERE / file, *names, env={**ENV, **env, **more}, timeout_s=200)
    return cases.results(result.out), result.text


def chosen(program):
    return SOME.get(program) or cases.names(HERE / PROGRAMS[program][0])


@pytest.mark.limit(220)
@pytest.mark.parametrize(
    ("program", "name"),
    [
        pytest.param(program, name, marks=pytest.mark.xdist_group(program))
        for program in PROGRAMS
        for name in chosen(program)
    ],
)
def test_cases(program, name):
    found, text = results(program, names=tuple(chosen(program)))
    assert found.get(name, f"the job ended before this case:\n{text}") == "ok"


@pytest.mark.full
@pytest.mark.limit(220)
@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_other_jobs(program, job):
    found, text = results(program, JOBS[job][0], job)
    assert found == dict.fromkeys(cases.names(HERE / PROGRAMS[program][0]), "ok"), text
