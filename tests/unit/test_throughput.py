"""Rates of a training, by a clock that the test sets."""

import pytest

from allred.session.progress import Rates


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def train(rates, clock, steps, seconds, examples=32, waiting_s=0.0, communicating_s=0.0, by=1):
    for _ in range(steps):
        clock.now += seconds
        train.step += by
        rates.record(train.step, examples, waiting_s, communicating_s)


@pytest.fixture(autouse=True)
def from_step_zero():
    train.step = 0


def known(rates):
    return rates.examples_per_s, rates.s_per_batch, rates.shares, rates.eta_s(10**6)


def test_nothing_is_known_before_the_second_step(clock):
    rates = Rates(clock=clock)
    assert known(rates) == (None,) * 4
    train(rates, clock, 1, seconds=60.0)
    assert known(rates) == (None,) * 4
    train(rates, clock, 1, seconds=0.25, examples=64, waiting_s=0.1, communicating_s=0.05)
    assert rates.shares == pytest.approx((0.4, 0.4, 0.2))
    assert rates.eta_s(10**6) == pytest.approx(0.25 * (10**6 - 2))
    assert known(rates)[:2] == (256.0, 0.25)


@pytest.mark.parametrize("seconds", [0.00005, 0.003, 0.7, 40.0])
def test_the_window_slides(clock, seconds):
    """Twice as fast from some step on: after a window, nothing is left of the time before; in the midst, half."""
    rates = Rates(window_s=5.0, clock=clock)
    count = int(6 / seconds) + 2
    train(rates, clock, count, seconds, examples=10, waiting_s=seconds / 2, communicating_s=seconds / 4)
    assert rates.examples_per_s == pytest.approx(10 / seconds)
    train(rates, clock, int(5 / seconds) // 2 + 1, seconds, examples=30)
    if seconds < 0.1:
        assert rates.examples_per_s == pytest.approx(20 / seconds, rel=0.03)
        assert rates.shares == pytest.approx((0.625, 0.25, 0.125), abs=0.02)
    train(rates, clock, count, seconds, examples=30)
    assert rates.examples_per_s == pytest.approx(30 / seconds)
    assert rates.shares == (1.0, 0.0, 0.0)
    assert len(rates._intervals) <= 102


def test_a_pause_does_not_count(clock):
    rates = Rates(clock=clock)
    train(rates, clock, 5, seconds=0.5)
    before = known(rates)[:3]
    clock.now += 1000
    rates.pause()
    clock.now += 1000
    train(rates, clock, 1, seconds=77.0)
    assert known(rates)[:3] == before
    train(rates, clock, 5, seconds=0.5)
    assert known(rates)[:3] == before
    assert rates.eta_s(train.step + 4) == 2.0


def test_steps_of_other_workers_count(clock):
    rates = Rates(clock=clock)
    train(rates, clock, 9, seconds=1.0, examples=40, by=4)
    assert (rates.examples_per_s, rates.s_per_batch, rates.eta_s(40)) == (40.0, 0.25, 1.0)


def test_a_step_back_is_a_pause(clock):
    rates = Rates(clock=clock)
    train(rates, clock, 9, seconds=1.0)
    clock.now += 1000
    rates.record(3, 32)
    rates.record(3, 32)
    assert (rates.s_per_batch, rates.eta_s(5)) == (1.0, 2.0)


def test_what_cannot_be_known(clock):
    rates = Rates(clock=clock)
    train(rates, clock, 5, seconds=0.5, examples=0, waiting_s=0.6, communicating_s=0.2)  # clocks of waits may overlap
    assert (rates.examples_per_s, rates.eta_s(None), rates.eta_s(3)) == (None, None, 0.0)
    assert rates.shares == pytest.approx((0.0, 0.75, 0.25))
    stopped = Rates(clock=clock)
    train(stopped, clock, 3, seconds=0.0)
    assert (stopped.examples_per_s, stopped.s_per_batch, stopped.shares) == (None, 0.0, None)
