"""The doctor's findings about cores and memory, from given facts."""

import dataclasses

import pytest
from doctor_facts import GiB, MiB, finding_about, rank_facts, verdicts

from allred.cluster.processors import Cores
from allred.doctor import host
from allred.doctor.findings import FAIL, NOTE, OK, WARN, Finding

# ---- cores

OMP = ("OMP_NUM_THREADS",)


def facts_of_cores(allowed, threads=1, quota=None, set_by=()):
    return Cores(frozenset(allowed), 8, quota, threads, "openblas", set_by=set_by)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ([facts_of_cores(range(8))] * 4, {"binding": OK, "cores": OK, "BLAS threads": OK}),
        ([facts_of_cores(range(8), threads=8)] * 4, {"binding": OK, "cores": OK, "BLAS threads": OK}),
        ([facts_of_cores(range(8), 8, set_by=OMP)] * 4, {"binding": OK, "cores": OK, "BLAS threads": WARN}),
        ([facts_of_cores(range(8), threads=8)], {"binding": OK, "cores": OK, "BLAS threads": OK}),
        ([facts_of_cores({0}), facts_of_cores({1})], {"binding": OK, "cores": OK, "BLAS threads": OK}),
        ([facts_of_cores({0}), facts_of_cores({0})], {"binding": WARN, "cores": WARN, "BLAS threads": OK}),
        ([facts_of_cores({0, 1}), facts_of_cores({1, 2})], {"binding": WARN, "cores": OK, "BLAS threads": OK}),
        (
            [facts_of_cores({0}, 3, set_by=OMP), facts_of_cores({1, 2, 3}, 1)],
            {"binding": OK, "cores": OK, "BLAS threads": WARN},
        ),
        (
            [facts_of_cores(range(8), 1), facts_of_cores(range(8), 2)],
            {"binding": OK, "cores": OK, "BLAS threads": WARN},
        ),
        ([facts_of_cores(range(2))] * 3, {"binding": OK, "cores": WARN, "BLAS threads": OK}),
        (
            [facts_of_cores(range(8), quota=2.0)] * 2,
            {"binding": OK, "cores": OK, "cpu quota": WARN, "BLAS threads": OK},
        ),
        (
            [facts_of_cores(range(8), quota=2.0)] * 3,
            {"binding": OK, "cores": WARN, "cpu quota": WARN, "BLAS threads": OK},
        ),
    ],
)
def test_cores_and_threads(facts, expected):
    assert verdicts(host.diagnose_processors(rank_facts(*facts))) == expected


def test_the_finding_says_what_init_changes_or_who_has_set_the_threads():
    free, by_user = facts_of_cores(range(8), 8), facts_of_cores(range(8), 8, set_by=OMP)
    found = finding_about(host.diagnose_processors(rank_facts(*[free] * 4)), "BLAS threads")
    assert (found.found, found.remedy) == ("8 threads (openblas); init() limits them to 2 threads", "")
    found = finding_about(host.diagnose_processors(rank_facts(*[by_user] * 4)), "BLAS threads")
    assert found.found == "8 threads (openblas); in total 32 threads on 8 cores of nodeA"
    assert found.remedy == "unset OMP_NUM_THREADS before mpirun; init() limits the threads"


def test_ranks_of_several_hosts_are_counted_by_host():
    facts = [facts_of_cores(range(2))] * 4
    assert finding_about(host.diagnose_processors(rank_facts(*facts, hosts="aabb")), "cores") == Finding(
        OK, "cores", "enough for the ranks on each of the 2 hosts"
    )
    assert (
        finding_about(host.diagnose_processors(rank_facts(*facts, hosts="aaab")), "cores").found
        == "3 ranks on 2 cores of a"
    )


# ---- memory

MEMORY = host.MemoryFacts(GiB, GiB, 64 * GiB, None)


@pytest.mark.parametrize(
    ("change", "topic", "verdict"),
    [
        ({}, "/dev/shm", OK),
        ({"shm_free": 32 * MiB}, "/dev/shm", OK),
        ({"shm_free": 32 * MiB - 1}, "/dev/shm", WARN),
        ({"shm_bytes": None}, "/dev/shm", FAIL),
        ({"unused_files": 1, "unused_bytes": 4096}, "/dev/shm", NOTE),
        ({"cgroup_bytes": 4 * GiB}, "memory", NOTE),
        ({"cgroup_bytes": 65 * GiB}, "memory", OK),
    ],
)
def test_memory(change, topic, verdict):
    lines = host.diagnose_memory(rank_facts(*[dataclasses.replace(MEMORY, **change)] * 2))
    assert finding_about(lines, topic).verdict == verdict
    assert [one.topic for one in lines] == ["/dev/shm", "memory"]


def test_files_of_killed_jobs():
    some = dataclasses.replace(MEMORY, unused_files=2, unused_bytes=4 * MiB)
    line = finding_about(host.diagnose_memory(rank_facts(some)), "/dev/shm")
    assert line.found.endswith("; 4 MiB in 2 files of killed MPICH jobs")
    assert line.remedy == "python -m allred.watch.shm_files"
    line = finding_about(host.diagnose_memory(rank_facts(dataclasses.replace(some, shm_free=0))), "/dev/shm")
    assert line.verdict == WARN
    assert line.remedy.startswith("python -m allred.watch.shm_files; or docker run --shm-size=1g")
