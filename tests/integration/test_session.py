"""Sessions with real processes: how a training ends, what is on disk then, and where it goes on."""

import itertools
import json
import pathlib
import re

import pytest
from harness import MPICH_BY_DEFAULT, MPIS, full, mpirun

from allred import checkpoint

PROGRAM = pathlib.Path(__file__).with_name("session_program.py")


def run(directory, ranks=2, mpi="mpich", mode="sync", env=None, timeout_s=60, **arguments):
    """The result; `found` and `outcome`: what each rank printed, by rank."""
    env = {"ALLRED_MODE": mode, "ALLRED_CHECK_STEPS": "0", **(env or {})}
    result = mpirun(ranks, PROGRAM, directory, json.dumps(arguments), mpi=mpi, env=env, timeout_s=timeout_s)
    for word in ("found", "outcome"):
        lines = [json.loads(line) for line in re.findall(rf"^{word} (.*)$", result.out, re.M)]
        setattr(result, word, {line["rank"]: line for line in lines})
    return result


def run_all(trainings, mpi="mpich", env=None, code=0):
    """Train several times in one job of two ranks. trainings: [(directory, arguments)].

    Returns what the ranks printed in each training, [({rank: found}, {rank: outcome})], and what they wrote to stderr.
    """
    words = [word for directory, arguments in trainings for word in (directory, json.dumps(arguments))]
    result = mpirun(2, PROGRAM, *words, mpi=mpi, env={"ALLRED_CHECK_STEPS": "0", **(env or {})})
    assert result.code == code, result.text
    printed = []
    for word in ("found", "outcome"):
        lines = [json.loads(line) for line in re.findall(rf"^{word} (.*)$", result.out, re.M)]
        ranks = [[line for line in lines if line["rank"] == rank] for rank in (0, 1)]
        printed.append([dict(enumerate(pair)) for pair in zip(*ranks, strict=code == 0)])
    assert len(printed[0]) == len(trainings) - (code != 0), result.text
    return list(zip(*printed, strict=code == 0)), result.err


def steps_in(directory):
    return [checkpoint.read_manifest(path).step for path in checkpoint.list_complete(directory)]


def test_on_another_number_of_ranks(tmp_path):
    run(tmp_path, 1, max_steps=4)
    more = run(tmp_path, 2, max_steps=5)
    assert (more.code, more.found[1]["restored"], more.found[1]["at"]) == (0, 4, 5), more.text
    fewer = run(tmp_path, 1, max_steps=5)
    assert (fewer.code, fewer.found[0]["restored"], fewer.found[0]["at"]) == (0, 5, 5), fewer.text
    assert fewer.found[0]["calls"] == ["begin"]
    assert "made no step" not in fewer.err, fewer.text  # it is complete: no mistake


