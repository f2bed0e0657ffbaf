"""Time limits: a test that exceeds its limit shows the stacks of all threads, and its process is killed. The end of a
run deletes the files of killed MPICH jobs in /dev/shm.
"""

import faulthandler
import gc
import os
import re
import signal

import covering
import pytest
from covering import pytest_addoption, pytest_collection_modifyitems  # noqa: F401  (hooks)

from allred.watch import shm_files

LIMIT_S = 120  # for one test, more than for a run in it, which shows its output; else @pytest.mark.limit(seconds)

STDERR = pytest.StashKey()  # the real one: pytest captures the other


def pytest_configure(config):
    config.addinivalue_line("markers", "limit(seconds): the time limit of a slow test")
    os.environ.pop("PYTHONUNBUFFERED", None)  # it splits a printed line into several writes, which mix with other ranks
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # `make test &` in a script; child processes would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    covering.pytest_configure(config)
    with config.pluginmanager.get_plugin("capturemanager").global_and_fixture_disabled():
        config.stash[STDERR] = os.fdopen(os.dup(2), "w")


def pytest_unconfigure(config):
    config.stash[STDERR].close()


def pytest_collection_finish():
    gc.collect()
    gc.freeze()  # thousands of tests, which every gc.collect() in a test would visit


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    marker = item.get_closest_marker("limit")
    limit_s = marker.args[0] if marker else LIMIT_S
    faulthandler.dump_traceback_later(limit_s, file=item.config.stash[STDERR])
    signal.alarm(limit_s + 2)  # its default action ends the process whatever that is doing, and a job of ranks with it
    try:
        return (yield)
    finally:
        signal.alarm(0)
        faulthandler.cancel_dump_traceback_later()


SHM_FILES = pytest.StashKey()  # the files that existed before the run


def pytest_sessionstart(session):
    session.config.stash[SHM_FILES] = set(shm_files.unused())


def pytest_sessionfinish(session):
    """Delete the files of jobs that do not use allred, and of ranks that die in MPI_Init."""
    if hasattr(session.config, "workerinput"):
        return  # of pytest-xdist: another worker's tests may still run
    for file in set(shm_files.unused()) - session.config.stash[SHM_FILES]:
        if re.search(r"mpich_shm_[0-9a-f]{1,8}_\d+$", file.path):  # not a file of tests/unit/test_shm_files.py
            shm_files.delete(file)
