"""Collectives among some of the ranks: each test is of all ranks, of which those in a set do something of their own."""

import itertools
import re

import numpy as np
import pytest

import allred
from allred import ProcessSet
from allred.comm import process_set
from allred.errors import InputError, MismatchError, NonFiniteError

pytestmark = pytest.mark.mpi


def sets_with(rank, size):
    """All sets that a rank is in, in the same order on every rank."""
    ranks = range(size)
    return [s for n in range(1, size + 1) for s in itertools.combinations(ranks, n) if rank in s]


def test_all_collectives_in_all_sets(rank, size):
    for ranks in sets_with(rank, size):
        members = ProcessSet(reversed(ranks))
        here, n = ranks.index(rank), len(ranks)
        assert (members.ranks, members.rank(), members.size(), members.included()) == (ranks, here, n, True)
        x, total = np.full(5, float(rank)), float(sum(ranks))
        assert allred.allreduce(x, allred.Sum, process_set=members).tolist() == [total] * 5
        assert allred.allreduce_(x.copy(), process_set=members).tolist() == [total / n] * 5
        pair = allred.grouped_allreduce([x, x[:1]], allred.Max, process_set=members)
        assert [y.tolist() for y in pair] == [[ranks[-1]] * 5, [ranks[-1]]]
        assert allred.grouped_allreduce_([x.copy()], allred.Min, process_set=members)[0].tolist() == [ranks[0]] * 5
        assert allred.broadcast(x, root=ranks[-1], process_set=members).tolist() == [ranks[-1]] * 5
        assert allred.broadcast_(x.copy(), root=ranks[0], process_set=members).tolist() == [ranks[0]] * 5
        assert allred.allgather(x[:1], process_set=members).tolist() == list(ranks)
        assert allred.reducescatter(np.full(n, 2.0), allred.Sum, process_set=members).tolist() == [2.0 * n]
        assert allred.alltoall(np.full(n, rank), process_set=members)[0].tolist() == list(ranks)
        assert allred.allgather_object(rank, process_set=members) == list(ranks)
        assert allred.broadcast_object(rank, root=ranks[-1], process_set=members) == ranks[-1]
        allred.barrier(process_set=members)
    assert allred.allreduce(1.0, allred.Sum) == size


def test_disjoint_sets_do_not_wait_for_each_other(rank, size):
    """Those of the second begin when those of the first are done."""
    if size < 4:
        pytest.skip("needs 4 ranks")
    low, high = ProcessSet([0, 1]), ProcessSet([2, 3])
    for members in (low, high):
        if members.included():
            for _ in range(100):
                assert allred.allreduce(np.ones(1000), allred.Sum, process_set=members)[-1] == 2
        allred.barrier()


def test_a_communicator_of_the_users_own(rank, size):
    from mpi4py import MPI

    half = MPI.COMM_WORLD.Split(rank % 2, -rank)
    members = ProcessSet(half)
    assert members.ranks == tuple(range(rank % 2, size, 2))
    assert allred.allreduce(1.0, allred.Sum, process_set=members) == half.Get_size()
    half.Free()


def test_equal_sets_share_a_communicator(rank, size):
    one, other = ProcessSet([rank]), ProcessSet(np.array([rank]))
    assert one == other
    assert hash(one) == hash(other)
    assert one.communicator() is other.communicator()
    assert ProcessSet(range(size)).communicator() is allred.comm.functions.current()
    before = len(process_set.communicators())
    ProcessSet([rank]).communicator()
    assert len(process_set.communicators()) == before


def test_who_is_not_in_it(rank, size):
    if size < 2:
        pytest.skip("needs 2 ranks")
    others = ProcessSet([r for r in range(size) if r != rank])
    assert not others.included()
    message = re.escape(f"rank {rank} is not in {others}; call this only where included() is true")
    with pytest.raises(InputError, match=message):
        allred.allreduce(1.0, process_set=others)
    opt = allred.distributed(allred.optim.SGD(lr=1.0), process_set=others)
    with pytest.raises(InputError, match=message):
        opt.step([np.zeros(1)], [np.zeros(1)])
    assert allred.allreduce(1.0, allred.Sum) == size