@pytest.mark.parametrize("mpi", MPIS)
def test_ends_of_a_training_and_its_values_and_that_two_parts_are_the_whole(mpi, tmp_path):
    trainings = {
        "whole": {"max_steps": 20},
        "parts": {"max_steps": 11},
        "parts again": {"max_steps": 20},
        "end of data": {"count": 6},
        "should_stop": {"whiles": True, "max_steps": 4},
        "values": {"max_steps": 3, "checkpoint_dir": None},
        "early stopping": {"early": True, "checkpoint_dir": None},
        "the chief's directory": {"max_steps": 3, "save_steps": 1, "differs": {"1": {"checkpoint_dir": None}}},
        "random": {"max_steps": 2},
        "random again": {"max_steps": 2},
    }
    jobs = [(tmp_path / name.removesuffix(" again"), arguments) for name, arguments in trainings.items()]
    printed, _ = run_all(jobs, mpi, {"ALLRED_WATCHER": "0"})
    printed = dict(zip(trainings, printed, strict=True))

    (whole, outcome), (first, _), (second, _) = printed["whole"], printed["parts"], printed["parts again"]
    assert [first[0][k] for k in ("restored", "step", "at")] == [None, 11, 11]
    assert [second[1][k] for k in ("restored", "step", "at")] == [11, 20, 20]
    assert second[0]["a"] == second[1]["a"] == whole[0]["a"]
    assert steps_in(tmp_path / "parts") == [11, 20]
    assert outcome[0]["reason"] == "max_steps"
    for rank in (0, 1):
        assert outcome[rank]["checkpoint"].endswith("step-00000020")

    found, outcome = printed["end of data"]
    assert outcome[1]["reason"] == "end of data"
    assert found[0]["calls"] == ["begin"] + ["before", "after"] * 6 + ["before"]
    assert steps_in(tmp_path / "end of data") == [6]

    found, _ = printed["should_stop"]
    assert found[1]["step"] == 4
    assert found[1]["calls"] == ["begin"] + ["before", "after"] * 4

    found, _ = printed["values"]  # averages weighted by examples
    expected = [(number + 2 * (number + 1)) / 3 for number in range(3)]
    for rank in (0, 1):
        assert [values["loss"] for values in found[rank]["values"]] == pytest.approx(expected)

    found, outcome = printed["early stopping"]
    assert found[0]["step"] == found[1]["step"] == 4
    assert outcome[0]["reason"] == "no better loss for 3 steps"

    assert steps_in(tmp_path / "the chief's directory")[-1] == 3  # it is enough

    (first, _), (second, _) = printed["random"], printed["random again"]  # each rank has its own state
    for rank in (0, 1):
        assert second[rank]["drawn"] == first[rank]["drawn_next"]
    assert second[0]["drawn"] != second[1]["drawn"]


def test_waits_for_the_chief_and_for_the_last_checkpoint_are_reported_and_have_limits_of_their_own(tmp_path):
    """The wait for the chief at the start has the limit wait_for_chief_s; that for the last checkpoint has none."""
    trainings = [
        (tmp_path / "late", {"late_s": 4.5, "max_steps": 2}),
        (tmp_path / "slow", {"slow": True, "max_steps": 2}),
        (tmp_path / "too late", {"late_s": 8, "max_steps": 4, "wait_for_chief_s": 4}),
    ]
    _, err = run_all(trainings, env={"ALLRED_TIMEOUT_S": "3", "ALLRED_STALL_WARNING_S": "0.5"}, code=1)
    assert steps_in(tmp_path / "late") == steps_in(tmp_path / "slow") == [2], err
    waits = re.findall(r"rank 1 has waited for \d+ s in (.*)", err)
    assert len({*waits}) >= 2, err  # for the chief, and for the last checkpoint
    assert "in Python at session_program.py" in err, err
    assert "not complete after 4 s" in err, err


# ---- signals


@pytest.mark.parametrize("mpi", MPICH_BY_DEFAULT)
def test_a_signal_to_one_rank_ends_the_loop_on_all(mpi, tmp_path):
    signals = ["SIGTERM", "SIGINT", "SIGUSR1"]
    printed, _ = run_all([(tmp_path / name, {"fault": name}) for name in signals], mpi)
    for name, (found, outcome) in zip(signals, printed, strict=True):
        assert [found[rank]["step"] for rank in (0, 1)] == [8, 8]
        assert [found[rank]["at"] for rank in (0, 1)] == [8, 8]
        assert [outcome[rank]["reason"] for rank in (0, 1)] == [name, name]
        assert steps_in(tmp_path / name) == [8]


@pytest.mark.parametrize("mode", ["sync", pytest.param("ps", marks=full)])
@pytest.mark.parametrize("fault", [pytest.param("mpirun SIGINT", marks=full), "mpirun SIGTERM"])
def test_a_signal_to_mpich_s_mpirun_ends_the_loop(mode, fault, tmp_path):
    """It passes it on to all ranks, servers included."""
    result = run(tmp_path, 2 + (mode == "ps"), mode=mode, fault=fault, count=10**6, sleep_s=0.01)
    later = mode == "ps"  # the last worker writes one more if it has made updates after the chief's
    assert len(steps_in(tmp_path)) in (1, 1 + later), result.text
    assert not any(outcome["failed"] for outcome in result.outcome.values()), result.text
    assert result.outcome.keys() >= {0, 1}, result.text


# ---- failures


