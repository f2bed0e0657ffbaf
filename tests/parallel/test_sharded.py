"""Sharded updates: the same bits as without, one copy of the state for the node, and parameters of opt.share()."""

import numpy as np
import pytest

import allred
from allred import optim
from allred.comm import node_memory
from allred.errors import InputError, MismatchError

MAKERS = {
    "sgd": lambda: optim.SGD(lr=0.1),
    "momentum": lambda: optim.SGD(lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda: optim.AdamW(lr=0.01),
    "rmsprop": lambda: optim.RMSProp(lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda: optim.Adagrad(lr=0.01, initial_accumulator=0.1),
}
SHAPES = {"a": (7,), "b": (300, 41), "c": (), "d": (64,), "e": (0, 3), "f": (1, 1000)}


@pytest.fixture(autouse=True)
def _needs_two_ranks(size):
    if size == 1:
        pytest.skip("needs two ranks")


def make_params(dtype=np.float32):
    rng = np.random.default_rng(3)
    return {name: np.asarray(rng.normal(size=shape), dtype) for name, shape in SHAPES.items()}


def make_grads(rank, step, without=(), dtype=np.float32):
    rng = np.random.default_rng((rank, step))
    return {
        name: None if name in without else np.asarray(rng.normal(size=shape), dtype) for name, shape in SHAPES.items()
    }


def train(opt, params, steps, rank, first=0, without=(), dtype=np.float32):
    for step in range(first, first + steps):
        opt.step(params, make_grads(rank, step, without, dtype))


def assert_same(params, expected):
    for name in SHAPES:
        np.testing.assert_array_equal(params[name], expected[name], err_msg=name)


def assert_same_state(one, other):
    assert one["global_step"] == other["global_step"]
    assert one["slots"].keys() == other["slots"].keys()
    for name, slots in one["slots"].items():
        for key, slot in slots.items():
            np.testing.assert_array_equal(slot, other["slots"][name][key], err_msg=f"{name} {key}")


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("name", MAKERS)
def test_same_bits_as_without(rank, name, shares, dtype):
    expected, params = make_params(dtype), make_params(dtype)
    plain, opt = allred.distributed(MAKERS[name]()), allred.distributed(MAKERS[name](), sharded=True)
    if shares:
        params = opt.share(params)
    train(plain, expected, 4, rank, dtype=dtype)
    train(opt, params, 4, rank, dtype=dtype)
    assert_same(params, expected)
    assert_same_state(opt.state_dict(), plain.state_dict())
    allred.barrier()


def test_the_state_and_shared_parameters_are_one_copy(rank):
    opt = allred.distributed(optim.SGD(lr=0.1, momentum=0.9), sharded=True)
    params = opt.share(make_params())
    train(opt, params, 1, rank)
    buffer = opt.optimizer.live_state()["slots"]["b"]["momentum_buffer"]
    assert node_memory.is_shared(params["b"])
    assert node_memory.is_shared(buffer)
    allred.barrier()
    if allred.local_rank() == 0:
        buffer[0, 0] = params["b"][0, 0] = 42.0
    allred.barrier()
    assert buffer[0, 0] == params["b"][0, 0] == 42.0
    allred.barrier()


def test_a_state_that_is_loaded_and_broadcast(rank):
    expected, params = make_params(), make_params()
    plain, opt = allred.distributed(optim.Adam()), allred.distributed(optim.Adam(), sharded=True)
    train(plain, expected, 2, rank)
    train(opt, params, 2, rank)
    state = opt.state_dict()
    train(opt, params, 2, rank, first=7)
    if rank == 0:
        opt.load_state_dict(state)
        for name, value in expected.items():
            params[name][...] = value
    opt.broadcast(params)
    assert_same(params, expected)
    train(plain, expected, 2, rank, first=2)
    train(opt, params, 2, rank, first=2)
    assert_same(params, expected)
    assert_same_state(opt.state_dict(), plain.state_dict())


def test_a_checkpoint_of_one_rank(rank, tmp_path):
    expected, params = make_params(), make_params()
    opt = allred.distributed(optim.Adam(), sharded=True)
    train(opt, params, 2, rank)
    opt.save(tmp_path, params)
    train(opt, params, 1, rank, first=2)
    plain = allred.distributed(optim.Adam())
    assert plain.restore(tmp_path, expected) == 2
    train(plain, expected, 1, rank, first=2)
    assert_same(params, expected)


def test_gradients_that_are_missing_in_some_steps(rank):
    expected, params = make_params(), make_params()
    plain, opt = allred.distributed(optim.Adam()), allred.distributed(optim.Adam(), sharded=True)
    for step, without in enumerate([("b",), (), ("a", "f"), ("b",)]):
        train(plain, expected, 1, rank, step, without)
        train(opt, params, 1, rank, step, without)
        assert_same(params, expected)


def test_parameters_that_are_not_contiguous_and_other_parameters_in_a_later_step(rank):
    def with_columns():
        params = make_params()
        return params | {"b": np.asfortranarray(params["b"])}

    expected, params = with_columns(), with_columns()
    plain, opt = allred.distributed(optim.Adam()), allred.distributed(optim.Adam(), sharded=True)
    train(plain, expected, 2, rank)
    train(opt, params, 2, rank)
    assert_same(params, expected)
    expected, params = make_params(), make_params()
    train(plain, expected, 2, rank)
    train(opt, params, 2, rank)
    assert_same(params, expected)


def test_clipping_and_skipped_steps(rank):
    expected, params = make_params(), make_params()
    options = {"clip_norm": 0.5, "nonfinite": "skip"}
    plain = allred.distributed(optim.Adam(), **options)
    opt = allred.distributed(optim.Adam(), sharded=True, **options)
    for step in range(3):
        for each, target in ((plain, expected), (opt, params)):
            grads = make_grads(rank, step)
            if step == 1 and rank == 0:
                grads["b"][0, 0] = np.nan
            each.step(target, grads)
    assert plain.skipped == opt.skipped == 1
    assert_same(params, expected)


def test_overlap(rank):
    expected, params = make_params(), make_params()
    plain, opt = allred.distributed(optim.Adam()), allred.distributed(optim.Adam(), sharded=True)
    for step in range(6):
        for each, target in ((plain, expected), (opt, params)):
            grads = make_grads(rank, step)
            for name in reversed(list(grads)):
                each.reduce(name, grads[name])
            each.step(target, grads)
        assert_same(params, expected)


def test_ranks_that_have_joined(rank, size):
    """The other ranks update the slices of the joined rank."""
    expected, params = make_params(), make_params()
    plain, opt = allred.distributed(optim.Adam()), allred.distributed(optim.Adam(), sharded=True)
    train(plain, expected, 1, rank)
    train(opt, params, 1, rank)
    if rank > 0:
        train(plain, expected, 1, rank, 1)
        train(opt, params, 1, rank, 1)
        assert_same(params, expected)
    allred.join()
    train(plain, expected, 1, rank, 2)
    train(opt, params, 1, rank, 2)
    assert_same(params, expected)
    assert_same_state(opt.state_dict(), plain.state_dict())


def test_ranks_that_differ(rank):
    opt = allred.distributed(optim.SGD(lr=0.1), sharded=True)
    params = make_params()
    if rank == 0:
        params["b"] = np.asfortranarray(params["b"])
    with pytest.raises(MismatchError, match="sharded update"):
        train(opt, params, 1, rank)
    assert not opt.session_support.update_interrupted
    params = make_params()
    train(opt, params, 1, rank)


def test_an_allreduce_in_place_of_shared_parameters(rank):
    opt = allred.distributed(optim.SGD(lr=0.1), sharded=True)
    params = opt.share(make_params())
    for call in (
        lambda: allred.allreduce_(params["b"]),
        lambda: allred.grouped_allreduce_([params["a"], params["b"]]),
    ):
        with pytest.raises(InputError, match=r"opt\.share"):
            call()
    np.testing.assert_allclose(allred.allreduce(params["b"]), params["b"], rtol=1e-6)
    opt.broadcast(params)


class Whole(optim.Optimizer):
    """An optimizer that needs whole tensors."""

    def slots(self, param):
        return {}

    def update(self, param, grad, slots, lr, step):
        param -= lr * grad / (1.0 + np.abs(grad).max(initial=0.0))


def test_an_optimizer_that_needs_whole_tensors_is_not_sharded(rank):
    expected, params = make_params(), make_params()
    plain, opt = allred.distributed(Whole(0.1)), allred.distributed(Whole(0.1), sharded=True)
    assert opt.share(params) is params
    train(plain, expected, 2, rank)
    train(opt, params, 2, rank)
    assert_same(params, expected)


def test_share_needs_sharded(rank):
    with pytest.raises(InputError, match="sharded=True"):
        allred.distributed(optim.SGD(lr=0.1)).share(make_params())
    with pytest.raises(InputError, match="must be True or False"):
        allred.distributed(optim.SGD(lr=0.1), sharded=1)
