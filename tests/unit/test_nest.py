import collections

import numpy as np
import pytest

from allred import nest

Pair = collections.namedtuple("Pair", "first second")


@pytest.mark.parametrize(
    "tree",
    [
        3.0,
        [1, 2],
        (1, [2, {"x": 3}]),
        {"b": 1, "a": {"d": 2, "c": 3}},
        Pair(1, [2, 3]),
        collections.OrderedDict(b=1, a=2),
        [],
        {},
        {"k": None},
        {2: 1, 10: 2},
    ],
)
def test_rebuild_is_the_inverse_of_leaves(tree):
    values = [value for _, value in nest.leaves(tree)]
    again = nest.rebuild(tree, values)
    assert again == tree
    assert type(again) is type(tree)


def test_names_are_paths_and_dicts_are_sorted():
    tree = {"w": [1, 2], "b": Pair(3, {"x": 4})}
    assert nest.leaves(tree) == [("b.0", 3), ("b.1.x", 4), ("w.0", 1), ("w.1", 2)]
    assert nest.leaves(5) == [("", 5)]


def test_rebuild_keeps_the_users_order_of_a_dict():
    assert list(nest.rebuild({"b": 1, "a": 2}, [20, 10])) == ["b", "a"]


def test_digest_sees_names_shapes_dtypes_and_every_bit():
    base = {"w": np.zeros((2, 3), np.float32)}
    other = [
        {"v": np.zeros((2, 3), np.float32)},
        {"w": np.zeros((3, 2), np.float32)},
        {"w": np.zeros((2, 3), np.float64)},
        {"w": np.full((2, 3), -0.0, np.float32)},
    ]
    assert nest.digest(base) == nest.digest({"w": np.zeros((3, 2), np.float32).T})
    assert len({nest.digest(tree) for tree in [base, *other]}) == 5
