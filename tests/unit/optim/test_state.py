"""Saving and restoring an optimizer: what it promises whatever its formula."""

import copy
import pickle

import numpy as np
import pytest

from allred import optim
from allred.errors import InputError


def run(optimizer, params, grads):
    for grad in grads:
        optimizer.step(params, {"w": grad, "b": float(grad.sum())})


def same(one, other):
    assert one["global_step"] == other["global_step"]
    assert one["slots"].keys() == other["slots"].keys()
    for name, held in one["slots"].items():
        assert held.keys() == other["slots"][name].keys()
        for slot, array in held.items():
            np.testing.assert_array_equal(array, other["slots"][name][slot], strict=True)


@pytest.fixture(params=[np.float16, np.float32, np.float64])
def params(request):
    return {"w": np.linspace(-1, 1, 6, dtype=request.param).reshape(2, 3), "b": np.array(0.5, request.param)}


def restored_by_state_dict(case, optimizer):
    fresh = case.make()
    fresh.load_state_dict(optimizer.state_dict())
    return fresh


def restored_by_pickle(case, optimizer):
    return pickle.loads(pickle.dumps(optimizer))


@pytest.mark.parametrize("restore", [restored_by_state_dict, restored_by_pickle])
def test_a_restored_optimizer_continues_bit_for_bit(case, rng, params, restore):
    grads = rng.normal(size=(6, 2, 3))
    optimizer = case.make()
    run(optimizer, params, grads[:3])
    twin, twin_params = restore(case, optimizer), copy.deepcopy(params)
    same(twin.state_dict(), optimizer.state_dict())
    run(optimizer, params, grads[3:])
    run(twin, twin_params, grads[3:])
    for name in params:
        np.testing.assert_array_equal(twin_params[name], params[name], strict=True)
    same(twin.state_dict(), optimizer.state_dict())
    assert optimizer.global_step == 6


def test_forgetting_the_state_would_show(case, rng):
    """The test above can fail: for optimizers with slots a fresh one goes elsewhere."""
    grads, params = rng.normal(size=(4, 2, 3)), {"w": np.ones((2, 3)), "b": np.array(1.0)}
    optimizer = case.make()
    run(optimizer, params, grads[:3])
    twin_params = copy.deepcopy(params)
    run(optimizer, params, grads[3:])
    run(case.make(), twin_params, grads[3:])
    assert (twin_params["w"] != params["w"]).all() == bool(case.slots)


def test_state_is_plain_and_shares_no_memory(case, rng, params):
    optimizer = case.make()
    run(optimizer, params, rng.normal(size=(2, 2, 3)))
    state = optimizer.state_dict()
    assert type(state["global_step"]) is int
    assert {name: tuple(held) for name, held in state["slots"].items()} == {"w": case.slots, "b": case.slots}
    assert all(type(array) is np.ndarray for held in state["slots"].values() for array in held.values())
    kept, twin = copy.deepcopy(state), case.make()
    twin.load_state_dict(state)
    run(optimizer, params, rng.normal(size=(2, 2, 3)))
    run(twin, params, rng.normal(size=(2, 2, 3)))
    same(state, kept)


def test_state_of_another_float_dtype_is_cast(case, rng):
    optimizer, grads = case.make(), rng.normal(size=(3, 2, 3))
    run(optimizer, {"w": np.ones((2, 3)), "b": np.array(1.0)}, grads)
    loaded = case.make()
    loaded.load_state_dict(optimizer.state_dict())
    params = {"w": np.ones((2, 3), np.float32), "b": np.array(1.0, np.float32)}
    run(loaded, params, grads[:1])
    state = loaded.state_dict()
    assert state["global_step"] == 4
    assert all(array.dtype == np.float32 for held in state["slots"].values() for array in held.values())
    run(optimizer, {"w": np.ones((2, 3)), "b": np.array(1.0)}, grads[:1])
    for slot, array in optimizer.state_dict()["slots"]["w"].items():
        np.testing.assert_allclose(state["slots"]["w"][slot], array, rtol=1e-5, atol=1e-6)


def test_zero_dimensional_slots_may_be_restored_as_numpy_scalars(case):
    optimizer, params = case.make(), [np.array(1.0)]
    optimizer.step(params, [0.5])
    state, twin, twin_params = optimizer.state_dict(), case.make(), copy.deepcopy(params)
    state["slots"]["0"] = {slot: array[()] for slot, array in state["slots"]["0"].items()}
    twin.load_state_dict(state)
    optimizer.step(params, [0.5])
    twin.step(twin_params, [0.5])
    assert params == twin_params


@pytest.mark.parametrize(
    ("state", "part"),
    [
        (None, "a NoneType"),
        ({}, "a dict with []"),
        ({"global_step": 1}, "['global_step']"),
        ({"global_step": 1, "slots": {}, "version": 2}, "version"),
        ({"global_step": -1, "slots": {}}, "-1"),
        ({"global_step": 1.5, "slots": {}}, "1.5"),
        ({"global_step": 1, "slots": [1]}, "[1]"),
        ({"global_step": 1, "slots": {"w": np.ones(2)}}, "one dict for each parameter"),
        ({"global_step": 1, "slots": {"w": {"sum": [1.0]}}}, "slot 'sum' of 'w' must be an array, but is a list"),
    ],
)
def test_unknown_formats_are_refused_and_change_nothing(case, state, part):
    optimizer = case.make()
    optimizer.step({"w": np.ones(2)}, {"w": np.ones(2)})
    before = optimizer.state_dict()
    with pytest.raises(InputError) as raised:
        optimizer.load_state_dict(state)
    assert f"{case.name}.load_state_dict" in str(raised.value)
    assert part in str(raised.value)
    same(optimizer.state_dict(), before)


@pytest.mark.parametrize("slots", [{"other": np.ones(3)}, {"sum": np.ones(4)}], ids=["names", "shape"])
def test_slots_of_another_model_are_refused_before_anything_changes(slots):
    optimizer, params = optim.Adagrad(), {"a": np.ones(3), "w": np.ones(3)}
    optimizer.load_state_dict({"global_step": 5, "slots": {"w": slots}})
    with pytest.raises(InputError, match=r"parameter 'w' needs the slots \{'sum': \(3,\)\}, but the state holds"):
        optimizer.step(params, {"a": np.ones(3), "w": np.ones(3)})
    assert optimizer.global_step == 5
    assert (params["a"] == 1.0).all()
    same(optimizer.state_dict(), {"global_step": 5, "slots": {"w": slots}})


def test_loading_over_a_used_optimizer_checks_again():
    optimizer = optim.Adagrad()
    optimizer.step([np.ones(3)], [np.ones(3)])
    optimizer.load_state_dict({"global_step": 1, "slots": {"0": {"sum": np.ones(1)}}})  # (1,) would broadcast
    with pytest.raises(InputError, match=r"but the state holds \{'sum': \(1,\)\}"):
        optimizer.step([np.ones(3)], [np.ones(3)])


def test_a_parameter_that_changes_its_shape_is_refused():
    optimizer = optim.Adam()
    optimizer.step([np.ones(3)], [np.ones(3)])
    with pytest.raises(InputError, match=r"needs the slots .*\(4,\).* but the state holds .*\(3,\)"):
        optimizer.step([np.ones(4)], [np.ones(4)])
    assert optimizer.global_step == 1
