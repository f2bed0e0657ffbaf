"""Stall detection of a server without a watcher, with an explicit clock."""

from types import SimpleNamespace

import pytest

from allred.errors import CollectiveTimeout
from allred.ps.context import Context
from allred.ps.silent_workers import TICK_S, SilentWorkers


def make(workers=3, timeout_s=6.0):
    return SilentWorkers(Context(None, 0, 1, (0,) * (workers + 1), SimpleNamespace(timeout_s=timeout_s)), 0.0)


def test_it_looks_once_a_second_or_more_often():
    silent = make()
    assert silent.due(0.0)
    silent.check((), (), True, 0.0)
    assert not silent.due(0.1)
    assert silent.due(TICK_S)


def test_the_limit_counts_from_the_last_request_of_the_awaited_worker():
    silent = make()
    for now in range(100):
        silent.heard(1, float(now))
        silent.check([1], [0, 2], True, now + 0.5)
    silent.check([1], [0, 2], True, 104.9)
    with pytest.raises(
        CollectiveTimeout, match="workers 0,2 have made their last step, and wait for worker 1: worker 1 "
    ):
        silent.check([1], [0, 2], True, 105.0)


def test_a_wait_lasts_for_the_limit_at_least():
    silent = make()
    silent.check([1], [], True, 100.0)  # nobody is at the end
    silent.check([1], [0], True, 101.0)
    silent.check([1], [0], True, 106.9)
    with pytest.raises(CollectiveTimeout, match="service: worker 0 has made its last step, and waits for worker 1: "):
        silent.check([1], [0], True, 107.0)


def test_a_limit_of_less_than_a_second_names_the_worker():
    silent = make(timeout_s=0.4)
    silent.check([1], [0], True, 100.0)
    with pytest.raises(CollectiveTimeout, match=r"waits for worker 1: worker 1 made no request for 0\.4 s"):
        silent.check([1], [0], True, 100.4)


def test_nobody_is_late_where_nobody_is_waited_for():
    silent = make()
    silent.check([], [0], True, 100.0)
    silent.check([], [0], True, 200.0)


def test_another_wait_of_the_server_has_its_own_limit():
    silent = make()
    silent.check([1], [0], True, 1.0)
    silent.check([1], [0], False, 100.0)
