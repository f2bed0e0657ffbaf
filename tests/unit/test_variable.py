"""Variables by place: which server they are given, what remembers it, and what is refused."""

import gc

import numpy as np
import pytest
import worlds

import allred
from allred import numbering
from allred.errors import InputError
from allred.ps import variable as room
from allred.ps.variable import describe, places

SHAPES = [("a", (10,)), ("b", (2,)), ("c", (3,)), ("d", (4,))]


def placed(setter):
    """The servers of variables of these shapes."""
    with allred.device(setter):
        made = {name: allred.variable(np.zeros(shape), name=name) for name, shape in SHAPES}
    return places(made.items())


@pytest.mark.parametrize(
    ("arguments", "servers"),
    [
        ({"ps_tasks": 2}, [0, 1, 0, 1]),
        ({"ps_tasks": 3, "cluster": {"ps": 2, "worker": 1}}, [0, 1, 0, 1]),
        ({"ps_tasks": 2, "ps_strategy": "greedy"}, [0, 1, 1, 1]),
        ({"ps_tasks": 2, "ps_strategy": lambda tensor: int(tensor.shape == (3,))}, [0, 0, 1, 0]),
    ],
)
def test_variables_are_placed_by_the_strategy(arguments, servers):
    assert placed(allred.replica_device_setter(**arguments)) == dict(zip("abcd", servers, strict=True))


def test_without_servers_nothing_is_placed():
    assert allred.replica_device_setter() is None
    assert placed(allred.replica_device_setter(ps_tasks=2, cluster={"worker": 1})) == {}


def test_a_variable_is_a_new_array_with_a_place_until_it_is_freed():
    before, value = len(room._known), np.ones(3, np.float32)
    with allred.device("/job:ps/task:1/cpu:0"):
        w = allred.variable(value, name="w")
        step = allred.variable(lambda: 0, name="step", dtype=np.int64)
    with allred.device("/job:ps"):
        free = allred.variable([1.0, 2.0])
    assert type(w) is np.ndarray
    assert not np.shares_memory(w, value)
    assert (w.dtype, step.dtype, step.shape, free.tolist()) == (np.float32, np.int64, (), [1.0, 2.0])
    assert places([("layer.w", w), ("free", free), ("copy", w.copy())]) == {"layer.w": 1}
    others = (
        "given a server, but not among the parameters of this optimizer, so they stay here: 'step', 'without a name'"
    )
    assert describe([("layer.w", w)]) == ["w: /job:ps/task:1/cpu:0", others]
    copies = [np.empty(1), np.empty(1)]
    for each, copied in zip((w, value), copies, strict=True):
        room.move(each, copied)
    assert places([("a", copies[0]), ("b", copies[1])]) == {"a": 1}
    assert room.checkpoint_names([("0", copies[0]), ("1", copies[1])]) == {"0": "w"}
    del w, step, free, each, copied, copies
    gc.collect()
    assert len(room._known) == before


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: allred.replica_device_setter(-1), "ps_tasks=-1"),
        (lambda: allred.replica_device_setter(2, ps_strategy="fair"), "'round_robin', 'greedy'"),
        (lambda: allred.replica_device_setter(2, worker_device="worker"), "expected /job:NAME"),
        (
            lambda: placed(allred.replica_device_setter(2, ps_strategy=lambda _: 2)),
            "gave 2 for 'a' .*servers are 0 to 1",
        ),
    ],
)
def test_what_is_refused(call, words):
    with pytest.raises(InputError, match=words):
        call()


@pytest.mark.parametrize(
    ("rank", "place", "words"),
    [
        (
            1,
            "/job:ps/task:1",
            "/job:ps/task:1 is no parameter server of this cluster, .*servers are 0 to 0",
        ),
        (1, "/job:worker/task:1", "/job:worker/task:1 is no parameter server"),
        (3, "/job:ps/task:0", "make it in a function that the workers run"),
        (0, "/job:ps/task:0", ""),
        (1, "/job:worker/task:0/gpu:0", ""),
        (1, "/task:0", ""),
        (1, None, ""),
    ],
)
def test_places_of_this_cluster(rank, place, words):
    shape = numbering.number([0] * 4, rank, servers=1, clients=1)
    with worlds.installed(shape), allred.device(place):
        if not words:
            allred.variable(0.0, name="w")
        else:
            with pytest.raises(InputError, match=words):
                allred.variable(0.0, name="w")
