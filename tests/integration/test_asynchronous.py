"""Whole programs with operations under way: interrupted, failing, killed, forked, at their end, and never started."""

import re

import pytest
from harness import MPICH_BY_DEFAULT, MPIS, mpirun

PROGRAM = """
import gc, os, signal, sys, time
import numpy as np
import allred
allred.init()
rank, size = allred.rank(), allred.size()
x = np.ones(300_000)
def threads():
    names = []
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/comm") as file:
            names.append(file.read().strip())
    return names.count("allred-progress")
"""

INTERRUPTED = """
if rank == 0:
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
work = allred.allreduce_async_(x, allred.Sum)
work.wait()
"""

INTERRUPTED_AND_CAUGHT = """
works = [allred.allreduce_async_(x, allred.Sum) for _ in range(2 * (rank == 0))]
if rank == 0:
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        works[0].wait()
        print("never")
    except KeyboardInterrupt:
        print("interrupted", flush=True)
else:
    time.sleep(1.5)
    works = [allred.allreduce_async_(x, allred.Sum) for _ in range(2)]
works[1].wait()
assert set(x) == {size**2}, set(x)
print(f"rank {rank} goes on", flush=True)
"""

FAILS = """
works = [allred.allreduce_async_(x, allred.Sum) for _ in range(3 if rank else 1)]
if rank == 0:
    time.sleep(0.5)
    raise ValueError("boom")
try:
    works[-1].wait()
except allred.RemoteRankError as error:
    print("told", flush=True)
    raise
"""

FORKED = """
work = allred.allreduce_async_(x, allred.Sum) if rank else None
child = os.fork()
if child == 0:
    for call in (lambda: allred.allreduce_async_(x), lambda: allred.poll(work), lambda: work.wait()):
        try:
            call()
            os._exit(3)
        except (allred.AllredError, AttributeError):
            pass
    del work
    gc.collect()
    allred.world.install(None)
    gc.collect()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
work = work or allred.allreduce_async_(x, allred.Sum)
work.wait()
assert set(x) == {size}
print("parent goes on", flush=True)
"""

LEFT_TO_ITSELF = """
works = [allred.allreduce_async_(x, allred.Sum) for _ in range(5)]
if rank == 0:
    works = None
print("the end", flush=True)
"""

SHUT_DOWN = """
works = [allred.allreduce_async_(x, allred.Sum) for _ in range(5)]
assert threads() == (size > 1 and os.environ["ALLRED_PROGRESS"] == "thread")
allred.shutdown()
assert set(x) == {size**5}  # what was started is complete
while threads():
    time.sleep(0.001)
allred.init()
assert allred.allreduce(1.0, allred.Sum) == size
assert threads() == 0
print("init again", flush=True)
"""

LATE = """
work = allred.allreduce_async_(x, allred.Sum, "w") if rank else None
if rank:
    try:
        work.wait(timeout_s=0.5)
    except allred.CollectiveTimeout as error:
        assert "allreduce(Sum) #" in str(error) and "'w'" in str(error), error
        print("late", flush=True)
    try:
        allred.allreduce_async_(x)
    except allred.AllredError as error:
        assert "not complete after 0.5 s" in str(error) and threads() == 0, error
        print("over", flush=True)
    os._exit(5)
time.sleep(30)
"""


# Runs several of these programs in the same ranks, each as often as there are ways to make progress.
IN_TURN = """
import os, sys
for program in sys.argv[1:]:
    for progress in ("thread", "caller"):
        os.environ["ALLRED_PROGRESS"] = progress
        exec(program, {"__name__": progress})
        import allred
        allred.shutdown()
"""


def job(text, ranks=2, mpi="mpich", **options):
    return mpirun(ranks, "-c", PROGRAM + text, mpi=mpi, env={"ALLRED_PROGRESS": "thread"}, **options)


@pytest.mark.parametrize("mpi", MPIS)
def test_a_rank_that_fails_with_operations_under_way(mpi):
    result = job(FAILS, 2, mpi)
    assert result.code == 1, result.text
    assert result.out.count("told") == 1, result.text
    assert "ValueError: boom" in result.err, result.text
    assert not result.left, result.text


@pytest.mark.parametrize("mpi", MPICH_BY_DEFAULT)
def test_ctrl_c(mpi):
    result = job(INTERRUPTED, 2, mpi)
    assert result.code, result.text
    assert "KeyboardInterrupt" in result.err, result.text
    assert not result.left, result.text


@pytest.mark.parametrize("mpi", MPIS)
def test_an_interrupted_wait_can_be_repeated_shutdown_completes_operations_and_a_forked_child_is_no_rank(mpi):
    programs = [PROGRAM + text for text in (INTERRUPTED_AND_CAUGHT, SHUT_DOWN, FORKED)]
    result = mpirun(2, "-c", IN_TURN, *programs, mpi=mpi)
    assert result.code == 0, result.text
    counts = {text: result.out.count(text) for text in ("interrupted", "init again", "parent goes on")}
    assert counts == {"interrupted": 2, "init again": 4, "parent goes on": 4}, result.text
    assert len(re.findall(r"rank \d goes on", result.out)) == 4, result.text


@pytest.mark.parametrize("mpi", MPIS)
def test_the_end_of_the_program_with_operations_under_way(mpi):
    result = job(LEFT_TO_ITSELF, 2, mpi)
    assert (result.code, result.out.count("the end")) == (0, 2), result.text
    assert not result.left, result.text


def test_a_time_limit_ends_the_thread_too():
    result = job(LATE)
    assert (result.out.count("late"), result.out.count("over")) == (1, 1), result.text
