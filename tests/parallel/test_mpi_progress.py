"""MPI operations of the program make progress while a rank waits in allred: each test hangs if they do not."""

import numpy as np
import pytest
from mpi4py import MPI

from allred.comm.ops import ReduceOp

WORLD = MPI.COMM_WORLD


def collective(comm):
    assert comm.allreduce(np.ones(3), ReduceOp.SUM).wait().tolist() == [comm.size] * 3


@pytest.mark.parametrize("count", [10_000, 1_000_000])
def test_large_message_to_a_rank_that_waits(comm, rank, size, count):
    if rank:
        WORLD.Send(np.full(count, float(rank)), dest=0, tag=rank)  # the receiver must take part
        collective(comm)
        return
    received = np.zeros((size, count))
    requests = [WORLD.Irecv(received[peer], source=peer, tag=peer) for peer in range(1, size)]
    collective(comm)
    MPI.Request.Waitall(requests)
    assert (received == np.arange(size)[:, None]).all()


def test_one_sided_counter_of_a_rank_that_waits(comm, rank, size):
    counter = np.zeros(1, np.int64)
    window = MPI.Win.Create(counter, comm=WORLD)
    one, before = np.ones(1, np.int64), np.zeros(1, np.int64)
    if rank:
        for _ in range(3):
            window.Lock(0)
            window.Fetch_and_op(one, before, 0)
            window.Unlock(0)
    collective(comm)
    window.Lock(rank)
    assert counter[0] == (0 if rank else 3 * (size - 1))
    window.Unlock(rank)
    window.Free()


def test_nonblocking_barrier_of_a_rank_that_waits(comm, rank):
    request = WORLD.Ibarrier()
    if rank:
        request.Wait()
    collective(comm)
    request.Wait()
