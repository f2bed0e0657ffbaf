"""Bad input is named in the error and loses nothing: neither parameters nor the optimizer change."""

import copy
import math

import numpy as np
import pytest

from allred import optim
from allred.errors import InputError


class Foreign:
    """An array of a framework that NumPy's protocols do not reach."""

    shape, dtype = (3,), "float32"


def frozen(array):
    array.flags.writeable = False
    return array


# the second of two parameters is bad, so that the first would have been changed already
BAD = {
    "shape": (np.ones(3), np.ones(4), r"the gradient of 'w' must have its parameter's shape \(3,\), but has \(4,\)"),
    "would broadcast": (np.ones((2, 3)), np.ones(3), r"shape \(2, 3\), but has \(3,\)"),
    "number for a vector": (np.ones(3), 1.0, r"shape \(3,\), but has \(\)"),
    "integer gradient": (np.ones(3), np.ones(3, int), r"array of floats, but is a int64 ndarray of shape \(3,\)"),
    "complex gradient": (np.ones(3), np.ones(3, complex), "is complex, but its parameter is a float64 ndarray"),
    "foreign gradient": (np.ones(3), Foreign(), "but is a float32 Foreign"),
    "text": (np.array(1.0), "1.0", "but is a str"),
    "integer parameter": (np.ones(3, int), np.ones(3), r"parameter 'w' must be a numpy or cupy array of floats.*int64"),
    "number parameter": (1.0, 1.0, "parameter 'w' .* but is a float"),
    "numpy scalar parameter": (np.float64(1.0), 1.0, "but is a float64 float64 of shape"),
    "foreign parameter": (Foreign(), np.ones(3), "but is a float32 Foreign"),
    "missing parameter": (None, np.ones(3), "but is a NoneType"),
    "read-only parameter": (frozen(np.ones(3)), np.ones(3), "parameter 'w' must be writable, but is read-only"),
    "deeper gradient": (np.ones(3), [np.ones(3)], r"without \['w'\] and with \['w.0'\]"),
    "deeper parameter": ([np.ones(3), np.ones(3)], np.ones(3), r"the 3 parameters, but there are 2, without \['w.0'"),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_input_loses_nothing(case, bad):
    second, grad, message = BAD[bad]
    optimizer, twin = case.make(), case.make()
    params = {"a": np.ones(3), "w": copy.deepcopy(second)}
    if isinstance(second, np.ndarray):
        params["w"].flags.writeable = second.flags.writeable
    for each in (optimizer, twin):
        each.step({"a": np.ones(3)}, {"a": np.ones(3)})
    with pytest.raises(InputError, match=message) as raised:
        optimizer.step(params, {"a": np.ones(3), "w": grad})
    assert str(raised.value).startswith(f"{case.name}.step: ")
    np.testing.assert_array_equal(params["a"], np.ones(3))
    assert optimizer.global_step == 1
    one, other = np.ones(3), np.ones(3)
    optimizer.step({"a": one}, {"a": np.ones(3)})
    twin.step({"a": other}, {"a": np.ones(3)})
    np.testing.assert_array_equal(one, other)
    assert optimizer.state_dict()["slots"].keys() == {"a"}


def test_one_gradient_too_few_and_one_too_many(case):
    params = [np.ones(2), np.ones(2)]
    with pytest.raises(InputError, match=r"2 parameters, but there are 1, without \['1'\] and with \[\].*pass None"):
        case.make().step(params, [np.ones(2)])
    with pytest.raises(InputError, match=r"there are 3, without \[\] and with \['2'\]"):
        case.make().step(params, [np.ones(2)] * 3)
    assert (np.array(params) == 1.0).all()


def test_two_leaves_of_one_name_are_refused(case):
    params = {"a": {"b": np.ones(2)}, "a.b": np.ones(2)}
    with pytest.raises(InputError, match=r"two parameters are named 'a\.b'"):
        case.make().step(params, params)


@pytest.mark.parametrize("rate", [math.nan, math.inf, -0.1, "0.1", None])
def test_a_bad_learning_rate_changes_nothing(case, rate):
    optimizer, param = case.make(lr=lambda step: 0.5 if step == 0 else rate), np.ones(2)
    optimizer.step(param, np.ones(2))
    before, state = param.copy(), optimizer.state_dict()
    with pytest.raises(InputError, match=f"{case.name}: the learning rate of step 1 must be"):
        optimizer.step(param, np.ones(2))
    np.testing.assert_array_equal(param, before)
    assert optimizer.global_step == 1
    for slot, array in state["slots"][""].items():
        np.testing.assert_array_equal(optimizer.state_dict()["slots"][""][slot], array)
    with pytest.raises(InputError, match=f"{case.name}: lr must be"):
        case.make(lr=rate)


NUMBERS = [("lr", -1.0), ("weight_decay", -1e-9), ("weight_decay", math.inf), ("eps", -1e-9), ("eps", math.nan)]
SHARES = [("momentum", 1.0), ("momentum", -0.1), ("decay", 1.0), ("decay", -0.5)]
BETAS = [("betas", (1.0, 0.999)), ("betas", (0.9, -0.1)), ("betas", 0.9), ("betas", (0.9,)), ("betas", ("a", "b"))]


@pytest.mark.parametrize(("name", "value"), [*NUMBERS, *SHARES, *BETAS, ("initial_accumulator", -1.0)])
@pytest.mark.parametrize("kind", ["SGD", "Adagrad", "RMSProp", "Adam", "AdamW"])
def test_hyper_parameters_out_of_range(kind, name, value):
    made = getattr(optim, kind)
    if name not in vars(made()):
        with pytest.raises(TypeError, match=name):
            made(**{name: value})
    else:
        with pytest.raises(InputError, match=rf"{kind}: {name}"):
            made(**{name: value})


def test_nesterov_needs_momentum():
    with pytest.raises(InputError, match="SGD: nesterov needs momentum > 0"):
        optim.SGD(nesterov=True)


def test_numpy_hyper_parameters_do_not_widen_float32():
    param = np.array([1.0, 2.0], np.float32)
    optimizer = optim.Adam(lr=np.float64(0.1), betas=(np.float64(0.9), np.float64(0.9)), eps=np.float64(1e-8))
    optimizer.step([param], [param.copy()])
    assert param.dtype == np.float32
    assert repr(optimizer) == "Adam(lr=0.1, betas=(0.9, 0.9), eps=1e-08, weight_decay=0.0)"