@pytest.mark.parametrize(
    ("mpi", "on", "fault", "code"),
    [
        ("mpich", 0, "raise", 1),
        ("mpich", 1, "exit", 3),
        pytest.param("openmpi", 1, "exit", 3, marks=full),
        pytest.param("openmpi", 1, "raise", 1, marks=full),
        pytest.param("openmpi", 0, "exit", 3, marks=full),
    ],
)
def test_the_rank_that_fails_writes_the_last_checkpoint(mpi, on, fault, code, tmp_path):
    """Of the step before: the batch at hand has not been trained on."""
    result = run(tmp_path, 2, mpi, fault=fault, on=on)
    assert result.code == code, result.text
    assert steps_in(tmp_path) == [7], result.text
    assert all(outcome["failed"] for outcome in result.outcome.values())
    assert result.outcome[on]["reason"] == {"raise": "ValueError", "exit": "SystemExit"}[fault]


@pytest.mark.parametrize("mode", ["sync", pytest.param("ps", marks=full)])
def test_when_all_fail_at_once_one_writes_it(mode, tmp_path):
    result = run(tmp_path, 3, mode=mode, fault="raise", on="all")
    assert result.code == 1, result.text
    assert "no checkpoint was written" not in result.err, result.text
    assert all(outcome["failed"] for outcome in result.outcome.values())
    assert len(steps_in(tmp_path)) == 1 or mode == "ps", result.text
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")], result.text


FIRST_STEP = """
import sys
import numpy as np
import allred

allred.init(banner=False)
opt, w = allred.distributed(allred.optim.SGD(lr=1.0)), np.zeros(3)
with allred.Session(sys.argv[1], max_steps=6) as session:
    session.track(params=w, optimizer=opt)
    for _ in session.steps(range(6)):
        if allred.rank() == 1:
            while sys.argv[2] == "ps" and opt.statistics().servers[0].gradients < 6:
                pass  # the other worker trains
            raise ValueError("boom")
        opt.step(w, np.ones(3))
"""


@pytest.mark.parametrize(
    ("mode", "step", "words"),
    [
        (
            "sync",
            None,
            "no checkpoint was written at the end: no update has been made since step 0, where training began",
        ),
        pytest.param("ps", 6, "the last checkpoint is ", marks=full),  # of the other worker's updates
    ],
)
def test_a_rank_that_fails_in_its_first_step(mode, step, words, tmp_path):
    result = mpirun(2 + (mode == "ps"), "-c", FIRST_STEP, tmp_path, mode, env={"ALLRED_MODE": mode})
    assert result.code == 1, result.text
    assert f"allred: {words}" in result.err, result.text
    assert "None" not in result.err, result.text
    assert steps_in(tmp_path) == [step] * (step is not None), result.text


def test_an_update_that_is_cut_short_is_no_step(tmp_path):
    result = run(tmp_path, torn=5, save_steps=4, at=4, awaits="step-00000004")
    assert result.code == 1, result.text
    assert steps_in(tmp_path) == [4], result.text
    assert "an update was interrupted; the newest checkpoint is of an earlier step" in result.err, result.text


@pytest.mark.parametrize("mpi", MPIS)
def test_a_rank_that_is_killed(mpi, tmp_path):
    result = run(tmp_path, 2, mpi, fault="SIGKILL", save_steps=4, at=5, awaits="step-00000004")
    assert result.code != 0
    assert steps_in(tmp_path) == [4], result.text
    again = run(tmp_path, 1, mpi, max_steps=9)
    assert (again.found[0]["restored"], again.found[0]["at"]) == (4, 9), again.text


# ---- mode ps


