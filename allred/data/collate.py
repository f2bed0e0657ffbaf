"""Samples into a batch: what a user's dataset or decoder gives for one sample, for many, as numpy arrays."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from allred.arrays import Array
from allred.errors import InputError


def collate(samples: Sequence[Any], like: Any = None, path: str = "a sample") -> Any:
    """Stack samples of one kind along a new first dimension.

    Numbers become an array (n,), bool, int64 or float64; arrays of shape s, numpy's or torch's, an array (n, *s) of
    their dtype; strings and bytes a list. Tuples, named tuples, lists and dicts become the same of batches. It is what
    torch's default_collate does, in numpy, but that a tuple stays a tuple where torch makes it a list.

    like: a sample that tells the kinds and shapes where there are none to stack. path: what errors call a sample.
    Raises InputError for samples that differ in kind or shape, and for what is none of these.

    >>> collate([(1, {"x": [1.0, 2.0]}), (0, {"x": [3.0, 4.0]})])
    (array([1, 0]), {'x': [array([1., 3.]), array([2., 4.])]})
    """
    first = samples[0] if samples else like
    for sample in samples:
        if type(sample) is not type(first) and _kind(sample) != _kind(first):
            raise InputError(
                f"{path} is a {type(first).__name__} in one place and a {type(sample).__name__} in another"
            )
    kind = _kind(first)
    if kind == "text":
        return list(samples)
    if kind == "dict":
        _check_same([sorted(map(str, sample)) for sample in samples], "keys", path)
        return {key: collate([s[key] for s in samples], first[key], f"{path}[{key!r}]") for key in first}
    if kind == "sequence":
        _check_same([len(sample) for sample in samples], "length", path)
        parts = [collate([s[i] for s in samples], first[i], f"{path}[{i}]") for i in range(len(first))]
        if isinstance(first, tuple):
            return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)
        return parts
    stacked = [_array(sample, path) for sample in samples or [first]]
    _check_same([array.shape for array in stacked], "shape", path)
    return np.stack(stacked)[: len(samples)]


def _array(sample: Any, path: str) -> Array:
    array = np.asarray(sample)
    if array.dtype == object:
        kinds = "a number, an array, a string, or a tuple, list or dict of them"
        raise InputError(f"{path} is a {type(sample).__name__}; expected {kinds}")
    return array


def _kind(sample: Any) -> str:
    if isinstance(sample, (str, bytes)):
        return "text"
    if isinstance(sample, Mapping):
        return "dict"
    return "sequence" if isinstance(sample, (tuple, list)) else "array"


def _check_same(values: Sequence[Any], what: str, path: str) -> None:
    for value in values:
        if value != values[0]:
            raise InputError(
                f"{path} has {what} {values[0]} in one place and {value} in another; they cannot be stacked"
            )
