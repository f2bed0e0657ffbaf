"""Tests that all ranks of an mpirun run together, made safe.

    mpirun -np 3 python -m pytest --with-mpi tests/parallel

After every test the ranks tell each other how it went, before any goes on to the next: a failure on one rank is a
failure on all, shown once, with that rank's traceback. A rank that fails while the others wait for it inside the test
would leave them there: after a grace period it prints its traceback and ends the job. So does a rank whose test takes
too long, with the stacks of all its threads.
"""

import faulthandler
import os
import signal
import time

import numpy as np
import pytest
from mpi4py import MPI

import allred
from allred.comm import registry

LIMIT_S = 60  # for one test; a test that needs more has @pytest.mark.limit(seconds)
GRACE_S = 5  # for the others to report, once this rank has failed

_STDERR = pytest.StashKey()  # the real one: pytest captures the other
_world = MPI.COMM_WORLD.Dup()  # for these reports alone


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    config.addinivalue_line("markers", "limit(seconds): the time limit of a slow test")
    if _world.Get_rank():  # one rank speaks; what the others have to say comes through it
        config.pluginmanager.get_plugin("terminalreporter")._tw._file = open(os.devnull, "w")  # noqa: SIM115
    with config.pluginmanager.get_plugin("capturemanager").global_and_fixture_disabled():
        config.stash[_STDERR] = os.fdopen(os.dup(2), "w")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    marker = item.get_closest_marker("limit")
    limit_s = marker.args[0] if marker else LIMIT_S
    faulthandler.dump_traceback_later(limit_s, file=item.config.stash[_STDERR])  # on every rank that is still in it
    signal.alarm(limit_s + 2)  # its default action ends the process, whatever that is doing, and so the job
    try:
        return (yield)
    finally:
        signal.alarm(0)
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "call":
        _share(report, item.config.stash[_STDERR])
    return report


def _share(report, stderr):
    """Make the outcome of this phase the same on all ranks."""
    mine = str(report.longrepr) if report.failed else ""
    lengths = np.zeros(_world.Get_size(), np.int64)
    request = _world.Iallgather(np.array([len(mine)], np.int64), lengths)
    deadline = time.monotonic() + GRACE_S
    while not request.Test():
        time.sleep(0.0005)
        if mine and time.monotonic() > deadline:
            print(
                f"\nrank {_world.Get_rank()} failed while others wait in {report.nodeid}:\n{mine}",
                file=stderr,
                flush=True,
            )
            _world.Abort(1)
    if lengths.any():
        texts = _world.allgather(mine)
        report.outcome = "failed"
        report.longrepr = "\n".join(f"--- rank {rank}\n{text}" for rank, text in enumerate(texts) if text)


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


@pytest.fixture(params=sorted(registry.BACKENDS) if _world.Get_size() == 1 else ["mpi"])
def comm(request):
    """A communicator of each backend that can serve this world."""
    communicator = registry.BACKENDS[request.param](MPI.COMM_WORLD.Dup(), 30.0)
    yield communicator
    communicator.barrier().wait()
    communicator.close()