@pytest.mark.parametrize("mpi", MPIS)
def test_parameter_servers_and_back(mpi, tmp_path):
    first = run(tmp_path, 3, mpi, "ps", max_steps=15, env={"ALLRED_CONSISTENCY": "sync"})
    assert first.code == 0, first.text
    assert {found["step"] for found in first.found.values()} == {15}
    second = run(tmp_path, 1, mpi, "sync", max_steps=20)
    assert second.found[0]["restored"] == 15, second.text
    third = run(tmp_path, 3, mpi, "ps", max_steps=25, env={"ALLRED_CONSISTENCY": "sync", "ALLRED_NUM_PS": "2"})
    assert third.found[0]["restored"] == 20, third.text
    means = [1.5] * 15 + [1.0] * 10  # of two workers, then of one
    velocities = itertools.accumulate(means, lambda before, mean: 0.5 * before + mean)
    assert third.found[0]["a"] == pytest.approx(-sum(velocities), rel=1e-6)


@pytest.mark.parametrize("fault", ["SIGTERM", pytest.param("SIGINT", marks=full)])
def test_a_signal_to_a_worker_ends_all_workers(fault, tmp_path):
    result = run(tmp_path, 3, mode="ps", fault=fault, count=10**6, sleep_s=0.002)
    assert result.code == 0, result.text
    assert result.outcome.keys() == {0, 1}
    assert len(steps_in(tmp_path)) == 1, result.text
    assert len({(found["step"], found["a"]) for found in result.found.values()}) == 1, result.text


def test_a_worker_that_fails_has_a_checkpoint_written(tmp_path):
    result = run(tmp_path, 3, mode="ps", fault="raise", count=10**6, sleep_s=0.002)
    assert result.code == 1, result.text
    assert all(outcome["failed"] for outcome in result.outcome.values())
    assert result.outcome.keys() == {0, 1}
    [step] = steps_in(tmp_path)
    assert step >= 7
    again = run(tmp_path, 1, max_steps=step)
    assert again.found[0]["restored"] == step, again.text


def test_the_last_checkpoint_where_the_others_go_on(tmp_path):
    go_on = {"ALLRED_WORKER_FAILURE": "go_on"}
    result = run(tmp_path, 4, mode="ps", fault="raise", max_steps=200, count=10**6, sleep_s=0.002, env=go_on)
    assert result.code == 1, result.text  # that of the worker that failed
    assert result.found.keys() == {0, 2}, result.text
    assert result.found[0]["step"] == result.found[2]["step"] == steps_in(tmp_path)[-1] >= 200


@pytest.mark.parametrize("mpi", MPIS)
def test_the_job_waits_for_what_is_being_written(mpi, tmp_path):
    """All fail by an error after which nothing more is written, while the chief is in the middle of a checkpoint."""
    result = run(tmp_path, mpi=mpi, nan_at=6, save_steps=5, write_s=8)
    assert result.code == 1, result.text
    assert steps_in(tmp_path) == [5], result.text
    assert "rank 0 still writes; the job ends when it is done" in result.err, result.text


@full  # by default that of a training which ends well, above
def test_saving_has_no_time_limit(tmp_path):
    result = run(tmp_path, fault="raise", slow=True, env={"ALLRED_TIMEOUT_S": "3"})
    assert steps_in(tmp_path) == [7], result.text
    assert result.code == 1
    assert (result.outcome[0]["reason"], result.outcome[1]["reason"]) == ("RemoteRankError", "ValueError"), result.text


# ---- mistakes


DIFFER = """
import sys
import numpy as np
import allred

allred.init(banner=False)
directory = sys.argv[1]
for arguments in ({"max_steps": 20 - 15 * allred.rank()}, {"checkpoint_dir": directory + allred.rank() * "x"}):
    try:
        with allred.Session(**{"checkpoint_dir": directory, **arguments}) as session:
            session.track(params=np.zeros(3), optimizer=allred.distributed(allred.optim.SGD(lr=1.0)))
    except allred.MismatchError as error:
        if allred.rank() == 1: print(error, flush=True)
"""


def test_sessions_that_differ(tmp_path):
    result = mpirun(2, "-c", DIFFER, tmp_path)
    assert result.code == 0, result.text
    steps, directory = result.out.splitlines()
    assert steps == "Session: max_steps is 5 on rank 1, but 20 on rank 0; give all ranks the same"
    expected = (
        f"Session: checkpoint_dir is '{tmp_path}x' on rank 1, but '{tmp_path}' on rank 0; give all ranks the same"
    )
    assert directory.startswith(expected)
