"""The cases of tensorflow_program.py, keras_program.py and keras2_program.py: one job of 2 ranks for each program and
backend of Keras; with --full all cases on each backend, 1 and 3 ranks, and two hosts."""

import pathlib

import optimizer_case_runner as cases
import pytest

from allred import testing

pytest.importorskip("tensorflow")

HERE = pathlib.Path(__file__).parent
ENV = {"OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1", "ALLRED_TIMEOUT_S": "60"}
ENV |= {"PYTHONPATH": str(HERE.parent / "pytorch")}
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


def run(program, job, names=()):
    """Run a job, and compare the results of the cases: all, or those with these names."""
    file, env = PROGRAMS[program]
    ranks, more = JOBS[job]
    result = testing.mpirun(ranks, HERE / file, *names, env={**ENV, **env, **more}, timeout_s=200)
    expected = dict.fromkeys(names or cases.names(HERE / file), "ok")
    assert cases.results(result.out) == expected, result.text


@pytest.mark.limit(220)
@pytest.mark.parametrize("program", PROGRAMS)
def test_program(program):
    run(program, "2 ranks", SOME.get(program, ()))


@pytest.mark.full
@pytest.mark.limit(220)
@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_program_with_all_cases(program, job):
    run(program, job)
