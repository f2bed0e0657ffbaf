"""Cores and BLAS threads of the ranks of a node: the warning, and the share of a rank."""

import pytest
import worlds

from allred.cluster import processors
from allred.cluster.processors import Cores


def rank(cores, threads=1, quota=None):
    return Cores(frozenset(cores), 8, quota, threads, "openblas", True)


@pytest.mark.parametrize(
    ("ranks", "nodes", "words"),
    [
        ([rank(range(8), 8)], [0], None),
        ([rank(range(8), 4)] * 2, [0, 0], None),
        ([rank({0}, 1), rank({1}, 1)], [0, 0], None),
        ([rank(range(8), 8)] * 2, [0, 1], None),
        (
            [rank(range(8), 8)] * 2,
            [0, 0],
            "2 ranks with 16 BLAS threads on 8 cores: steps may take many times as long; export OMP_NUM_THREADS=4 "
            "before the start",
        ),
        ([rank(range(8), 8, quota=2.0)], [0], "1 rank with 8 BLAS threads on 2 cores: "),
        ([rank(range(2))] * 3, [0] * 3, "as long; start at most 2 ranks here"),
        ([rank({0}, 2)] * 2, [0] * 2, "on 1 core: steps may take many times as long; export OMP_NUM_THREADS=1 before "),
        ([rank(range(8), 8)] * 4, [5, 3, 3, 3], "3 ranks with 24 BLAS threads on 8 cores of one node: "),
    ],
)
def test_more_threads_than_cores_cause_a_warning(ranks, nodes, words):
    found = processors.oversubscription(ranks, nodes)
    assert (found is None) == (words is None), found
    assert words is None or words in found


@pytest.mark.parametrize(
    ("ranks", "nodes", "share"),
    [
        ([rank(range(8))], [0], 8),
        ([rank(range(8))] * 3, [0] * 3, 2),
        ([rank(range(8))] * 3, [1, 0, 0], 8),
        ([rank({0, 1}), rank({2, 3})], [0, 0], 2),
        ([rank({0}), rank({1, 2, 3})], [0, 0], 1),
        ([rank(range(8), quota=4.0)] * 2, [0, 0], 2),
        ([rank(range(2))] * 5, [0] * 5, 1),
    ],
)
def test_the_share_of_the_first_rank(ranks, nodes, share):
    assert processors.share(ranks, nodes, 0) == share


def test_without_a_world_all_cores_of_the_process():
    assert processors.cores_per_rank() == processors.usable_cores([processors.own_cores()])
    with worlds.installed(cores=3):
        assert processors.cores_per_rank() == 3
