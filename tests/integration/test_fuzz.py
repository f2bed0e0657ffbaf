"""Random jobs: fixed seeds for 3 s (new ones for a minute with --full), and seeds that failed once.

`make fuzz T=3600` runs for an hour.
"""

import importlib
import os

import numpy as np
import pytest
from harness import BIN, ROOT, environment, mpirun, python

from allred import testing

FUZZ = ROOT / "tests/fuzz/fuzz.py"
FIRST_SEED, SECONDS, FULL_SECONDS = 1, 3, 60
FAILED_ONCE = {  # seeds and their bugs
    200021: "a rank that ended successfully was reported as a silent exit, if the chief's watcher had ended earlier",
    200032: "a silent exit under MPICH's launcher",
    300016: "the death of the only rank of a node was not reported, but that of a rank which the launcher killed later",
    400071: "the kill of the only rank of a node was not reported",
}
SIMILAR = (200032, 300016)  # to those that run by default


@pytest.mark.limit(FULL_SECONDS + 120)
def test_random_jobs(capsys, pytestconfig):
    seed, seconds = FIRST_SEED, SECONDS
    if pytestconfig.getoption("--full"):
        seed, seconds = int.from_bytes(os.urandom(4)), FULL_SECONDS
    with capsys.disabled():
        print(f"\nfuzz from seed {seed}: ", end="")
    result = python(FUZZ, "--seconds", seconds, "--seed", seed, timeout_s=seconds + 100)
    last = (result.out.strip().splitlines() or ["no output"])[-1]
    with capsys.disabled():
        print(last, end=" ")
    assert (result.code, result.err) == (0, ""), result.text
    assert last.endswith(" 0 failures"), result.text


@pytest.fixture
def fuzz(monkeypatch):
    """The module tests/fuzz/fuzz.py, which plays jobs in this process."""
    monkeypatch.syspath_prepend(FUZZ.parent)
    return importlib.import_module("fuzz")


@pytest.mark.parametrize(
    ("training", "fault", "outcome"),
    [("sync", "none", "survived"), ("ps async", "rank killed", "named"), ("run --restarts", "rank killed", "survived")],
)
def test_a_training_with_a_fault(training, fault, outcome, fuzz):
    soak = importlib.import_module("soak")
    (found,) = [each for each in soak.TRAININGS if each.name == training]
    end = soak.run(soak.Job(0, found, fault, 1, 0.3, 0.0))
    assert end.outcome == outcome, end.text


def test_a_wrong_result_of_a_training_is_silent(fuzz, monkeypatch):
    soak = importlib.import_module("soak")
    monkeypatch.setattr(soak, "expected", lambda training: np.zeros(soak.ROWS))
    end = soak.run(soak.Job(0, soak.TRAININGS[0], "none", 0, 0.0, 0.0))
    assert end.outcome == "silent"
    assert end.text.startswith("['a wrong result']"), end.text


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.full) if seed in SIMILAR else seed for seed in FAILED_ONCE], ids=str
)
def test_a_job_that_once_failed(seed, fuzz, capsys):
    assert fuzz.play(fuzz.job_of(seed)), capsys.readouterr().out


# Defects that are injected into every rank of a real job.

