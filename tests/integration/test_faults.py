"""allred.testing as a user's tests use it: the example of docs/testing.md, and faults; --full: under both MPIs."""

import re
import sys

import pytest
from harness import BIN, MPICH_BY_DEFAULT, MPIS, OPENMPI, mpirun, run
from page_blocks import programs

from allred import testing

TRAIN = r"""
import sys, time, numpy as np, allred
from allred import testing
allred.init(banner=False)
opt = allred.distributed({inside}allred.optim.SGD(lr=0.1){end})
opt = {outside}opt{close}
params = [np.zeros(4)]
start = time.monotonic()
for step in range(1, 6):
    opt.step(params, [np.ones(4)])
    if allred.rank() == 0: print("step", step, flush=True)
if allred.rank() == 1: print(f"rank 1 took {{time.monotonic() - start}}\n", end="", flush=True)
"""


def train(fault, place):
    words = dict.fromkeys(("inside", "end", "outside", "close"), "")
    words |= {"inside": f"{fault}.into(", "end": ")"} if place == "inside" else {}
    words |= {"outside": f"{fault}.into(", "close": ")"} if place == "outside" else {}
    return TRAIN.format(**words)


@pytest.mark.parametrize("mpi", MPICH_BY_DEFAULT)
def test_the_example_of_the_page(mpi, tmp_path):
    train, test, threads = programs("testing.md")
    (tmp_path / "test_threads.py").write_text(threads)
    for name, step in (("fails", 3), ("ends_well", 6)):
        (tmp_path / f"train_{name}.py").write_text(train.replace("step=3", f"step={step}"))
        (tmp_path / f"test_{name}.py").write_text(test.replace("train.py", f"train_{name}.py"))
    result = run([BIN[mpi] / "python", "-m", "pytest", "--color=no"], cwd=tmp_path)
    assert "1 failed, 2 passed" in result.out, result.text
    assert "FAILED test_ends_well.py" in result.out, result.text
    assert "exit code 0 after" in result.out, result.text


@pytest.mark.parametrize("mpi", MPICH_BY_DEFAULT)
@pytest.mark.parametrize("place", ["inside", "outside"])
@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        pytest.param(
            *("testing.fail_at(1, 3)", 1, r"RuntimeError: allred.testing.fail_at\(rank=1, step=3\)"),
            marks=pytest.mark.full,  # also in the example of the page
        ),
        ("testing.fail_at(0, 3, OSError('full'))", 1, "OSError: full"),
        ("testing.exit_at(1, 3, 7)", 7, ""),
        pytest.param("testing.kill_at(1, 3)", None, "", marks=pytest.mark.full),  # also in test_timeline.py
        pytest.param("testing.kill_at(1, 3, 15)", None, "", marks=pytest.mark.full),
    ],
)
def test_a_fault_ends_the_job(mpi, place, fault, code, words):
    result = mpirun(2, "-c", train(fault, place), mpi=mpi, timeout_s=40)
    assert result.code == code if code else result.code != 0, result.text
    assert "step 1" in result.out, result.text
    assert "step 4" not in result.out, result.text
    assert len(re.findall(words, result.err)) == 1 or not words, result.text
    assert result.left == [], result.text


@pytest.mark.parametrize("mpi", MPICH_BY_DEFAULT)
def test_a_stopped_rank_is_a_timeout_of_the_others(mpi):
    result = mpirun(
        2, "-c", train("testing.stop_at(1, 3)", "outside"), mpi=mpi, timeout_s=30, env={"ALLRED_TIMEOUT_S": "2"}
    )
    assert result.code != 0, result.text
    assert "CollectiveTimeout: " in result.err, result.text
    assert result.left == [], result.text


@pytest.mark.parametrize("mpi", MPIS)
def test_ranks_that_hang_are_ended_even_if_stopped(mpi):
    hang = "import os, signal, allred\nallred.init(banner=False)\nos.kill(os.getpid(), signal.SIGSTOP)"
    where = {"mpirun": BIN[mpi] / "mpirun", "python": BIN[mpi] / "python"}
    with pytest.raises(TimeoutError, match="did not end after 3 s") as error:
        testing.mpirun(2, "-c", hang, timeout_s=3, env=OPENMPI, **where)
    assert "TESTING_RUN" not in str(error.value)


def test_a_slow_rank_changes_nothing_else_and_the_default_mpirun_is_the_one_next_to_this_python():
    result = testing.mpirun(2, "-c", train("testing.slow(1, 0.2)", "outside"), env=OPENMPI)
    assert (result.code, result.out.count("step")) == (0, 5), result.text  # rank 0 of one world
    assert float(re.search("rank 1 took (.*)", result.out)[1]) >= 5 * 0.2, result.text
    assert sys.executable.startswith(str(BIN["mpich"]))
