"""Stall detection of a server without a watcher, with an explicit clock."""

from types import SimpleNamespace

import pytest

from allred.errors import CollectiveTimeout
from allred.ps.running import Running
from allred.ps.stalls import TICK_S, Stalls


def make(workers=3, timeout_s=6.0):
    return Stalls(Running(None, 0, 1, (0,) * (workers + 1), SimpleNamespace(timeout_s=timeout_s)), 0.0)


def test_it_looks_once_a_second_or_more_often():
    stalls = make()
    assert stalls.due(0.0)
    stalls.look((), (), True, 0.0)
    assert not stalls.due(0.1)
    assert stalls.due(TICK_S)


def test_the_limit_counts_from_the_last_request_of_the_awaited_worker():
    stalls = make()
    for now in range(100):
        stalls.heard(1, float(now))
        stalls.look([1], [0, 2], True, now + 0.5)
    stalls.look([1], [0, 2], True, 104.9)
    with pytest.raises(
        CollectiveTimeout, match="workers 0,2 have made their last step, and wait for worker 1: worker 1 "
    ):
        stalls.look([1], [0, 2], True, 105.0)


def test_a_wait_lasts_for_the_limit_at_least():
    stalls = make()
    stalls.look([1], [], True, 100.0)  # nobody is at the end
    stalls.look([1], [0], True, 101.0)
    stalls.look([1], [0], True, 106.9)
    with pytest.raises(CollectiveTimeout, match="service: worker 0 has made its last step, and waits for worker 1: "):
        stalls.look([1], [0], True, 107.0)


def test_a_limit_of_less_than_a_second_names_the_worker():
    stalls = make(timeout_s=0.4)
    stalls.look([1], [0], True, 100.0)
    with pytest.raises(CollectiveTimeout, match=r"waits for worker 1: worker 1 made no request for 0\.4 s"):
        stalls.look([1], [0], True, 100.4)


def test_nobody_is_late_where_nobody_is_waited_for():
    stalls = make()
    stalls.look([], [0], True, 100.0)
    stalls.look([], [0], True, 200.0)


def test_another_wait_of_the_server_has_its_own_limit():
    stalls = make()
    stalls.look([1], [0], True, 1.0)
    stalls.look([1], [0], False, 100.0)