PROGRAM = """
import os, runpy, subprocess, sys
sys.path.insert(0, {fuzz!r})
import numpy as np, allred, plan
plan.job_of = lambda seed: eval({job!r}, vars(plan))
right = allred.{function}
def defective(*arguments, **options):
    {before}
    result = right(*arguments, **options)
    if allred.rank() == 1: {after}
    return result
allred.{function} = defective
runpy.run_path({fuzz!r} + "/rank_program.py", run_name="__main__")
"""
CHILD = "subprocess.Popen(['sleep', '60'], start_new_session=True, stdout=-3, stderr=-3)"
WRONG = "a rank found a wrong result"
DEFECTS = {  # function; code before the call; code after it on rank 1; output of the driver
    "a wrong sum and a child": ("reducescatter", "pass", f"result += 1; {CHILD}", [WRONG, "a process was left: "]),
    "a byte": ("allgather", "pass", "result.view(np.uint8)[-1:] ^= 64", [WRONG]),
    "a copy": ("allreduce_", "pass", "result = result.copy()", [WRONG]),
    "an argument": ("allreduce", "pass", "arguments[0][...] = 0", [WRONG]),
    "other rows": ("alltoall", "pass", "result = (result[0], result[1] + 1)", [WRONG]),
    "stderr": ("barrier", "pass", "print('oh', file=sys.stderr)", ["stderr is not empty"]),
    "a hang": ("barrier", "while allred.rank() == 0: pass", "pass", ["the job hung"]),
    "an end": ("barrier", "if allred.rank() == 0: os._exit(0)", "pass", ["ranks [] of 2 printed a digest"]),
    "an error": ("broadcast_object", "pass", "raise allred.MismatchError('none')", ["exit code 1, not 0"]),
}


def one_job(plan, function):
    """Job of two ranks that call the function 12 times."""
    kind = function.strip("_")
    rows = {"allgather": ((4,), (5,)), "alltoall": ((4, 3), (2, 1))}.get(kind, ())
    arrays = {} if kind == "barrier" else {"shapes": (() if rows else (50,),), "dtypes": ("float32",)}
    op = "Sum" if "reduce" in kind else ""
    operation = plan.Operation(kind, op=op, rows=rows, delays=(0.0, 0.0), **arrays)
    return plan.Job(11, 2, "mpich", "auto", "none", (operation,) * 12, plan.Fault())


# By default: what ranks check, and what only a real job shows. tests/fuzz/test_fuzz_promises.py has the other outputs.
DEFAULT = ("a wrong sum and a child", "a hang")
DEFECT_ROWS = [defect if defect in DEFAULT else pytest.param(defect, marks=pytest.mark.full) for defect in DEFECTS]


def hanging(ranks, *arguments, timeout_s, mpi, env):
    """A job that is ended after 4 s: the harness waits for 90 s at least."""
    where = {"mpirun": BIN[mpi] / "mpirun", "python": BIN[mpi] / "python"}
    return testing.mpirun(ranks, *arguments, timeout_s=4, env=environment(env), **where)


@pytest.mark.parametrize("defect", DEFECT_ROWS)
def test_a_defect_is_reported_with_the_command_to_repeat_it(defect, fuzz, monkeypatch, capsys):
    function, before, after, texts = DEFECTS[defect]
    job = one_job(importlib.import_module("plan"), function)
    code = PROGRAM.format(fuzz=str(FUZZ.parent), job=repr(job), function=function, before=before, after=after)
    start = hanging if defect == "a hang" else mpirun
    monkeypatch.setattr(fuzz, "mpirun", lambda ranks, _, seed, **options: start(ranks, "-c", code, seed, **options))
    assert not fuzz.play(job)
    printed = capsys.readouterr().out
    assert printed.startswith("FAILED seed 11: 2 ranks, mpich, backend auto"), printed
    assert all(text in printed for text in texts), printed
    assert "repeat: .venv/bin/python tests/fuzz/fuzz.py --seed 11" in printed, printed


@pytest.mark.full
def test_without_a_defect_the_same_jobs_succeed(fuzz, monkeypatch):
    for function in sorted({function for function, *_ in DEFECTS.values()}):
        job = one_job(importlib.import_module("plan"), function)
        nothing = {"function": function, "before": "pass", "after": "pass"}
        code = PROGRAM.format(fuzz=str(FUZZ.parent), job=repr(job), **nothing)
        with monkeypatch.context() as patch:
            patch.setattr(fuzz, "mpirun", lambda ranks, _, seed, code=code, **o: mpirun(ranks, "-c", code, seed, **o))
            assert fuzz.play(job)
