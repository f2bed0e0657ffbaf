"""Tests that all ranks of an mpirun run together, made safe.

    mpirun -np 3 python -m pytest --with-mpi tests/parallel

After every test the ranks tell each other how it went, before any goes on to the next: a failure on one rank is a
failure on all, shown once, with that rank's traceback. A rank that fails while the others wait for it inside the test
would leave them there: after a grace period it prints its traceback and ends the job. A rank that hangs meets the
time limit of tests/conftest.py.
"""

import contextlib
import os
import pathlib
import sys
import tempfile
import time

import numpy as np
import pytest
from mpi4py import MPI

import allred
from allred import native
from allred.comm.backends.mpi_bootstrap import MpiBootstrap
from allred.comm.create import create
from allred.comm.select import TransportFacts, plan
from allred.config import Config
from allred.errors import ConfigError

BACKENDS = {  # settings that select each
    "mpi": {"backend": "mpi"},
    "shm": {"backend": "shm", "transport": "mpi"},
    "single": {"backend": "single"},
    "tcp": {"transport": "tcp"},
}
NODES = {2: [[0, 1]], 3: [[0, 0, 1]], 4: [[0, 0, 1, 1], [0, 1, 0, 0], [0, 1, 1, 0]]}  # the node of each rank
os.environ["ALLRED_OVERLAP"] = "always"  # auto depends on the time that a backward pass computes
GRACE_S = 5  # for the others to report, once this rank has failed

_world = MPI.COMM_WORLD.Dup()  # for these reports alone


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    if _world.Get_rank():  # one rank speaks; what the others have to say comes through it
        config.pluginmanager.get_plugin("terminalreporter")._tw._file = open(os.devnull, "w")  # noqa: SIM115


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item, call):
    """Make the outcome of each phase (setup, call, teardown) the same on all ranks."""
    report = yield
    mine = str(report.longrepr) if report.failed else ""
    lengths = np.zeros(_world.Get_size(), np.int64)
    request = _world.Iallgather(np.array([len(mine)], np.int64), lengths)
    begun = time.monotonic()
    while not request.Test():
        waited_s = time.monotonic() - begun
        time.sleep(0.0005 if waited_s > 0.002 else 0)  # 0: lets the others run
        if mine and waited_s > GRACE_S:
            text = f"\nrank {_world.Get_rank()} failed while others wait in {report.nodeid}:\n{mine}"
            with item.config.pluginmanager.get_plugin("capturemanager").global_and_fixture_disabled():
                print(text, file=sys.stderr, flush=True)
                time.sleep(0.2)
                _world.Abort(1)
    if lengths.any():
        texts = _world.allgather(mine)
        report.outcome = "failed"
        report.longrepr = "\n".join(f"--- rank {rank}\n{text}" for rank, text in enumerate(texts) if text)
    return report


@pytest.fixture(scope="session", autouse=True)
def world():
    allred.init()
    yield
    allred.shutdown()


@pytest.fixture
def tmp_path():
    """A directory that all ranks share. Under pytest's own each rank deletes what others are looking at."""
    with contextlib.ExitStack() as stack:
        path = "" if _world.Get_rank() else stack.enter_context(tempfile.TemporaryDirectory(prefix="allred-"))
        yield pathlib.Path(_world.bcast(path))


@pytest.fixture
def rank():
    return allred.rank()


@pytest.fixture
def size():
    return allred.size()


def _worlds():
    """Each backend that can serve this world, on one node, and on pretended nodes where that makes a difference."""
    size = _world.Get_size()
    for backend, settings in BACKENDS.items():
        try:
            plan([TransportFacts(has_kernels=native.available)] * size, Config(**settings))
        except ConfigError:
            continue
        if backend != "tcp":
            yield pytest.param((backend, [0] * size), id=backend)
        elif size > 1:
            yield pytest.param((backend, list(range(size))), id="tcp")
        if backend in ("shm", "tcp"):
            for nodes in NODES.get(size, []):
                if (backend, nodes) == ("tcp", list(range(size))):
                    continue
                yield pytest.param((backend, nodes), id=f"{backend}-{''.join(map(str, nodes))}")


@pytest.fixture(scope="module", params=_worlds())
def _module_comm(request):
    backend, nodes = request.param
    facts = [TransportFacts(node, has_kernels=native.available) for node in nodes]
    communicator, _ = create(MpiBootstrap(MPI.COMM_WORLD.Dup()), facts, Config(timeout_s=30.0, **BACKENDS[backend]))
    yield communicator
    communicator.barrier().wait()
    communicator.close()


@pytest.fixture
def comm(_module_comm):
    """A communicator of each backend that can serve this world; tests of a module share it and leave it usable."""
    yield _module_comm
    _module_comm.barrier().wait()
