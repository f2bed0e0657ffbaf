"""Tests that all ranks of an mpirun run together, made safe.

    mpirun -np 3 python -m pytest --with-mpi tests/parallel

After every test the ranks tell each other how it went, before any goes on to the next: a failure on one rank is a
failure on all, shown once, with that rank's traceback. A rank that fails while the others wait for it inside the test
would leave them there: after a grace period it prints its traceback and ends the job. A rank that hangs meets the
time limit of tests/conftest.py.
"""

import os
import sys
import time

import numpy as np
import pytest
from mpi4py import MPI

import allred
from allred.comm import registry
from allred.errors import ConfigError

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
    deadline = time.monotonic() + GRACE_S
    while not request.Test():
        time.sleep(0.0005)
        if mine and time.monotonic() > deadline:
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
def rank():
    return allred.rank()


@pytest.fixture
def size():
    return allred.size()


def _serves(backend):
    try:
        registry.choose(backend, _world.Get_size(), has_mpi=True)
    except ConfigError:
        return False
    return True


@pytest.fixture(params=[backend for backend in sorted(registry.BACKENDS) if _serves(backend)])
def comm(request):
    """A communicator of each backend that can serve this world."""
    communicator = registry.BACKENDS[request.param](MPI.COMM_WORLD.Dup(), 30.0)
    yield communicator
    communicator.barrier().wait()
    communicator.close()
