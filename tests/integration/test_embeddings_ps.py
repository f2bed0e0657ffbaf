"""Embedding tables on parameter servers, with real processes: over shared memory and MPI, in all policies."""

import json
import pathlib

import pytest
from harness import MPICH_BY_DEFAULT, full, mpirun
from test_ps import POLICIES
from test_ps import run as run_cases

PROGRAM = pathlib.Path(__file__).with_name("embeddings_program.py")


def run(cases, workers, servers=1, mpi="mpich", apart=False):
    """Return the results of cases, [name, arguments, options] (see embeddings_program.py), that run in one job."""
    return run_cases(cases, workers, servers, mpi, apart, program=PROGRAM)[0]


LAYOUTS = [(False, 1), (True, 2), pytest.param(False, 3, marks=full), pytest.param(True, 1, marks=full)]


@pytest.mark.parametrize("mpi", MPICH_BY_DEFAULT)
@pytest.mark.parametrize(("apart", "servers"), LAYOUTS)
def test_one_worker_gives_the_bits_of_one_process(apart, servers, mpi):
    cases = [
        ["training", {"optimizer": optimizer, "dtype": dtype}, POLICIES[policy]]
        for policy in ("async", "bounded", "sync")
        for optimizer, dtype in (("row-wise", "float32"), ("adam", "float16"))
    ]
    assert run(cases, 1, servers, mpi, apart) == [0.0] * len(cases)


@pytest.mark.parametrize(("apart", "servers"), LAYOUTS)
def test_steps_of_two_workers_are_their_mean(apart, servers):
    """Two numbers have one sum, in any order."""
    cases = [["training", {"optimizer": name, "dtype": "float32"}, POLICIES["sync"]] for name in ("row-wise", "adam")]
    assert run(cases, 2, servers, apart=apart) == [0.0, 0.0]


@pytest.mark.parametrize(("apart", "servers"), LAYOUTS)
def test_no_gradient_is_lost_or_applied_twice(apart, servers):
    policies = [*(POLICIES[name] for name in ("async", "bounded", "sync")), {"use_locking": False}]
    results = run([["no_gradient_is_lost", {}, policy] for policy in policies], 3, servers, apart=apart)
    assert results == pytest.approx([0.0] * 4, abs=1e-5)


@pytest.mark.parametrize(("apart", "servers"), LAYOUTS)
def test_rows_in_many_cells(apart, servers):
    ((smallest, largest, equal),) = run([["large", {}, {}]], 1, servers, apart=apart)
    assert (smallest, largest) == pytest.approx((2.0, 2.0), abs=1e-5)
    assert equal


@pytest.mark.parametrize(("apart", "servers"), LAYOUTS)
def test_prefetched_vectors(apart, servers):
    cases = [["prefetches", {"dim": dim, "count": count}, {}] for dim, count in ((6, 3000), (700, 20_000))]
    for moved in run(cases, 1, servers, apart=apart):
        assert moved == pytest.approx([1.0, 1.0, 1.0], abs=1e-5)


def test_a_worker_that_has_prefetched_does_not_hold_up_others():
    policies = [POLICIES["async"], POLICIES["bounded"]]
    assert run([["prefetches_and_waits", {}, policy] for policy in policies], 2) == [-1.0, -1.0]


@pytest.mark.parametrize("servers", [1, 2])
def test_checkpoints_with_the_rows_used_since_the_one_before(servers, tmp_path):
    ((rows, left, equal, bases, damage),) = run([["partial_checkpoints", {"directory": str(tmp_path)}, {}]], 1, servers)
    assert left == ["step-00000007", "step-00000008"]
    assert equal
    # The first one after the restore has all rows, and the one in another directory.
    assert bases == ["", "step-00000009", "", "step-00000009"], bases
    assert len(damage) == servers
    assert all("step-00000009" in line for line in damage), damage
    assert max(rows[number] for number in (1, 2, 4, 5, 7)) <= 11 < min(rows[3], rows[6]), rows


def test_a_checkpoint_is_based_on_none_of_another_directory(tmp_path):
    assert run([["two_directories", {"directory": str(tmp_path)}, {}]], 1) == [""]


def test_a_checkpoint_is_based_on_none_that_this_training_has_not_completed(tmp_path):
    bases = run([["failed_checkpoint", {"directory": str(tmp_path)}, {}]], 1, 2)
    assert bases == [["", "", "failed", ""]]


def test_errors_and_settings():
    cases = [[name, {}, {}] for name in ("errors", "skips", "learning_rate", "assigned")]
    texts, skipped, rates, assigned = run(cases, 1, 2)
    assert texts == [
        "InputError: table 'users', lookup(): call broadcast(params) of the optimizer before, on all workers",
        "InputError: table 'users', lookup(): ids must be 0 to 59, but id number 0 is 60",
        "InputError: table 'users', lookup(): ids must be integers, but are float64 (1,)",
        "NonFiniteError: opt.step(): the gradient of 'users' of worker 0 is not finite (id 3 has inf); nothing was "
        "pushed. Policies: raise, skip, ignore (ALLRED_NONFINITE)",
    ]
    assert skipped == [2, True, 0.0]
    assert rates == [-1.0, -2.0, -2.25]
    assert assigned


def test_steps_that_fail_and_what_is_refused():
    failed = [["failed_steps", {"nonfinite": policy}, {}] for policy in ("raise", "skip")]
    raised, skipped, text, texts = run([*failed, ["schedule", {}, {}], ["refusals", {}, {}]], 1)
    assert (raised, skipped) == (-2.0, -2.0)
    assert text.startswith("table 'rates': lr was changed to a schedule, which is not sent to the servers"), text
    assert texts[0] == "InputError: opt: every=2 cannot be used with tables; omit one of them"
    assert texts[1].startswith("InputError: allred.Embedding 'b': optimizer cannot be sent to the servers"), texts


def test_tables_that_differ_between_workers():
    result = mpirun(3, PROGRAM, 1, json.dumps([["different", {}, {}]]), timeout_s=60)
    assert "MismatchError: tables differ: worker 1 has" in result.text, result.text
    assert "seed=1" in result.text
