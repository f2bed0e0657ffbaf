"""MPI between workers and a server: the number of sent cells that the receiver has not matched is limited."""

import numpy as np
import pytest
from mpi4py import MPI

from allred.ps.mpi_transport import _DEPTH, DOWN, STEP, Exchange, MpiPort, MpiTransport
from allred.ps.protocol import RECORD_BYTES

CELLS, NBYTES = 20, 64  # MPI sends such small messages eagerly, so only the limit holds a sender back
SIZES = np.full(CELLS, NBYTES)
NONE = np.empty(0, np.int64)


@pytest.fixture
def comm():
    if MPI.COMM_WORLD.size == 1:
        pytest.skip("takes a server and a worker")
    own = MPI.COMM_WORLD.Dup()
    yield own
    own.Free()


def looks(done):
    """Poll 1000 times, so that MPI makes progress."""
    return [done() for _ in range(1000)]


def serve(transport, worker):
    """Receive the cells of a worker; returns their contents."""
    transport.receive_record(worker, STEP)
    port = MpiPort(transport, worker)
    port.open(SIZES)
    found = []
    for _ in range(CELLS):
        while (cell := port.cell()) is None:
            pass
        found.append(cell.copy())
        port.take()
    port.answer(bytes(RECORD_BYTES))
    return np.concatenate(found)


def test_no_cell_of_a_gradient_counts_as_sent_before_the_server_takes_it(comm):
    transport, data = MpiTransport(comm), np.arange(CELLS * NBYTES, dtype=np.uint8)
    if comm.rank == 0:
        comm.Barrier()
        for worker in range(1, comm.size):  # all others wait meanwhile
            np.testing.assert_array_equal(serve(transport, worker), data)
        while not transport.progress():
            pass
    else:
        exchange = Exchange(transport, 0, bytes(RECORD_BYTES), [data], SIZES, [], NONE)
        looks(exchange.done)
        assert exchange.progress_count == 0
        comm.Barrier()
        while not exchange.done():
            pass
        assert exchange.progress_count == CELLS


def test_a_server_gives_no_more_cells_than_a_worker_takes(comm):
    transport, cell = MpiTransport(comm), np.arange(NBYTES, dtype=np.uint8)
    if comm.rank == 0:
        ports = [MpiPort(transport, worker) for worker in range(1, comm.size)]
        for port in ports:
            assert sum(looks(lambda port=port: port.give(cell))) == _DEPTH
        comm.Barrier()
        for port in ports:
            for _ in range(CELLS - _DEPTH):
                while not port.give(cell):
                    pass
    else:
        comm.Barrier()
        for _ in range(CELLS):
            found = np.empty_like(cell)
            comm.Recv([found, MPI.BYTE], 0, DOWN)
            np.testing.assert_array_equal(found, cell)
    comm.Barrier()
