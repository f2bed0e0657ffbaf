"""Mode ps: a worker stalls while the others are at the end of their data, or wait for it in a step."""

import re

import pytest
from ps_jobs import CUT_SHORT, check_end, done, job
from test_shm import full

LIMITS = {"stall_warning_s": 1.5, "timeout_s": 4, "check_steps": 0}  # a second warning would come after 6 s
SESSION = """
with allred.Session(log_steps=None) as session:
    opt = allred.distributed(allred.optim.SGD(lr=1.0))
    session.track(params=params, optimizer=opt)
    for step in session.steps(range(6)):
        if me == 1 and step == 3: stall()
        opt.step(params, ones)
"""
STEPS = "train(3)\nif me == 1: stall()\ntrain(3)\ndone()"
SLEEPS = "def stall(): time.sleep(1e5)\n"
STOPS = "def stall(): os.kill(os.getpid(), signal.SIGSTOP)\n"
STATES = {SLEEPS: r"in Python at <string>:\d+ \(stall\)", STOPS: r"stopped \(kill -CONT"}


def check_told(result, stall):
    """Check for one warning and one error, with a table that names the worker, its state and its line of code."""
    table = rf"(?:  rank.*\n)*  rank 2 \(worker 1\) +\S+ +{STATES[stall]}"
    assert len(re.findall(rf"^allred: rank \d has waited for \d+ s in .*\n{table}", result.err, re.M)) == 1, result.text
    error = rf"not complete after 4 s; rank 2 \(worker 1\) made no request in this time\n{table}"
    assert re.search(error, result.err), result.text


@pytest.mark.parametrize(
    ("stall", "make", "policy", "mpi"),
    [pytest.param(SLEEPS, "", "async", "openmpi", marks=full), (STOPS, SESSION, "bounded", "mpich")],
    ids=["plain", "session"],
)
def test_the_others_are_at_the_end(stall, make, policy, mpi, tmp_path):
    how = {"make": stall + make} if make else {"before": stall}
    result = job(tmp_path, "" if make else STEPS, 2, 1, mpi=mpi, consistency=policy, **how, **LIMITS)
    check_end(result, 1, mpi)
    check_told(result, stall)


def test_all_others_have_ended(tmp_path):
    """Worker 0 stalls, which would print the statistics; the other waits in MPI_Finalize."""
    result = job(tmp_path, STEPS.replace("me == 1", "me == 0"), 2, 1, before=SLEEPS, **LIMITS)
    check_end(result, 1)
    words = "service: worker 1 has made its last step, and waits for worker 0"
    assert re.search(rf"has waited for \d+ s in {words}\n", result.err), result.text
    error = rf"CollectiveTimeout: {words}: not complete after 4 s; rank 1 \(worker 0\) made no request in this time\n"
    assert re.search(error, result.err), result.text


def test_a_slow_worker_that_trains_on_is_not_late(tmp_path):
    """The worker trains for longer than the time limit, and makes steps in shorter intervals than the limit."""
    body = "train(2)\nif me == 1: train(35, 0.2)\ndone()"
    result = job(tmp_path, body, 2, 1, **LIMITS | {"timeout_s": 6, "stall_warning_s": 6})
    check_end(result, 0)
    assert done(result) == {0, 1}, result.text
    assert "has waited for" not in result.err, result.text


@pytest.mark.parametrize(
    ("stall", "policy", "mpi"),
    [pytest.param(SLEEPS, "async", "openmpi", marks=full), (STOPS, "sync", "mpich")],
    ids=["end", "step"],
)
def test_the_others_go_on_without_it(stall, policy, mpi, tmp_path):
    settings = {"worker_failure": "go_on", "consistency": policy, **LIMITS}
    result = job(tmp_path, STEPS, 2, 1, before=stall, mpi=mpi, **settings)
    check_end(result, 1, mpi)
    assert done(result) == {0}, result.text
    words = r"rank 2 \(worker 1\) on \S+ has made no request for 4 s while others waited for it; the other ranks "
    assert re.search(rf"{words}continue\n(?:  rank.*\n)*  rank 2 \(worker 1\) +\S+ +{STATES[stall]}", result.err), (
        result.text
    )
    if stall == SLEEPS:  # it runs Python, so it raises the error
        assert "CollectiveTimeout: this rank has made no request for 4 s" in result.err, result.text


def test_a_worker_that_stops_in_the_middle_of_its_gradient_counts_as_failed(tmp_path):
    """The server waits for the rest of the gradient that it is receiving."""
    body = "others() if me == 0 else cut_short(signal.SIGSTOP)\ntrain(4)\ndone()"
    settings = {"worker_failure": "go_on", **LIMITS, "timeout_s": 5}
    result = job(tmp_path, body, 2, 1, False, 2_000_000, "STOPS = True" + CUT_SHORT, **settings)
    check_end(result, 1)
    assert done(result) == {0}, result.text
    assert "rank 2 (worker 1)" in result.err, result.text
    words = "has made no request for 5 s while others waited for it; the other ranks continue\n"
    assert words in result.err, result.text
