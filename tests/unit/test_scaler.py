"""The scale of a GradScaler: a pure sequence of overflows in, a number out."""

import numpy as np
import pytest

import allred
from allred.errors import InputError, NonFiniteError


def play(scaler, overflows):
    for overflow in overflows:
        scaler.update(overflow, "opt.step()")
    return scaler.get_scale()


def test_torchs_defaults_and_names():
    state = allred.GradScaler().state_dict()
    assert state == {
        "scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 0,
    }  # fmt: skip


def test_it_grows_after_an_interval_without_overflow_and_falls_at_each():
    assert play(allred.GradScaler(8.0, growth_interval=3), [False] * 2) == 8
    assert play(allred.GradScaler(8.0, growth_interval=3), [False] * 3) == 16
    assert play(allred.GradScaler(8.0, growth_interval=3), [False, False, True, False, False]) == 4
    assert play(allred.GradScaler(8.0, growth_interval=3), [False, False, True, False, False, False]) == 8
    assert play(allred.GradScaler(8.0, growth_factor=3.0, backoff_factor=0.25, growth_interval=1), [False, True]) == 6


def test_it_stays_a_float32_and_above_its_floor():
    assert play(allred.GradScaler(2.0**126, growth_interval=1), [False] * 5) == 2.0**127
    scaler = allred.GradScaler(2.0**-23)
    assert play(scaler, [True]) == 2.0**-24
    with pytest.raises(NonFiniteError, match="so a lower scale does not help"):
        scaler.update(True, "opt.step()")


def test_a_restored_state_continues():
    scaler = allred.GradScaler(8.0, growth_interval=5)
    play(scaler, [True, False, False, False])
    other = allred.GradScaler()
    other.load_state_dict(scaler.state_dict())
    assert other.state_dict() == scaler.state_dict()
    assert play(other, [False, False]) == play(scaler, [False, False]) == 8
    for wrong in ({}, None):
        with pytest.raises(InputError, match=r"GradScaler.load_state_dict: expected a dict with scale, growth_factor"):
            other.load_state_dict(wrong)


def test_scale_takes_numbers_and_arrays():
    scaler = allred.GradScaler(4.0)
    assert scaler.scale(0.5) == 2
    array = scaler.scale(np.ones(3, np.float32))
    assert (array.dtype, array.tolist()) == (np.float32, [4, 4, 4])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"init_scale": 0}, "init_scale must be a number > 0"),
        ({"init_scale": float("inf")}, "init_scale must be finite"),
        ({"growth_factor": 1.0}, "growth_factor=1.0 must be more than 1"),
        ({"backoff_factor": 1.0}, "backoff_factor=1.0 less"),
        ({"growth_interval": 0}, "growth_interval must be an integer >= 1"),
    ],
)
def test_arguments_out_of_range(options, words):
    with pytest.raises(InputError, match=words):
        allred.GradScaler(**options)
