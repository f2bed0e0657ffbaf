"""SIGTERM, as from a time limit of CI, ends the tests as Ctrl-C does: jobs are ended, and namespaces removed."""

import signal


def pytest_configure():
    signal.signal(signal.SIGTERM, signal.default_int_handler)
