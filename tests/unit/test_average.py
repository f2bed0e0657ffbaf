"""The moving average of parameters, against its formula in float64."""

import ml_dtypes
import numpy as np
import pytest

from allred.errors import InputError
from allred.session.average import MovingAverage

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


def model(dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: np.asarray(rng.normal(size=shape)).astype(dtype)  # noqa: E731
    return {"w": draw(5, 3), "layers": [draw(7), (draw(), draw(0))], "t": draw(4, 6).T[::2]}


def arrays(params):
    return [params["w"], params["layers"][0], *params["layers"][1], params["t"]]


def values(average, params):
    with average.swapped():
        return [array.copy() for array in arrays(params)]


def formula(history, decay, warmup, first=1):
    """In float64, from all values that one parameter had."""
    total = history[0].astype(np.float64)
    for step, value in enumerate(history[1:], first):
        now = min(decay, (1 + step) / (10 + step)) if warmup else decay
        total = now * total + (1 - now) * value.astype(np.float64)
    return total


def train(average, params, steps, seed=1, first=1):
    """Random values at each step; the history of each parameter, its first value included."""
    rng, history = np.random.default_rng(seed), [[array.copy()] for array in arrays(params)]
    for step in range(first, first + steps):
        for array, past in zip(arrays(params), history, strict=True):
            array[...] = rng.normal(size=array.shape).astype(array.dtype)
            past.append(array.copy())
        average.update(step)
    return history


@pytest.mark.parametrize("warmup", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_the_formula(dtype, warmup):
    params = model(dtype)
    average = MovingAverage(params, decay=0.9, warmup=warmup)
    history = train(average, params, steps=150)
    rtol = 1e-12 if dtype is np.float64 else 1e-5
    for (name, kept), past in zip(sorted(average.state_dict()["averages"].items()), by_name(history), strict=True):
        assert kept.dtype == (np.float64 if dtype is np.float64 else np.float32), name
        np.testing.assert_allclose(kept, formula(past, 0.9, warmup), rtol=rtol, atol=rtol)
    for array, past in zip(values(average, params), history, strict=True):
        assert array.dtype == dtype
        eps = float(ml_dtypes.finfo(dtype).eps)
        np.testing.assert_allclose(array.astype(np.float64), formula(past, 0.9, warmup), rtol=2 * eps, atol=2e-6)


def by_name(history):
    w, first, second, third, t = history
    return [first, second, third, t, w]  # layers.0, layers.1.0, layers.1.1, t, w


def test_bfloat16_holds_small_steps():
    """1 - decay = 0.0001: of 256 a bfloat16 could not even keep a change of 1."""
    params = [np.full(3, 256, ml_dtypes.bfloat16)]
    average = MovingAverage(params, decay=0.9999, warmup=False)
    params[0][:] = 0
    for step in range(1, 10001):
        average.update(step)
    assert average.state_dict()["averages"]["0"] == pytest.approx(256 * np.exp(-1), rel=1e-3)


def test_within_swapped_the_parameters_are_the_averages_and_after_it_what_they_were():
    params = model(np.float16)
    params["w"][0, 0] = np.nan  # bit for bit
    average = MovingAverage(params, decay=0.5)
    params["layers"][0][:] += 1
    before, same = [array.tobytes() for array in arrays(params)], arrays(params)
    with average.swapped():
        assert [array.tobytes() for array in arrays(params)] != before
        assert all(one is other for one, other in zip(arrays(params), same, strict=True))
        params["w"][:] = 7
    assert [array.tobytes() for array in arrays(params)] == before
    with pytest.raises(KeyboardInterrupt), average.swapped():
        raise KeyboardInterrupt
    assert [array.tobytes() for array in arrays(params)] == before
    average.update(1)


def test_what_cannot_be_done_within_swapped():
    average = MovingAverage([np.ones(2)])
    with average.swapped():
        with pytest.raises(InputError, match=r"MovingAverage\.update: the parameters are swapped"):
            average.update(1)
        with pytest.raises(InputError, match=r"MovingAverage\.swapped: the parameters"), average.swapped():
            pass


def test_an_optimizer_may_put_new_arrays_into_the_nest():
    params = {"w": np.zeros(3)}
    average = MovingAverage(params, decay=0.5, warmup=False)
    params["w"] = np.full(3, 8.0)
    average.update(1)
    with average.swapped():
        assert params["w"].tolist() == [4.0] * 3
    assert params["w"].tolist() == [8.0] * 3


def test_tied_parameters_are_restored():
    tied = np.zeros(3)
    average = MovingAverage([tied, tied], decay=0.5, warmup=False)
    tied[:] = 8
    average.update(1)
    with average.swapped():
        assert tied.tolist() == [4.0] * 3
    assert tied.tolist() == [8.0] * 3


def test_leaves_that_are_no_float_arrays_have_no_average():
    params = {"w": np.zeros(2), "steps": np.array([3]), "name": None, "n": 1.5}
    average = MovingAverage(params)
    params["steps"][0], params["n"] = 4, 2.5
    average.update(1)
    with average.swapped():
        assert (params["steps"][0], params["n"], params["name"]) == (4, 2.5, None)
    assert set(average.state_dict()["averages"]) == {"w"}


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_a_restored_average_continues_bit_for_bit(dtype):
    params, other = model(dtype), model(dtype)
    average = MovingAverage(params, decay=0.99)
    train(average, params, 20)
    state = average.state_dict()
    train(average, params, 20, seed=5, first=21)
    resumed = MovingAverage(other, decay=0.99)
    resumed.load_state_dict(state)
    train(resumed, other, 20, seed=5, first=21)
    for one, two in zip(values(average, params), values(resumed, other), strict=True):
        assert one.tobytes() == two.tobytes()


@pytest.mark.parametrize("dtype", ["c8", "c16"])
def test_of_complex_numbers_it_is_that_of_both_parts(dtype):
    param = np.array([[1 + 2j, 3 - 4j], [0, complex(np.inf, 1)]], dtype).T
    parts, average = [param.real.copy(), param.imag.copy()], MovingAverage([param], 0.5, warmup=False)
    others = MovingAverage(parts, 0.5, warmup=False)
    for step in (1, 2):
        param[:1] -= 8 + 1j
        parts[0][...], parts[1][...] = param.real, param.imag
        average.update(step)
        others.update(step)
    found, expected = average.state_dict()["averages"]["0"], others.state_dict()["averages"]
    assert found.dtype == dtype
    np.testing.assert_array_equal(found.real, expected["0"])
    np.testing.assert_array_equal(found.imag, expected["1"])
    with pytest.raises(InputError, match=r"'0' must be an array of floats of shape \(2, 2\), but is a complex"):
        MovingAverage([parts[0]]).load_state_dict(average.state_dict())


def test_a_state_is_a_copy():
    params = [np.zeros(2)]
    average = MovingAverage(params, decay=0.5, warmup=False)
    state = average.state_dict()
    params[0][:] = 1
    average.update(1)
    assert state["averages"]["0"].tolist() == [0, 0]
    average.load_state_dict(state)
    average.update(2)
    assert state["averages"]["0"].tolist() == [0, 0]
    assert average.state_dict()["averages"]["0"].tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (None, "expected a dict with 'averages', but got None"),
        ({}, "expected a dict with 'averages'"),
        (
            {"averages": {"w": np.ones(2)}},
            r"expected the 2 parameters of the averages, but got 1; missing: \['b'\], unknown: none",
        ),
        ({"averages": {"w": np.ones(2), "c": np.ones(1)}}, r"missing: \['b'\], unknown: \['c'\]"),
        ({"averages": {"w": np.ones(3), "b": np.ones(1)}}, r"'w' must be .* of shape \(2,\), but is .*\(3,\)"),
        ({"averages": {"w": np.ones(2), "b": 1.0}}, "'b' must be an array of floats .*, but is a float"),
    ],
)
def test_a_state_of_something_else_changes_nothing(state, text):
    average = MovingAverage({"w": np.zeros(2), "b": np.zeros(1)})
    with pytest.raises(InputError, match=rf"MovingAverage\.load_state_dict: .*{text}"):
        average.load_state_dict(state)
    assert not any(array.any() for array in average.state_dict()["averages"].values())


def test_parameters_that_become_others():
    params = {"w": np.zeros(2)}
    average = MovingAverage(params)
    params["b"] = np.zeros(1)
    with pytest.raises(InputError, match=r"MovingAverage\.update: .*unknown: \['b'\]"):
        average.update(1)
    del params["b"]
    params["w"] = np.zeros(3)
    with pytest.raises(InputError, match=r"'w' is a float64 ndarray of shape \(3,\), but its average is .*\(2,\)"):
        average.update(1)


def test_what_cannot_be_averaged():
    frozen = np.zeros(2)
    frozen.flags.writeable = False
    with pytest.raises(InputError, match="MovingAverage: parameter 'w' must be writable"):
        MovingAverage({"w": frozen})
    for decay in (1.0, -0.1, "x", float("nan")):
        with pytest.raises(InputError, match=r"MovingAverage: decay must be in \[0, 1\)"):
            MovingAverage([], decay=decay)
