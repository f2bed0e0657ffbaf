"""Cores and threads of the ranks of a node: the share of a rank, its limit of threads, and the warning."""

import pytest
import worlds

from allred.cluster import processors
from allred.cluster.processors import Cores

OMP = ("OMP_NUM_THREADS",)


def rank(cores, threads=1, quota=None, **more):
    return Cores(frozenset(cores), 8, quota, threads, "openblas", **more)


@pytest.mark.parametrize(
    ("ranks", "nodes", "words"),
    [
        ([rank(range(8), 8)], [0], None),
        ([rank(range(8), 4, set_by=OMP)] * 2, [0, 0], None),
        ([rank({0}, 1), rank({1}, 1)], [0, 0], None),
        ([rank(range(8), 8)] * 2, [0, 1], None),
        ([rank(range(8), 8)] * 2, [0, 0], None),  # init() limits them
        ([rank({0}, 2)] * 2, [0] * 2, "2 ranks with 2 BLAS threads on 1 core: steps may take many times as long; "),
        (
            [rank(range(8), 8, set_by=OMP)] * 2,
            [0, 0],
            "2 ranks with 16 BLAS threads on 8 cores: steps may take many times as long; unset OMP_NUM_THREADS",
        ),
        ([rank(range(8), 8, quota=2.0)], [0], "1 rank with 8 BLAS threads on 2 cores: steps may take many times as "
         "long; export OMP_NUM_THREADS=2 before the start"),
        ([rank(range(2))] * 3, [0] * 3, "as long; start at most 2 ranks here"),
        ([rank({0}, 2, set_by=OMP)] * 2, [0] * 2, "; unset OMP_NUM_THREADS and start at most 1 rank here"),
        ([rank(range(8), 8, set_by=OMP)] * 4, [5, 3, 3, 3], "3 ranks with 24 BLAS threads on 8 cores of one node: "),
        ([rank(range(8), 8, chosen=6)] * 2, [0, 0], "2 ranks with 12 BLAS threads on 8 cores: steps may take many "
         "times as long; let the program set at most 4 threads, as with torch.set_num_threads"),
    ],
)  # fmt: skip
def test_more_threads_than_cores_after_init_cause_a_warning(ranks, nodes, words):
    found = processors.oversubscription(ranks, nodes)
    assert (found is None) == (words is None), found
    assert words is None or words in found


@pytest.mark.parametrize(
    ("ranks", "nodes", "limits"),
    [
        ([rank(range(8), 8)], [0], [None]),
        ([rank(range(8), 8, quota=2.0)], [0], [None]),
        ([rank(range(8), 8)] * 2, [0, 1], [None, None]),
        ([rank(range(8), 8)] * 3, [0, 0, 1], [4, 4, None]),
        ([rank(range(8), 8, quota=4.0)] * 2, [0, 0], [2, 2]),
        ([rank(range(8), 1)] * 2, [0, 0], [4, 4]),  # for torch, which may be loaded later
        ([rank({0}, 1), rank({1}, 1)], [0, 0], [None, None]),  # bound to a core each
        ([rank({0, 1}, 2), rank({2, 3}, 2)], [0, 0], [None, None]),
        ([rank({0}, 1), rank({1, 2, 3}, 3)], [0, 0], [None, None]),
        ([rank({0, 1}, 2, launched=4), rank({2, 3}, 2, launched=4)], [0, 0], [None, None]),  # and others elsewhere
        ([rank({0, 1}, 2), rank({1, 2}, 2)], [0, 0], [1, 1]),
        ([rank(range(2), 2)] * 5, [0] * 5, [1] * 5),
        ([rank(range(8), 8, set_by=OMP), rank(range(8), 8)], [0, 0], [None, 4]),
        ([rank(range(8), 8, launched=4)] * 2, [0, 0], [2, 2]),  # of a part of the ranks
        ([rank(range(8), 8, launched=4)], [0], [2]),
        ([rank(range(8), 8, launched=1)] * 2, [0, 0], [4, 4]),
        ([rank(range(8), 8, given=3)] * 2, [0, 0], [3, 3]),
    ],
)
def test_each_rank_of_a_node_is_limited_to_its_share(ranks, nodes, limits):
    assert processors.thread_limits(ranks, nodes) == limits


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
        ([rank(range(8), launched=4)], [0], 2),
        ([rank(range(8), given=2)] * 2, [0, 0], 2),
    ],
)
def test_the_share_of_the_first_rank(ranks, nodes, share):
    assert processors.share(ranks, nodes, 0) == share


def test_without_a_world_all_cores_of_the_process():
    assert processors.cores_per_rank() == processors.usable_cores([processors.own_cores()])
    with worlds.installed(cores=3):
        assert processors.cores_per_rank() == 3
