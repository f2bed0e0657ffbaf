"""The comparison of clocks, between clocks that do differ."""

import time
import types

import pytest
from mpi4py import MPI

from allred.comm import recording
from allred.comm.backends.mpi_bootstrap import MpiBootstrap
from allred.comm.work import WorkQueue

pytestmark = pytest.mark.mpi


def test_clocks_are_compared_with_that_of_the_first(rank, size, monkeypatch):
    """Each is 100 s ahead of that of the rank before; the first of those that are given is the last."""
    ahead = 100 * 10**9
    shifted = types.SimpleNamespace(perf_counter_ns=lambda: time.perf_counter_ns() + rank * ahead)
    monkeypatch.setattr(recording, "time", shifted)
    bootstrap = MpiBootstrap(MPI.COMM_WORLD.Dup())
    before = shifted.perf_counter_ns()
    steps = recording.measure_clock(bootstrap.messages(), range(size)[::-1])
    when, offset, error = WorkQueue(30.0).start("clocks", steps).wait()
    assert before <= when <= shifted.perf_counter_ns()
    assert error < ahead
    assert abs(offset - (size - 1 - rank) * ahead) <= error
    bootstrap.close()
