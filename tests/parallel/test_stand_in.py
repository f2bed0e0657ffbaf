"""What the stand-in for a GPU reports (cuda_stand_in.py), shown on a library with a mistake."""

import contextlib

import cuda_stand_in
import numpy as np
import pytest
import standin_gpu
from gpu_fixtures import connect
from mpi4py import MPI
from standin_gpu import host, on_gpu

import allred
from allred.comm import device_operation
from allred.gpu import streams

pytestmark = pytest.mark.mpi


@pytest.fixture
def comm(monkeypatch):
    monkeypatch.setattr(device_operation, "adopt", standin_gpu.adopt)
    communicator = connect("nccl")
    cuda_stand_in.problems.clear()
    monkeypatch.setattr(cuda_stand_in.gpu, "stuck", True)
    yield communicator
    cuda_stand_in.gpu.stuck = False
    communicator.barrier().wait()
    communicator.close()
    cuda_stand_in.problems.clear()
    standin_gpu.launch_problem(MPI.COMM_WORLD)


def reduced(comm):
    x = on_gpu(np.ones(3, np.float32))
    comm.allreduce(x, allred.Sum, in_place=True).wait()
    return x


def test_nothing_of_what_is_right(comm):
    host(reduced(comm))
    assert cuda_stand_in.problems == []


def test_an_operation_that_does_not_wait_for_its_caller(comm, monkeypatch):
    monkeypatch.setattr(streams.StreamLease, "enter", lambda lease, stream=None: stream or lease._device.communication)
    reduced(comm)
    assert "allReduce does not wait for the caller's computation" in cuda_stand_in.problems[0]


def test_a_caller_that_does_not_wait_for_its_result(comm, monkeypatch):
    monkeypatch.setattr(streams.Completion, "order_callers", lambda completion: None)
    host(reduced(comm))
    assert "the caller's computation does not wait for allReduce" in cuda_stand_in.problems[0]


def test_a_result_in_the_memory_of_the_communication_stream(comm, monkeypatch):
    """The caller may free it while its own stream reads it."""
    monkeypatch.setattr(streams.StreamLease, "empty", results_on_the_communication_stream)
    monkeypatch.setattr(streams.Device, "keep", lambda *_: None)
    x = on_gpu(np.ones(3, np.float32))
    y = comm.allreduce(x, allred.Sum).wait()
    assert (host(y) == comm.size).all()
    assert cuda_stand_in.problems == []
    del y
    assert cuda_stand_in.problems == ["memory is freed before the caller's computation has used it"]


def results_on_the_communication_stream(lease, wanted):
    with lease._device.communication:
        return [lease._device.xp.empty(shape, dtype) for shape, dtype in wanted]


@pytest.mark.parametrize("keeps", [True, False])
def test_memory_that_its_owner_frees_while_it_is_reduced(comm, monkeypatch, keeps):
    if not keeps:
        monkeypatch.setattr(streams.Device, "keep", lambda *_: None)
    work = comm.allreduce(on_gpu(np.ones(3, np.float32)), allred.Sum, in_place=True)
    while work.end is None:
        work.done()
    del work
    comm.barrier().wait()
    expected = [] if keeps else ["memory is freed before allReduce has used it"]
    assert cuda_stand_in.problems == expected


def test_ranks_that_call_nccl_in_different_orders(comm):
    with contextlib.closing(Closing(connect("nccl"))) as other:
        both = [comm, other.communicator]
        for one in both:
            reduced(one)
        assert standin_gpu.launch_problem(MPI.COMM_WORLD) == ""
        nccl = [one.devices._nccl for one in both]
        for one in nccl if comm.rank else reversed(nccl):
            one._note("allReduce", comm.devices.device.communication.ptr, (3, 7, 0), None, None)
        problem = standin_gpu.launch_problem(MPI.COMM_WORLD)
        assert ("call 0 that ranks 0 and 1 share" in problem) == (comm.size > 1)


class Closing:
    def __init__(self, communicator):
        self.communicator = communicator

    def close(self):
        cuda_stand_in.gpu.stuck = False
        self.communicator.barrier().wait()
        self.communicator.close()
