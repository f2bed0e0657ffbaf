"""SIGTERM, as from a time limit of CI, ends the tests as Ctrl-C does: jobs are ended, and namespaces removed."""

import contextlib
import os
import signal
import uuid

import pytest
from harness import ROOT, processes


def pytest_configure():
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@pytest.fixture
def mark():
    """A variable for a program's environment, by which to find its processes; whatever is left of it is killed."""
    variable = {"TEST_MARK": uuid.uuid4().hex}
    yield variable
    for pid in processes(variable):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def digits(request):
    """Variables for programs that load digits, which then do not import scikit-learn; with --full they do."""
    return {} if request.config.getoption("--full") else {"PYTHONPATH": str(ROOT / "tests/quick_digits")}
