"""Schedules: their closed forms at the steps where something happens, and what they are as objects."""

import math
import pickle

import pytest

from allred import optim
from allred.errors import InputError

ALL = [
    optim.constant(0.1),
    optim.exponential_decay(0.8, decay_steps=10, decay_rate=0.5),
    optim.exponential_decay(0.8, decay_steps=10, decay_rate=0.5, staircase=True),
    optim.step_decay(0.4, milestones=(30, 60), factor=0.5),
    optim.cosine(0.2, total_steps=100, final=0.02),
    optim.linear_warmup(0.4, warmup_steps=4),
    optim.linear_warmup(optim.cosine(0.2, 100), warmup_steps=50),
]

VALUES = [
    (ALL[0], {0: 0.1, 1: 0.1, 10**6: 0.1}),
    (ALL[1], {0: 0.8, 5: 0.8 / math.sqrt(2), 10: 0.4, 30: 0.1}),
    (ALL[2], {0: 0.8, 9: 0.8, 10: 0.4, 19: 0.4, 30: 0.1}),
    (ALL[3], {0: 0.4, 29: 0.4, 30: 0.2, 59: 0.2, 60: 0.1, 1000: 0.1}),
    (ALL[4], {0: 0.2, 25: 0.11 + 0.09 / math.sqrt(2), 50: 0.11, 75: 0.11 - 0.09 / math.sqrt(2), 100: 0.02, 999: 0.02}),
    (ALL[5], {0: 0.1, 1: 0.2, 2: 0.3, 3: 0.4, 4: 0.4, 100: 0.4}),
    (ALL[6], {0: 0.2 / 50, 24: optim.cosine(0.2, 100)(24) / 2, 49: optim.cosine(0.2, 100)(49), 50: 0.1, 100: 0.0}),
    (optim.linear_warmup(0.4, 0), {0: 0.4, 1: 0.4}),
    (optim.linear_warmup(0.4, 1), {0: 0.4, 1: 0.4}),
    (optim.linear_warmup(lambda step: 10.0 + step, 2), {0: 5.0, 1: 11.0, 2: 12.0}),
    (optim.step_decay(0.5, milestones=()), {0: 0.5, 100: 0.5}),
    (optim.step_decay(0.5, milestones=(0, 2)), {0: 0.05, 1: 0.05, 2: 0.005}),
]


@pytest.mark.parametrize(("schedule", "values"), VALUES, ids=lambda value: str(value)[:40])
def test_closed_forms(schedule, values):
    assert {step: schedule(step) for step in values} == pytest.approx(values, rel=1e-14, abs=1e-16)


@pytest.mark.parametrize("schedule", ALL, ids=str)
def test_schedules_are_plain_floats_and_records(schedule):
    assert all(type(schedule(step)) is float for step in (0, 1, 7, 200))
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    assert eval(repr(schedule), {**vars(optim)}) == schedule
    assert hash(schedule) == hash(pickle.loads(pickle.dumps(schedule)))


def test_milestones_given_as_a_list_are_kept_as_a_tuple():
    milestones = [30, 60]
    schedule = optim.step_decay(0.1, milestones)
    milestones.append(1)
    assert schedule == optim.step_decay(0.1, (30, 60))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optim.constant(-1.0), "constant: lr must be a finite number >= 0, but is -1.0"),
        (lambda: optim.constant(True), "constant: lr must be a finite number >= 0, but is True"),
        (lambda: optim.exponential_decay(math.nan, 1, 0.5), "exponential_decay: lr"),
        (lambda: optim.exponential_decay(0.1, 0, 0.5), "exponential_decay: decay_steps must be an integer >= 1"),
        (lambda: optim.exponential_decay(0.1, 1.5, 0.5), "decay_steps must be an integer >= 1, but is 1.5"),
        (lambda: optim.exponential_decay(0.1, 1, 0.0), "exponential_decay: decay_rate must be a number > 0"),
        (lambda: optim.step_decay(0.1, (60, 30)), r"step_decay: milestones must increase, but are \(60, 30\)"),
        (lambda: optim.step_decay(0.1, (30, 30)), "milestones must increase"),
        (lambda: optim.step_decay(0.1, (-1,)), "each milestone must be an integer >= 0"),
        (lambda: optim.step_decay(0.1, (1,), factor=-0.1), "step_decay: factor"),
        (lambda: optim.cosine(-0.1, 10), "cosine: lr"),
        (lambda: optim.cosine(0.1, 0), "cosine: total_steps"),
        (lambda: optim.cosine(0.1, 10, final=-0.1), "cosine: final"),
        (lambda: optim.linear_warmup(-0.1, 10), "constant: lr"),
        (lambda: optim.linear_warmup(0.1, -1), "linear_warmup: warmup_steps"),
    ],
)
def test_errors(make, message):
    with pytest.raises(InputError, match=message):
        make()
