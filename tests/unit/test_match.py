"""Matching of parameters and gradients: repeated input takes the fast path, other input the slow path with errors."""

from collections import OrderedDict

import numpy as np
import pytest
import worlds

from allred.modes.match import Matcher, parameter

F4 = np.float32


def dicts():
    return {"b": np.zeros((2, 3), F4), "a": np.zeros(4)}, {"b": np.ones((2, 3), F4), "a": np.ones(4)}


def lists():
    return [np.zeros((2, 3), F4), np.zeros(())], [np.ones((2, 3), F4), np.ones(())]


@pytest.mark.parametrize(("make", "names"), [(dicts, ["a", "b"]), (lists, ["0", "1"])])
def test_equal_input_gives_the_same_list_of_tensors(make, names):
    matcher = Matcher()
    params, grads = make()
    tensors, leaves, values, problem, plain = matcher.match(params, grads)
    assert (problem, plain) == ("", True)
    assert [tensor.name for tensor in tensors] == names
    for _ in range(3):
        _, others = make()  # other gradients each time
        again, leaves, values, problem, plain = matcher.match(params, others)
        assert again is tensors
        assert (problem, plain) == ("", True)
        keys = sorted(params) if isinstance(params, dict) else range(len(params))
        assert all(leaf is params[key] for leaf, key in zip(leaves, keys, strict=True))
        assert all(value is others[key] for value, key in zip(values, keys, strict=True))


def test_the_order_of_a_dict_does_not_matter():
    matcher, (params, grads) = Matcher(), dicts()
    tensors = matcher.match(params, grads)[0]
    turned = dict(reversed(grads.items()))
    again, leaves, values, *_ = matcher.match(dict(reversed(params.items())), turned)
    assert again is tensors
    assert leaves[0] is params["a"]
    assert values[1] is grads["b"]


CHANGES = {
    "shape": lambda p, g: (p | {"a": np.zeros(5)}, g | {"a": np.zeros(5)}),
    "dtype": lambda p, g: (p | {"a": np.zeros(4, F4)}, g | {"a": np.zeros(4, F4)}),
    "a gradient's dtype": lambda p, g: (p, g | {"a": np.zeros(4, F4)}),
    "None": lambda p, g: (p, g | {"a": None}),
    "layout": lambda p, g: (p, g | {"b": np.ones((3, 2), F4).T}),
    "a parameter's layout": lambda p, g: (p | {"b": np.ones((3, 2), F4).T}, g),
    "name": lambda p, g: ({"c": p["a"], "b": p["b"]}, {"c": g["a"], "b": g["b"]}),
    "one more": lambda p, g: (p | {"c": np.zeros(1)}, g | {"c": np.zeros(1)}),
    "one less": lambda p, g: ({"a": p["a"]}, {"a": g["a"]}),
    "a nest": lambda p, g: (p | {"a": [p["a"]]}, g | {"a": [g["a"]]}),
    "kinds": lambda p, g: (OrderedDict(p), OrderedDict(g)),
    "a list": lambda p, g: ([p["a"], p["b"]], [g["a"], g["b"]]),
    "one kind": lambda p, g: (p, OrderedDict(g)),
    "a number": lambda p, g: (p | {"a": np.zeros(())}, g | {"a": 1.5}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_input_is_matched_again(change):
    matcher, (params, grads) = Matcher(), dicts()
    known = matcher.match(params, grads)[0]
    changed = CHANGES[change](params, grads)
    tensors, leaves, values, problem, _ = matcher.match(*changed)
    assert problem == ""
    assert tensors is not known
    fresh = Matcher().match(*changed)
    assert tensors == fresh[0]
    assert list(map(id, leaves)) == list(map(id, fresh[1]))
    assert list(map(id, values)) == list(map(id, fresh[2]))
    assert matcher.match(params, grads)[0] == known


def readonly(array):
    array.flags.writeable = False
    return array


MISTAKES = {
    "params and grads differ in structure, in 'a'": ({"a": np.zeros(1), "b": np.zeros(1)}, {"b": np.zeros(1)}),
    "params and grads differ in structure, in 'a', 'c'": ({"a": np.zeros(1)}, {"c": np.zeros(1)}),
    "two parameters are named '1'": ({1: np.zeros(1), "1": np.zeros(1)}, {1: np.zeros(1), "1": np.zeros(1)}),
    "the gradient of 'a' float64 (2,) has shape (3,)": ({"a": np.zeros(2)}, {"a": np.zeros(3)}),
    "the parameter is a read-only array": (readonly(np.zeros(2)), np.zeros(2)),
    "parameter 'a' is a read-only array": ({"a": readonly(np.zeros(2))}, {"a": np.zeros(2)}),
    "parameter 'a' is float": ({"a": 1.0}, {"a": 1.0}),
}


@pytest.mark.parametrize("words", MISTAKES)
def test_errors_of_mismatched_input(words):
    matcher = Matcher()
    for _ in range(2):  # they are not taken for known
        assert words in matcher.match(*MISTAKES[words])[3]


def test_a_parameter_that_became_read_only_is_noticed():
    matcher, (params, grads) = Matcher(), dicts()
    matcher.match(params, grads)
    params["a"].flags.writeable = False
    assert "'a' is a read-only array" in matcher.match(params, grads)[3]


def test_a_parameter_as_a_plan_knows_it():
    assert parameter("w", np.zeros((2, 3), F4)) == ("w", (2, 3), np.dtype("float32"))


@pytest.fixture
def speaks():
    with worlds.installed():
        yield


WIDE = "opt.step(): the gradients of float32 parameters are float64 ('b'{}). float64 doubles the bytes"


@pytest.mark.parametrize(
    ("params", "grads", "words"),
    [
        ({"a": np.zeros(2, F4), "b": np.zeros(3, F4)}, {"a": np.ones(2, F4), "b": np.ones(3)}, WIDE.format("")),
        (
            {"b": np.zeros(2, F4), "c": np.zeros(3, F4)},
            {"b": np.ones(2), "c": np.ones(3)},
            WIDE.format(" and 1 more"),
        ),
        ({"a": np.zeros(2), "b": np.zeros(2, F4)}, {"a": np.ones(2), "b": np.ones(2, F4)}, ""),
        ({"a": np.zeros(2, np.float16), "b": np.zeros((), F4)}, {"a": np.ones(2, F4), "b": 0.5}, ""),
        ({"b": np.zeros((), F4)}, {"b": np.float64(0.5)}, ""),
        (
            {"b": np.zeros(2, "c8")},
            {"b": np.ones(2, "c16")},
            "of complex64 parameters are complex128 ('b'). complex128",
        ),
        ({"b": np.zeros(2, "c8"), "c": np.zeros(2, F4)}, {"b": np.ones(2), "c": np.ones(2, F4)}, ""),
        ({"b": np.zeros(2, F4)}, {"b": None}, ""),
    ],
)
def test_float64_gradients_of_float32_parameters_cause_one_warning(params, grads, words, capfd, speaks):
    matcher = Matcher()
    for _ in range(3):
        assert matcher.match(params, grads)[3] == ""
    told = capfd.readouterr().err
    assert told.count("\n") == (words != "")
    assert words in told
