"""What every optimizer promises about `step`, whatever its formula."""

import itertools

import ml_dtypes
import numpy as np
import pytest

from allred import optim
from allred.nest import leaves

SHAPES = [(), (0,), (1,), (7,), (2, 0, 3), (3, 5)]
# unit in the last place of each dtype, at 1.0
ULP = {np.float16: 1e-3, ml_dtypes.bfloat16: 8e-3, np.float32: 1.2e-7, np.float64: 2.3e-16}


def test_all_optimizers_are_in_the_table(cases):
    public = {name for name in optim.__all__ if isinstance(getattr(optim, name), type(optim.Optimizer))}
    assert {case.name for case in cases} == public - {"Optimizer"}


@pytest.mark.parametrize("dtype", ULP, ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_first_step_is_the_closed_form_and_keeps_the_dtype(case, rng, dtype, shape):
    param, grad = (np.asarray(rng.uniform(-2, 2, shape)).astype(dtype) for _ in range(2))
    expected = case.first(param.astype(np.float64), grad.astype(np.float64))
    before = param
    case.make().step([param], [grad])
    assert param is before
    assert param.dtype == dtype
    assert param.shape == shape
    np.testing.assert_allclose(param.astype(np.float64), expected, rtol=8 * ULP[dtype], atol=8 * ULP[dtype])


def test_slots_are_named_and_float32_at_least(case):
    for dtype, held in [(np.float16, np.float32), (np.float32, np.float32), (np.float64, np.float64)]:
        slots = case.make().slots(np.ones((2, 3), dtype))
        assert tuple(slots) == case.slots
        assert all(slot.shape == (2, 3) and slot.dtype == held for slot in slots.values())


def test_float16_survives_gradients_whose_squares_do_not(case):
    tiny, param = np.array([1e-5, 0.0], np.float16), np.ones(2, np.float16)
    optimizer = case.make() if case.name == "SGD" else case.make(eps=1e-8)
    for _ in range(3):
        optimizer.step([param], [tiny])
    assert np.isfinite(param).all()


def test_strided_parameters_give_what_contiguous_ones_give(case, rng):
    dense, grads = rng.normal(size=(4, 3)), rng.normal(size=(5, 4, 3))
    memory = np.full((8, 6), 7.0)
    strided, transposed = memory[::2, ::2], np.empty((3, 4)).T
    strided[...] = transposed[...] = dense
    optimizers = [case.make() for _ in range(3)]
    for grad in grads:
        optimizers[0].step([dense], [grad])
        optimizers[1].step([strided], [np.asfortranarray(grad)])
        optimizers[2].step([transposed], [grad[::-1][::-1]])
    np.testing.assert_array_equal(strided, dense)
    np.testing.assert_array_equal(transposed, dense)
    assert (memory[1::2] == 7.0).all()
    assert (memory[:, 1::2] == 7.0).all()


def test_nests_are_updated_leaf_by_leaf(case, rng):
    nest = {
        "layers": [{"w": rng.normal(size=(2, 3)), "b": rng.normal(size=3)}, (rng.normal(size=2),)],
        "s": np.array(1.0),
    }
    grads = {"s": 0.5, "layers": [{"b": np.ones(3), "w": np.full((2, 3), -2.0)}, [np.ones(2)]]}
    alone = {name: value.copy() for name, value in leaves(nest)}
    optimizer, single = case.make(), {name: case.make() for name in alone}
    for _ in range(3):
        optimizer.step(nest, grads)
        for name, grad in leaves(grads):
            single[name].step(alone[name], grad)
    for name, value in leaves(nest):
        np.testing.assert_array_equal(value, alone[name], err_msg=name)
    assert set(optimizer.state_dict()["slots"]) == set(alone) == {"layers.0.w", "layers.0.b", "layers.1.0", "s"}


def test_elementwise_optimizers_may_update_a_tensor_in_parts(case, rng):
    assert case.make().elementwise
    whole, grads = rng.normal(size=9), rng.normal(size=(4, 9))
    parts = [whole[:4].copy(), whole[4:].copy()]
    together, apart = case.make(), case.make()
    for grad in grads:
        together.step(whole, grad)
        apart.step(parts, [grad[:4], grad[4:]])
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_none_leaves_parameter_and_slots_as_they_are(case, rng):
    params, optimizer = {"a": rng.normal(size=3), "b": rng.normal(size=3), "never": np.arange(2)}, case.make()
    optimizer.step(params, {"a": np.ones(3), "b": np.ones(3), "never": None})
    before, state = params["a"].copy(), optimizer.state_dict()
    moved = params["b"].copy()
    optimizer.step(params, {"a": None, "b": np.ones(3), "never": None})
    after = optimizer.state_dict()
    np.testing.assert_array_equal(params["a"], before)
    for slot in case.slots:
        np.testing.assert_array_equal(after["slots"]["a"][slot], state["slots"]["a"][slot])
        assert (after["slots"]["b"][slot] != state["slots"]["b"][slot]).all()
    assert (params["b"] != moved).all()
    assert after["global_step"] == 2
    assert "never" not in after["slots"]


def test_gradients_are_read_only_to_the_optimizer(case, rng):
    params = [rng.normal(size=(2, 3)), rng.normal(size=(2, 3))]
    own, spread = rng.normal(size=(2, 3)), np.broadcast_to(0.5, (2, 3))
    own.flags.writeable = False
    before = own.copy()
    for _ in range(2):
        case.make().step(params, [own, spread])
    np.testing.assert_array_equal(own, before)
    assert (spread == 0.5).all()


def test_gradients_of_other_float_dtypes_are_cast_first(case):
    values = [0.5, -1.5, 2.0]  # exact in every dtype
    results = []
    for dtype in (np.float32, np.float16, np.float64, ml_dtypes.bfloat16):
        param, optimizer = np.ones(3, np.float32), case.make()
        for _ in range(2):
            optimizer.step([param], [np.array(values, dtype)])
        assert param.dtype == np.float32
        results.append(param)
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


def test_zero_dimensional_gradients_may_be_plain_numbers(case):
    results = []
    for grad in (np.array(0.75, np.float32), 0.75, np.float64(0.75), np.float32(0.75)):
        param = np.array(2.0, np.float32)
        case.make().step({"scale": param}, {"scale": grad})
        results.append(param)
    assert len({float(result) for result in results}) == 1
    assert float(results[0]) == pytest.approx(case.first(2.0, 0.75), rel=1e-6)


def test_schedule_is_asked_with_the_number_of_updates_done(case):
    rates, asked = [0.5, 0.25, 0.125], []

    def schedule(step):
        asked.append(step)
        return np.float64(rates[step])  # a numpy scalar must not widen float32

    param, same = np.ones(3, np.float32), np.ones(3, np.float32)
    scheduled, assigned = case.make(lr=schedule), case.make()
    for rate in rates:
        assert scheduled.learning_rate == rate
        assert isinstance(scheduled.learning_rate, float)
        asked.clear()
        assigned.lr = rate
        assigned.step([same], [np.ones(3, np.float32)])
        scheduled.step([param], [np.ones(3, np.float32)])
        assert asked == [scheduled.global_step - 1]
    np.testing.assert_array_equal(param, same)
    assert param.dtype == np.float32


def test_an_empty_nest_is_a_step(case):
    optimizer = case.make()
    optimizer.step([], {})
    assert optimizer.global_step == 1


def test_the_defaults():
    assert repr(optim.SGD()) == "SGD(lr=0.01, momentum=0.0, nesterov=False, weight_decay=0.0)"
    assert repr(optim.Adagrad()) == (
        "Adagrad(lr=0.01, eps=1e-10, initial_accumulator=0.0, weight_decay=0.0, row_wise=False)"
    )
    rmsprop = "RMSProp(lr=0.01, decay=0.99, eps=1e-08, momentum=0.0, centered=False, weight_decay=0.0)"
    assert repr(optim.RMSProp()) == rmsprop
    assert repr(optim.Adam()) == "Adam(lr=0.001, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.0)"
    assert repr(optim.AdamW()) == "AdamW(lr=0.001, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.01)"


def test_repr_is_the_call(case):
    made = case.make()
    made.step([np.ones(1)], [np.ones(1)])
    again = eval(repr(made), {**vars(optim)})
    assert type(again) is type(made)
    assert repr(again) == repr(made)
    assert all(f"{key}={value}" in repr(made) for key, value in case.hyper.items())


def test_two_optimizers_share_nothing(case, rng):
    grads = rng.normal(size=(3, 4))
    first, second, params = case.make(), case.make(), [np.ones(4), np.ones(4)]
    for grad in grads:
        first.step(params[0], grad)
    for grad in grads:
        second.step(params[1], grad)
    np.testing.assert_array_equal(*params)
    arrays = [s for o in (first, second) for held in o._slots.values() for s in held.values()]
    assert not any(np.shares_memory(a, b) for a, b in itertools.combinations(arrays, 2))
