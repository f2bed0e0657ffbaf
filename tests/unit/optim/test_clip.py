"""Clipping: closed forms, float64 accumulation, dtypes, and what happens to leaves that cannot be clipped."""

import math

import ml_dtypes
import numpy as np
import pytest

from allred import optim
from allred.errors import InputError

FLOATS = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
CLIPS = [optim.clip_by_value_, optim.clip_by_global_norm_]


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.__name__)
def test_clip_by_value(dtype):
    grads = {"w": np.array([[-3.0, 0.25], [0.5, math.inf]], dtype), "b": [np.array(-2.0, dtype), None]}
    assert optim.clip_by_value_(grads, 0.5) is None
    np.testing.assert_array_equal(grads["w"].astype(float), [[-0.5, 0.25], [0.5, 0.5]])
    assert float(grads["b"][0]) == -0.5
    assert grads["b"][1] is None
    assert grads["w"].dtype == dtype


def test_clip_by_value_keeps_nan():
    grad = np.array([math.nan, -9.0])
    optim.clip_by_value_(grad, 1.0)
    np.testing.assert_array_equal(grad, [math.nan, -1.0])


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.__name__)
def test_clip_by_global_norm(dtype):
    memory = np.array([[2.0, 9.0], [4.0, 9.0]], dtype)
    grads = {"w": memory[:, 0], "b": [np.array(-4.0, dtype), None], "none": np.zeros((0, 2), dtype)}
    norm = optim.clip_by_global_norm_(grads, 3.0)  # 4 + 16 + 16 = 36
    assert (type(norm), norm) == (float, 6.0)
    np.testing.assert_array_equal(memory.astype(float), [[1.0, 9.0], [2.0, 9.0]])
    assert float(grads["b"][0]) == -2.0
    assert memory.dtype == dtype


def test_norms_up_to_the_limit_are_left_alone_bit_for_bit():
    grads = [np.array([0.1, 0.7]), np.array(0.3)]
    norm, before = optim.global_norm(grads), [grad.copy() for grad in grads]
    for limit in (norm, 2 * norm, math.inf):
        assert optim.clip_by_global_norm_(grads, limit) == norm
        np.testing.assert_array_equal(grads[0], before[0])
        np.testing.assert_array_equal(grads[1], before[1])
    optim.clip_by_global_norm_(grads, norm / 2)
    assert optim.global_norm(grads) == pytest.approx(norm / 2, rel=1e-15)


def test_small_scales_do_not_round_float16_to_zero():
    grad = np.array([60000.0], np.float16)  # the scale 1e-8 is 0 in float16
    optim.clip_by_global_norm_(grad, 60000.0 * 1e-8)
    assert float(grad[0]) == pytest.approx(6e-4, rel=1e-3)


def test_global_norm_accumulates_in_float64():
    assert optim.global_norm([np.full(2, 3e30, np.float32)]) == pytest.approx(3e30 * math.sqrt(2), rel=1e-6)
    assert optim.global_norm([np.full(4, 60000, np.float16)]) == pytest.approx(120000, rel=1e-3)
    many = np.ones(2**16 + 1, np.float32)
    many[0] = 2.0**14  # 2^28 + 2^16 needs more digits than float32 has when the ones are added one by one
    assert optim.global_norm(many) ** 2 == pytest.approx(2**28 + 2**16, rel=1e-14)


def test_global_norm_of_numbers_shapes_and_nothing():
    assert optim.global_norm([]) == 0.0
    assert optim.global_norm([None, np.zeros((0, 3))]) == 0.0
    assert optim.global_norm({"a": 2, "b": np.float32(-2.0), "c": [np.ones((2, 2, 2)).T, None]}) == 4.0


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_norm_that_is_not_finite_leaves_the_gradients_and_is_returned(bad):
    grads = [np.array([3.0, 4.0]), np.array([bad, 1.0])]
    norm = optim.clip_by_global_norm_(grads, 1.0)
    np.testing.assert_equal(norm, abs(bad))
    np.testing.assert_array_equal(grads[0], [3.0, 4.0])
    np.testing.assert_array_equal(grads[1], [bad, 1.0])


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("leaf", [1.0, np.float64(2.0), np.ones(2, int), np.broadcast_to(5.0, 3), "text"], ids=repr)
def test_leaves_that_cannot_change_in_place_are_errors_before_anything_changes(clip, leaf):
    grads = {"a": np.full(3, 10.0), "b": leaf}
    with pytest.raises(InputError, match=rf"{clip.__name__}: gradient 'b' must be"):
        clip(grads, 1.0)
    assert (grads["a"] == 10.0).all()


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("limit", [0.0, -1.0, math.nan, "1", None])
def test_limits_must_be_positive(clip, limit):
    grad = np.full(3, 10.0)
    with pytest.raises(InputError, match=rf"{clip.__name__}: (limit|max_norm) must be a number > 0"):
        clip(grad, limit)
    assert (grad == 10.0).all()


def test_global_norm_of_what_is_no_float():
    with pytest.raises(InputError, match="global_norm: gradient 'b' must be an array of floats, but is a str"):
        optim.global_norm({"a": 1.0, "b": "text"})
