"""Sharded updates: the same bits as without, one copy of the state for the node, and parameters of opt.share()."""

import dataclasses

import numpy as np
import pytest

import allred
from allred import optim, world
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


class Subclass(np.ndarray):
    pass


LAYOUTS = {
    "C": lambda matrix: matrix,
    "Fortran": np.asfortranarray,
    "subclass": lambda matrix: matrix.view(Subclass),
    "columns": lambda matrix: np.repeat(matrix, 2, axis=1)[:, ::2],
}


@pytest.mark.parametrize("first", LAYOUTS)
@pytest.mark.parametrize("second", LAYOUTS)
@pytest.mark.parametrize("shares", [False, True])
def test_a_layout_that_changes_between_steps(rank, first, second, shares):
    expected, params = make_params(), make_params()
    plain = allred.distributed(optim.SGD(lr=0.1, momentum=0.9))
    opt = allred.distributed(optim.SGD(lr=0.1, momentum=0.9), sharded=True)
    if shares:
        params = opt.share(params)
    for step, layout in enumerate((first, second, first, second, second)):
        for target in (expected, params):
            if step or not shares:  # the first step has the parameters of opt.share()
                target["b"] = LAYOUTS[layout](np.array(target["b"]))
        train(plain, expected, 1, rank, step)
        train(opt, params, 1, rank, step)
        assert_same(params, expected)
        assert_same_state(opt.state_dict(), plain.state_dict())


def tied(array):
    return {"x": array, "y": array, "z": array[:1], "w": np.ones(9, np.float32)}


def views(array):
    return {"x": array[:20], "y": array[10:], "z": array[5:6], "w": np.ones(9, np.float32)}


@pytest.mark.parametrize("make", [tied, views])
@pytest.mark.parametrize("shares", [False, True])
def test_parameters_that_share_memory(rank, make, shares):
    def grads(params, step):
        return {name: np.full(array.shape, rank + step + len(name), np.float32) for name, array in params.items()}

    expected, params = make(np.arange(40, dtype=np.float32)), make(np.arange(40, dtype=np.float32))
    plain = allred.distributed(optim.SGD(lr=0.1, momentum=0.9))
    opt = allred.distributed(optim.SGD(lr=0.1, momentum=0.9), sharded=True)
    params = opt.share(params) if shares else params
    assert np.shares_memory(params["x"], params["y"])
    for step in range(4):
        plain.step(expected, grads(expected, step))
        opt.step(params, grads(params, step))
        for name in params:
            np.testing.assert_array_equal(params[name], expected[name], err_msg=name)


def test_parameters_that_share_memory_on_one_rank_without_checks(rank, monkeypatch):
    monkeypatch.setattr(world.current(), "config", dataclasses.replace(world.config(), check_steps=0))
    opt, params = allred.distributed(optim.SGD(lr=0.1), sharded=True), [np.ones(3), np.ones(3)]
    if rank == 0:
        params[1] = params[0]
    message = (
        r"sharded update: tensor 0 of 2 differs: '0' float64 \(3,\), overlapping memory on rank 0; .*, sharded on rank"
    )
    with pytest.raises(MismatchError, match=message):
        opt.step(params, [np.ones(3), np.ones(3)])
    assert opt.global_step == 0


def test_share_compares_the_arrays_of_the_ranks(rank):
    """Tied on one rank, or of another shape: the ranks would place their arrays at other addresses."""
    opt = allred.distributed(optim.SGD(lr=0.1), sharded=True)
    for other in (lambda first: first, lambda first: np.ones(5)):
        first = np.ones(3)
        with pytest.raises(MismatchError, match=r"share\(\)"):
            opt.share([first, other(first) if rank == 0 else np.ones(3)])
    shared = opt.share([first, np.ones(3)])
    opt.step(shared, [np.ones(3), np.ones(3)])
    assert shared[1].tolist() == [0.9, 0.9, 0.9]


def test_sharded_on_one_rank_only(rank, size):
    opt = allred.distributed(optim.SGD(lr=0.1, momentum=0.9), sharded=rank == size - 1)
    with pytest.raises(MismatchError, match=rf"sharded=False on ranks? 0.* sharded=True on rank {size - 1}"):
        train(opt, make_params(), 1, rank)


@pytest.mark.parametrize("before", ["nothing", "step", "steps and load"])
def test_a_rank_that_joins_without_a_step(rank, before):
    """Blocks that the others have made meanwhile are made again with it."""
    results = []
    for sharded in (False, True):
        opt, params = allred.distributed(optim.Adam(), sharded=sharded), make_params()
        opt.broadcast(params)
        train(opt, params, {"nothing": 0, "step": 1}.get(before, 2), rank)
        with allred.Join():
            if rank > 0:
                train(opt, params, 1, rank, 2)
                if before == "steps and load":
                    opt.load_state_dict(opt.state_dict())
                params["b"] = np.asfortranarray(params["b"])
                train(opt, params, 1, rank, 3)
                params["b"] = np.ascontiguousarray(params["b"])
                train(opt, params, 1, rank, 4)
        train(opt, params, 3, rank, 5)
        assert allred.allgather_object(opt.global_step) == [opt.global_step] * allred.size()
        results.append((allred.digest(params), opt.state_dict()))
    assert results[0][0] == results[1][0]
    assert_same_state(results[0][1], results[1][1])
    assert len(set(allred.allgather_object(results[0][0]))) == 1


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
