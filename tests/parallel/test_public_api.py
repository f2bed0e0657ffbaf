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


def test_every_dtype_within_a_process_set(rank, size):
    """Without waiting in between; and an operation that lacks a meaning for them is an error on all members."""
    members = allred.ProcessSet({0, size - 1})
    if not members.included():
        return
    ranks, record = sorted({0, size - 1}), np.dtype([("id", "<u2"), ("at", "M8[s]")])
    works = []
    for dtype in ("u2", "u4", "u8", "c8", "c16", "M8[D]", "U3", "S2", "g", record):
        values = np.arange(1, 4).astype(np.int64) + rank
        mine = np.array([(n, n) for n in values.tolist()], dtype) if dtype == record else values.astype(dtype)
        works.append((mine, allred.broadcast_async(mine, ranks[-1], process_set=members)))
        works.append((mine, allred.broadcast_async_(mine.copy(), ranks[-1], process_set=members)))
        gathered = allred.allgather_async(mine, process_set=members)
        both = allred.alltoall_async(np.repeat(mine[:1], len(ranks)), process_set=members)
        if np.dtype(dtype).kind in "uc":
            total = allred.allreduce_async(mine, allred.Sum, process_set=members)
            assert total.wait().tolist() == np.sum([np.arange(1, 4) + r for r in ranks], axis=0).tolist()
            (mean,) = allred.grouped_allreduce_async([mine.astype("c8")], process_set=members).wait()
            np.testing.assert_allclose(mean, np.arange(1, 4) + sum(ranks) / len(ranks))
        parts = np.split(gathered.wait(), len(ranks))
        assert parts[ranks.index(rank)].tolist() == mine.tolist()
        assert both.wait()[0].tolist() == [part[0] for part in np.array(parts).tolist()]
        for _, work in works:
            assert work.wait().tolist() == parts[-1].tolist()
        works.clear()
    words = rf"allreduce: (rank {size - 1}: )?Average of uint16 is not defined"
    with pytest.raises(allred.InputError, match=words):
        allred.allreduce(np.ones(3, "u2" if rank == size - 1 else "f4"), process_set=members)


def test_states_of_random_generators(rank, size):
    """As objects; and the keys, arrays of uint32 and uint64, in place."""
    old, new = np.random.RandomState(rank), np.random.Generator(np.random.MT19937(rank))
    expected_old, expected_new = np.random.RandomState(size - 1), np.random.Generator(np.random.MT19937(size - 1))
    old.set_state(allred.broadcast_object(old.get_state(), size - 1))
    new.bit_generator.state = allred.broadcast_object(new.bit_generator.state, size - 1)
    for found, expected in ((old, expected_old), (new, expected_new)):
        np.testing.assert_array_equal(found.normal(size=5), expected.normal(size=5))
    old.random_sample(rank)
    kind, key, *rest = old.get_state()
    old.set_state((kind, allred.broadcast(key), *allred.broadcast_object(rest)))
    state = new.bit_generator.state
    allred.broadcast_(state["state"]["key"], size - 1)
    new.bit_generator.state = state
    for found in (old, new):
        assert len({tuple(each) for each in allred.allgather_object(found.random(size=5).tolist())}) == 1


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
