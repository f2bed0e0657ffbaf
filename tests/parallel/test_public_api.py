"""The functions of `allred` itself, over the world that init() joined."""

import numpy as np
import pytest

import allred
from allred import world

pytestmark = pytest.mark.mpi


def test_numbers(rank, size):
    assert (allred.world_rank(), allred.world_size()) == (rank, size)
    assert allred.allgather_object(rank) == list(range(size))
    assert (allred.local_rank(), allred.local_size(), allred.cross_rank(), allred.cross_size()) == (rank, size, 0, 1)


def test_the_collectives_as_functions(rank, size):
    total = size * (size - 1) / 2
    x = np.full(4, float(rank))
    assert allred.allreduce(x).tolist() == [total / size] * 4
    assert allred.allreduce_(x.copy(), allred.Sum).tolist() == [total] * 4
    assert [y.tolist() for y in allred.grouped_allreduce([x, x[:1]], allred.Max)] == [[size - 1.0] * 4, [size - 1.0]]
    group = [x.copy(), x.copy()]
    assert all(a is b for a, b in zip(allred.grouped_allreduce_(group), group, strict=True))
    assert allred.broadcast(x, root=size - 1).tolist() == [size - 1.0] * 4
    assert allred.broadcast_(x.copy()).tolist() == [0.0] * 4
    assert allred.allgather(x[:1]).tolist() == [float(r) for r in range(size)]
    assert allred.reducescatter(np.full(size, 2.0), allred.Sum).tolist() == [2.0 * size]
    assert allred.alltoall(np.full(size, rank))[0].tolist() == list(range(size))
    allred.barrier()


def test_objects(rank, size):
    things = [{"rank": r, "list": [None] * r, "text": "ä" * 1000 * r} for r in range(size)]
    assert allred.allgather_object(things[rank]) == things
    for root in range(size):
        assert allred.broadcast_object(things[rank], root) == things[root]
        assert allred.broadcast_object(things[root] if rank == root else None, root) == things[root]


def test_init_twice_and_again_after_shutdown(rank, size):
    with pytest.raises(
        allred.AllredError, match=r"init\(\) was called already; drop the second call, or call allred.shut"
    ):
        allred.init()
    assert allred.is_initialized()
    allred.shutdown()
    assert not allred.is_initialized()
    for call in (allred.rank, allred.size, allred.shutdown, allred.barrier, lambda: allred.allreduce(1.0)):
        with pytest.raises(allred.NotInitializedError, match=r"call allred.init\(\) first"):
            call()
    allred.init(banner=False)
    assert allred.allreduce(1.0, allred.Sum) == size


def test_a_communicator_of_the_users_own(rank, size):
    from mpi4py import MPI

    allred.shutdown()
    half = MPI.COMM_WORLD.Split(rank % 2, -rank)  # in reverse order
    allred.init(half, banner=False)
    try:
        assert (allred.rank(), allred.size()) == (half.Get_rank(), half.Get_size())
        assert allred.allgather_object(rank) == [r for r in reversed(range(size)) if r % 2 == rank % 2]
        half.barrier()  # still the user's, and no message of allred's is on it
    finally:
        allred.shutdown()
        half.Free()
    mine = [other for other in reversed(range(size)) if other % 2 == rank % 2]
    allred.init(mine, banner=False)
    assert (allred.rank(), allred.size()) == (mine.index(rank), len(mine))
    assert allred.allgather_object(rank) == mine
    allred.shutdown()
    with pytest.raises(
        allred.InputError, match=r"expected a list of different ranks from 0 to \d that contains this one"
    ):
        allred.init([rank, size])
    for bad in (3, half, MPI.COMM_NULL):  # half was freed
        with pytest.raises(allred.InputError, match=r"init\(comm=...\) takes an mpi4py intracommunicator or a list"):
            allred.init(bad)
    allred.init(banner=False)


def test_settings_that_differ_are_an_error_on_all_ranks(rank, size):
    allred.shutdown()
    try:
        if size > 1:
            with pytest.raises(allred.ConfigError, match=rf"timeout_s is 1800.0 on rank 0 but 5.0 on rank {size - 1}"):
                allred.init(timeout_s=5 if rank == size - 1 else None)
            with pytest.raises(allred.ConfigError, match=rf"rank {size - 1}: init\(mode='x'\) is not available"):
                allred.init(mode="x" if rank == size - 1 else None)
        with pytest.raises(allred.ConfigError, match=r"^init\(backend='gloo'\) is not available; choose one of auto"):
            allred.init(backend="gloo")
        assert not allred.is_initialized()
    finally:
        allred.init(banner=False)
    assert allred.allreduce(1.0, allred.Sum) == size


def test_the_chiefs_settings_hold_everywhere(rank):

    allred.shutdown()
    allred.init(banner=False, bucket_bytes="64KiB" if rank == 0 else None)
    assert world.config().bucket_bytes == 65536
    allred.shutdown()
    allred.init(banner=False)