def test_what_are_no_ranks(rank, size):
    for wrong in ([], [-1], [0, 0], [0.5], 3, "01"):
        with pytest.raises(InputError, match="expected different ranks"):
            ProcessSet(wrong)
    with pytest.raises(InputError, match=f"there are only {size} ranks; the last one is {size - 1}"):
        allred.barrier(process_set=ProcessSet([rank, size]))
    with pytest.raises(InputError, match=r"must be an allred\.ProcessSet"):
        allred.distributed(allred.optim.SGD(lr=1.0), process_set=[0])


def test_errors_name_ranks_of_the_world(rank, size):
    if size < 3:
        pytest.skip("needs 3 ranks")
    members = ProcessSet([1, 2])
    if members.included():
        with pytest.raises(MismatchError, match=r"float64 \(1,\) on rank 1; .* float64 \(2,\) on rank 2"):
            allred.allreduce(np.zeros(rank), process_set=members)
        with pytest.raises(InputError, match="rank 2: root=0 is not a rank; expected one of 1, 2"):
            allred.broadcast(np.zeros(1), root=0 if rank == 2 else 1, process_set=members)
        opt = allred.distributed(allred.optim.SGD(lr=1.0), process_set=members)
        with pytest.raises(NonFiniteError, match="'0' on rank 2"):
            opt.step([np.zeros(1)], [np.full(1, np.nan if rank == 2 else 0.0)])
    allred.barrier()


@pytest.mark.parametrize("gradients", [False, True])
def test_two_halves_train_apart(rank, size, gradients):
    halves = [ProcessSet(range(start, size, 2)) for start in range(min(2, size))]
    mine = halves[rank % len(halves)]
    params, grad = {"w": np.full(3, float(rank))}, {"w": np.full(3, float(rank))}
    opt = allred.distributed(allred.optim.SGD(lr=1.0), process_set=mine)
    opt.broadcast(params)
    assert params["w"].tolist() == [mine.ranks[0]] * 3
    mean = sum(mine.ranks) / mine.size()
    if gradients:
        function = allred.distributed.gradients(lambda: grad, process_set=mine)
        assert function()["w"].tolist() == [mean] * 3
    else:
        opt.step(params, grad, samples=rank + 1)
        weighted = sum(r * (r + 1) for r in mine.ranks) / sum(r + 1 for r in mine.ranks)
        assert params["w"] == pytest.approx(mine.ranks[0] - weighted)


def test_patience_is_for_sets_too(rank, size):
    members = ProcessSet([rank])
    queue = members.communicator().queue
    before = queue.timeout_s
    with allred.patience(5):
        assert queue.timeout_s == 5
    assert queue.timeout_s == before


def test_again_after_shutdown(rank, size):
    members = ProcessSet([rank])
    first = members.communicator()
    allred.shutdown()
    allred.init(banner=False)
    assert allred.allreduce(2.0, process_set=members) == 2.0
    assert size == 1 or members.communicator() is not first


@pytest.mark.parametrize("kind", ["allreduce", "allgather", "alltoall", "broadcast"])
@pytest.mark.parametrize("used_before", [False, True])
def test_a_wait_in_a_set_moves_what_is_under_way_outside(rank, size, kind, used_before):
    """Rank 0 waits for an operation of all first, the last rank for one of their set. Both have started both."""
    if size < 3:
        pytest.skip("needs 3 ranks")
    ends = ProcessSet([0, size - 1])
    if used_before and ends.included():
        allred.barrier(process_set=ends)
    work = getattr(allred, f"{kind}_async")(np.ones(70_000 * size))
    if rank == 0:
        work.wait()
    if ends.included():
        assert allred.allreduce(np.ones(70_000), allred.Sum, process_set=ends)[-1] == ends.size()
    work.wait()
