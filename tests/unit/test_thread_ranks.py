"""allred.testing.threads: ranks as threads of one process."""

import threading

import numpy as np
import pytest

import allred
from allred import native
from allred.errors import (
    AllredError,
    ConfigError,
    InputError,
    MismatchError,
    NonFiniteError,
    NotInitializedError,
    RemoteRankError,
)
from allred.testing import threads

pytestmark = pytest.mark.skipif(not native.available, reason="requires the C extension")


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before
    with pytest.raises(NotInitializedError):
        allred.rank()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_thread_is_a_rank(size):
    def numbers():
        return allred.rank(), allred.size(), allred.local_rank(), allred.world_size(), allred.is_chief()

    assert threads(size, numbers) == [(rank, size, rank, size, rank == 0) for rank in range(size)]


def test_collectives():
    def collectives(offset):
        mine = np.full(5, allred.rank() + offset, np.float32)
        work = allred.allreduce_async_(mine, allred.Sum)
        gathered = allred.allgather(np.arange(allred.rank()))
        work.wait()
        return mine.tolist(), gathered.tolist(), allred.broadcast_object({"rank": allred.rank()}, root=2)

    assert threads(3, collectives, 10) == [([33.0] * 5, [0, 0, 1], {"rank": 2})] * 3


def test_large_arrays_in_strides():
    def reduced():
        array = np.ones((600, 800), np.float32)[:, ::2]
        return allred.allreduce_(array, allred.Sum)

    for result in threads(2, reduced):
        assert (result == 2).all()


@pytest.mark.parametrize("size", [1, 2])
def test_gradients_that_are_not_finite(size):
    class Descent:
        def step(self, params, grads):
            params["w"] -= grads["w"]

    def train():
        everyone, one = allred.distributed(Descent()), allred.ProcessSet([0])
        alone = allred.distributed(Descent(), process_set=one)
        for opt in [everyone] + [alone] * one.included():
            params = {"w": np.ones(3)}
            with pytest.raises(NonFiniteError, match="'w' on rank 0"):
                opt.step(params, {"w": np.full(3, np.nan if allred.rank() == 0 else 1.0)})
            assert params["w"].tolist() == [1, 1, 1]

    threads(size, train)


def test_process_sets():
    def in_sets():
        ends, last = allred.ProcessSet([0, 2]), allred.ProcessSet([2])
        found = []
        for group in (ends, last, ends):
            if group.included():
                found.append(float(allred.allreduce(allred.rank(), allred.Sum, process_set=group)))
        allred.barrier()
        return found

    assert threads(3, in_sets) == [[2.0, 2.0], [], [2.0, 2.0, 2.0]]


def test_ranks_of_a_process_set_keep_their_global_ranks():
    def in_set():
        group = allred.ProcessSet([1, 2])
        if not group.included():
            return None
        opt, params = allred.distributed(allred.optim.SGD(lr=1.0), process_set=group, sharded=True), [np.zeros(50)]
        params[0][:] = allred.rank()
        opt.broadcast(params, root=2)
        opt.step(params, [np.full(50, float(allred.rank()))])
        return params[0].tolist()

    assert threads(3, in_set) == [None, [0.5] * 50, [0.5] * 50]


def test_join():
    def uneven():
        sums = []
        with allred.Join() as joined:
            for _ in range(allred.rank() + 1):
                sums.append(float(allred.allreduce(1.0, allred.Sum)))
        return joined.last, sums

    assert threads(3, uneven) == [(2, [3.0]), (2, [3.0, 2.0]), (2, [3.0, 2.0, 1.0])]


def test_the_first_error_is_raised_and_the_other_ranks_get_one():
    seen = {}

    def fails():
        if allred.rank() == 1:
            raise ZeroDivisionError("boom")
        try:
            allred.allreduce(np.ones(3))
        except RemoteRankError as error:
            seen[allred.rank()] = error
            raise

    with pytest.raises(ZeroDivisionError, match="boom") as caught:
        threads(3, fails)
    assert caught.value.__notes__ == ["allred.testing.threads: raised on rank 1 of 3"]
    assert {rank: error.rank for rank, error in seen.items()} == {0: 1, 2: 1}
    assert str(seen[0]).startswith("rank 1 failed: ZeroDivisionError: boom\nTraceback")


def test_a_rank_that_returns_early_is_an_error():
    with pytest.raises(MismatchError, match="the end of the function"):
        threads(2, lambda: allred.rank() and allred.barrier())


def test_different_arguments_are_an_error_and_the_next_call_works():
    with pytest.raises(MismatchError, match=r"float64 \(2,\) on rank 0; .* float64 \(3,\) on rank 1"):
        threads(2, lambda: allred.allreduce(np.ones(2 + allred.rank())))
    assert threads(2, allred.rank) == [0, 1]


def test_it_is_refused():
    with pytest.raises(InputError, match="threads: n must be an integer >= 1, but is 0"):
        threads(0, print)
    with pytest.raises(InputError, match="threads: n must be at most 1024, the limit of backend shm, but is 1025"):
        threads(1025, print)
    with pytest.raises(ConfigError, match="timeout_s"):
        threads(2, print, timeout_s=-1)
    with pytest.raises(AllredError, match="has ranks already"):
        threads(2, lambda: threads(2, print))
