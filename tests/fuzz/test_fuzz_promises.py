"""The check of promises detects each way to break them."""

import dataclasses

import numpy as np
import promises
import pytest
from arithmetic import Expected, difference, reduced
from plan import Fault, job_of
from promises import broken

from allred.testing import Result

JOB = dataclasses.replace(job_of(1), seed=7, ranks=3, mpi="openmpi", fault=Fault())
GOOD = "rank 0 done ab12\nrank 2 done ab12\nrank 1 done ab12\n"


def of(kind, **options):
    return dataclasses.replace(JOB, fault=Fault(kind, rank=1, operation=2, **options))


def ended(code=0, out="", err="", left=()):
    return Result(code, out, err, 1.0, list(left))


@pytest.fixture(params=[False, True], ids=["without watcher", "watcher"])
def watched(request, monkeypatch):
    monkeypatch.setattr(promises, "WATCHED", request.param)
    return request.param


@pytest.mark.parametrize("job", [JOB, of("wrong", change="shape")])
def test_success(watched, job):
    assert broken(job, ended(0, GOOD)) == []
    assert broken(job, ended(1, GOOD)) == ["exit code 1, not 0"]
    assert broken(job, ended(0, GOOD, "warning")) == ["stderr is not empty"]
    assert broken(job, ended(0, GOOD.replace("rank 1 done ab12\n", ""))) == ["ranks ['0', '2'] of 3 printed a digest"]
    (text,) = broken(job, ended(0, GOOD.replace("1 done ab12", "1 done cd34")))
    assert text.startswith("results differ between ranks")
    assert broken(job, ended(0, GOOD, left=["17 python"])) == ["a process was left: 17 python"]


def test_a_wrong_result_is_detected_in_any_job(watched):
    for kind in ("none", "raise", "kill"):
        assert "a rank found a wrong result" in broken(of(kind), ended(1, "", "__main__.Wrong: seed 7, ..."))


def peers(text):
    return f"rank 0 raised {text}\nrank 2 raised {text}\n"


KEPT = {
    "raise": (1, peers("RemoteRankError of rank 1 code 1 with its traceback"), "ValueError: the fault of seed 7\n"),
    "sys.exit": (9, peers("RemoteRankError of rank 1 code 9 without its traceback"), ""),
    "SystemExit": (9, peers("RemoteRankError of rank 1 code 9 without its traceback"), ""),
    "interrupt": (130, peers("RemoteRankError of rank 1 code 130 without its traceback"), "KeyboardInterrupt\n"),
    "_exit": (
        *(1, peers("RemoteRankError of rank 1 code 0 without its traceback")),
        "allred: rank 1 on host ended with exit code 0 without a report (os._exit, MPI_Abort?)\n",
    ),
    "kill": (137, "", "allred: rank 1 on host was killed by signal 9 (SIGKILL)\n"),
    "stop": (1, peers("CollectiveTimeout"), "allred.CollectiveTimeout: ...\n  rank 1  stopped for 3 s\n"),
}


@pytest.mark.parametrize("kind", KEPT)
def test_each_fault(kind, watched):
    code, out, err = KEPT[kind]
    job = of(kind, code=9)
    assert broken(job, ended(code, out, err)) == []
    if kind == "_exit" and not watched:
        return
    assert any(text.startswith("exit code 0, expected") for text in broken(job, ended(0, out, err)))
    assert "a rank completed its program" in broken(job, ended(code, out + "rank 2 done ab12\n", err))
    if watched and out:
        late = out.replace("rank 2 raised", "rank 2 never raised")
        assert any(text.startswith("ranks [2] did not raise") for text in broken(job, ended(code, late, err)))
    if err and (watched or kind != "kill"):
        assert any(text.startswith("0 times on stderr") for text in broken(job, ended(code, out)))
        if kind != "stop":
            assert any(text.startswith("2 times on stderr") for text in broken(job, ended(code, out, err + err)))


def test_an_exit_that_says_nothing_under_mpich(watched):
    job = dataclasses.replace(of("_exit"), mpi="mpich")
    for code in (0, 9):
        assert broken(job, ended(code, "", KEPT["_exit"][2])) == []
        assert broken(job, ended(code)) == [f"0 times on stderr: {promises._filled(promises.SILENT, job)}"] * watched
    assert (
        broken(job, ended(0, left=["17 python"]))
        == ["a process was left: 17 python"]
        + [f"0 times on stderr: {promises._filled(promises.SILENT, job)}"] * watched
    )


def test_a_wrong_call_that_is_not_caught(watched):
    job = of("wrong", change="shape", caught=False)
    out = "".join(f"rank {rank} raised MismatchError\n" for rank in range(3))
    assert broken(job, ended(1, out)) == []
    assert broken(job, ended(0, out)) == ["exit code 0, expected 1"]
    assert broken(job, ended(1, out.replace("1 raised Mismatch", "1 raised Input"))) == [
        "ranks [1] did not raise MismatchError"
    ]


# expected results


def test_a_reduction_in_rank_order_and_its_tolerance():
    parts = [np.array([1e8, 1], np.float32), np.array([-1e8, 1], np.float32), np.array([1, 1], np.float32)]
    wanted = reduced(parts, "Sum")
    assert wanted.array.tolist() == [1, 3]
    other_order = np.array([0, 3], np.float32)
    assert difference(other_order, wanted, exactly=False) == ""
    assert difference(other_order, wanted, exactly=True).startswith("differs in 1 of 2 elements; at (0,)")
    assert difference(np.array([1, 3.001], np.float32), wanted, exactly=False) != ""


def test_differences():
    wanted = Expected(np.array([1.0, np.nan]))
    assert difference(np.array([1.0, np.nan]), wanted, exactly=True) == ""
    assert difference(np.array([1.0, 2.0]), wanted, exactly=False) != ""
    assert difference(np.array([1, 2]), wanted, exactly=False) == "is int64 (2,), not float64 (2,)"
    assert difference(np.array([[1.0, np.nan]]), wanted, exactly=False) == "is float64 (1, 2), not float64 (2,)"


def test_integers_wrap_around_and_averages_round_once():
    largest = np.array([127], np.int8)
    assert reduced([largest, largest], "Sum").array.tolist() == [-2]
    halves = [np.array([2048.0], np.float16), np.array([1.0], np.float16), np.array([1.0], np.float16)]
    assert reduced(halves, "Sum").array.tolist() == [2050]
