"""The plan is a pure function of its seed, covers all cases, and every wrong call in it differs from the right one."""

import collections
import dataclasses

import pytest
from plan import CHANGES, COMPRESSIONS, DTYPES, FAULTS, FLOATS, KINDS, called, changed, job_of

SEEDS = range(3000)


@pytest.fixture(scope="module")
def jobs():
    return [job_of(seed) for seed in SEEDS]


def test_the_same_seed_is_the_same_job(jobs):
    assert [job_of(seed) for seed in range(100)] == jobs[:100]
    assert len({dataclasses.replace(job, seed=0) for job in jobs}) > 0.99 * len(jobs)


def test_the_job_of_a_seed_does_not_change(jobs):
    """The job of a seed does not change between versions. A change of the plan requires new seeds for past failures."""
    assert str(jobs[1]) == "seed 1: 3 ranks, openmpi, backend auto, nodes 1,2, 5 operations, no fault"
    assert str(jobs[1].operations[0]) == "allgather 'layers.0.weight' int16 (0,) rows ((2,), (0,), (2,))"


def test_all_cases_are_covered(jobs):
    operations = [operation for job in jobs for operation in job.operations]
    assert {job.ranks for job in jobs} == {2, 3, 4}
    assert {job.mpi for job in jobs} == {"mpich", "openmpi"}
    assert {job.nodes for job in jobs} == {"none", "1,1", "2,1", "1,2", "1,1,1", "2,2", "3,1", "1,3", "1,2,1"}
    assert {job.rank_order for job in jobs} == {True, False}
    assert {operation.kind for operation in operations} == set(KINDS)
    assert {dtype for operation in operations for dtype in operation.dtypes} == set(DTYPES)
    assert {operation.op for operation in operations} == {"", "Sum", "Average", "Min", "Max", "Product"}
    assert {operation.compression for operation in operations} == set(COMPRESSIONS)
    assert {job.fault.kind for job in jobs} == set(FAULTS)
    wrong = {(job.operations[job.fault.operation].kind, job.fault.change) for job in jobs if job.fault.change}
    assert wrong == {(kind, change) for kind in KINDS for change in (*CHANGES.get(kind, ()), "next")}


def test_sizes_are_small_at_an_edge_and_large(jobs):
    sizes = collections.Counter()
    for job in jobs[:300]:
        for operation in job.operations:
            if operation.kind == "allreduce":
                count = 1
                for extent in operation.shapes[0]:
                    count *= extent
                sizes[min(count, 2000)] += 1
    assert all(sizes[count] for count in (0, 1, 7, 1009, 2000))


def test_reductions_are_defined(jobs):
    for job in jobs:
        for operation in job.operations:
            if operation.op == "Average":
                assert set(operation.dtypes) <= set(FLOATS)
            if operation.op == "Sum":
                assert "bool" not in operation.dtypes
            assert operation.kind != "reducescatter" or operation.shapes[0]


def test_faults_have_an_existing_rank_and_operation(jobs):
    for job in jobs:
        if job.fault.kind != "none":
            assert 0 <= job.fault.rank < job.ranks
            assert 0 <= job.fault.operation < len(job.operations)


def test_only_the_rank_of_the_fault_makes_a_wrong_call(jobs):
    for job in jobs:
        for index, operation in enumerate(job.operations):
            calls = [called(job, rank, index) for rank in range(job.ranks)]
            odd = [rank for rank, call in enumerate(calls) if call != operation]
            wrong = job.fault.kind == "wrong" and job.fault.operation == index
            assert odd == ([job.fault.rank] if wrong else [])


@pytest.mark.parametrize("change", sorted({change for changes in CHANGES.values() for change in changes}))
def test_a_changed_operation_differs(jobs, change):
    found = 0
    for job in jobs[:300]:
        for operation in job.operations:
            if change in CHANGES.get(operation.kind, ()) and operation.shapes:
                assert changed(operation, change, job.ranks) != operation
                found += 1
    assert found
