"""Every test here ends: the harness bounds what it starts, and this bounds the test itself."""

import faulthandler

import pytest

LIMIT_S = 120


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
