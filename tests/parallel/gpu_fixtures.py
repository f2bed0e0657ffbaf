"""Fixtures of the tests with the stand-in for a GPU (standin_gpu.py): communicators, and the world on them."""

import dataclasses
import gc
import time

import cuda_stand_in
import pytest
import standin_gpu
from mpi4py import MPI

from allred import world
from allred.comm import device_operation, device_reduce
from allred.comm.backends.mpi_bootstrap import MpiBootstrap
from allred.comm.create import add_device, create
from allred.comm.process_set import PROCESS_SETS
from allred.comm.select import TransportFacts
from allred.config import Config
from allred.gpu.streams import VisibleGpus


def connect(transport, native_halves=False):
    facts = [TransportFacts()] * MPI.COMM_WORLD.Get_size()
    communicator, _ = create(MpiBootstrap(MPI.COMM_WORLD.Dup()), facts, Config(timeout_s=30.0))
    add_device(communicator, standin_gpu.Device(), transport, native_halves)
    return communicator


def are_freed(references):
    """Whether the objects of weak references are freed, within 10 s: a thread that releases memory at the same time, or
    collects garbage, may hold them for a moment."""
    for _ in range(1000):
        gc.collect()
        if all(one() is None for one in references):
            return True
        time.sleep(0.01)
    return False


@pytest.fixture(scope="module", params=["nccl", "staged"])
def connected(request):
    """One communicator per module."""
    communicator = connect(request.param)
    yield communicator
    communicator.barrier().wait()
    communicator.close()


@pytest.fixture
def comm(connected, monkeypatch):
    monkeypatch.setattr(device_operation, "adopt", standin_gpu.adopt)
    monkeypatch.setattr(device_reduce, "layouts", standin_gpu.layouts)
    cuda_stand_in.gpu.ordered = cuda_stand_in.gpu.synchronized = 0
    cuda_stand_in.problems.clear()
    cuda_stand_in.gpu.stuck = connected.devices.name == "nccl"  # work ends as late as it can
    yield connected
    cuda_stand_in.gpu.stuck = False
    connected.barrier().wait()
    assert (cuda_stand_in.problems, standin_gpu.launch_problem(MPI.COMM_WORLD)) == ([], "")


@pytest.fixture
def world_on_gpus(comm, monkeypatch):
    """The running world, with this communicator."""
    standin_gpu.install(monkeypatch.setattr)
    monkeypatch.setattr(world.current(), "communicator", comm)
    return comm


@pytest.fixture
def everyone(rank, monkeypatch):
    """All ranks of the running world, each with a GPU of its own; its process sets are on these."""
    here, communicator = world.current(), connect("nccl")
    standin_gpu.install(monkeypatch.setattr)
    monkeypatch.setattr(standin_gpu.Data, "device_id", rank)
    communicator.devices.device.index = rank
    before = PROCESS_SETS.of(here)
    facts = [dataclasses.replace(each, gpus=VisibleGpus(("GPU-a",), cupy=True)) for each in before.facts]
    config = dataclasses.replace(here.config, gpu_oversubscribe=True)
    process_sets = dataclasses.replace(
        PROCESS_SETS.of(here), everyone=communicator, facts=facts, config=config, made={}
    )
    monkeypatch.setattr(here, "communicator", communicator)
    monkeypatch.setitem(here.slots, PROCESS_SETS, process_sets)
    here.queues.add(communicator.queue)
    cuda_stand_in.problems.clear()
    yield communicator
    communicator.barrier().wait()
    assert (cuda_stand_in.problems, standin_gpu.launch_problem(MPI.COMM_WORLD)) == ([], "")
    for each in process_sets.made.values():
        each.close()
    communicator.close()
