"""Ranks that have drifted apart: parameters, optimizer state or learning rate that are not equal, bit for bit.

A hash of everything is compared at a check; only where it differs do the ranks show each other the hash of each tensor.
Parameters that no rank has a gradient for are left out: nothing says that they are alike (running statistics are not).
"""

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from allred import arrays, native, nest
from allred.arrays import Array
from allred.comm.header import by_rank, hash_text, mix, rank_list
from allred.gpu.device_arrays import is_device, to_host
from allred.optim.base import Optimizer

_hash_name = functools.lru_cache(maxsize=2**16)(hash_text)
_NAMED = 3  # differences in an error; the rest are counted
_NUMBERS = (int, float, np.number)
_COMPARABLE = (*_NUMBERS, np.ndarray)


class Part(NamedTuple):
    """Something that must be equal on all ranks. Its kind: "setting", "state" or "parameter"."""

    kind: str
    name: str
    value: Array


Table = dict[tuple[str, str], str]  # of each part, by kind and name, what is compared of it, in words
_CALLED = {"setting": "the optimizer's {}", "state": "the optimizer's state '{}'", "parameter": "parameter '{}'"}


def parts_of(params: Any, trained: set[str], optimizer: Any) -> list[Part]:
    """All there is to compare: the parameters called `trained`, and the optimizer's settings and state."""
    parts = [Part("setting", name, np.asarray(value)) for name, value in _settings(optimizer).items()]
    state: Any = getattr(optimizer, "live_state", getattr(optimizer, "state_dict", dict))()
    kept = [
        (name, np.asarray(to_host(leaf)))
        for name, leaf in nest.leaves(state)
        if isinstance(leaf, _COMPARABLE) or is_device(leaf)
    ]
    parts += [Part("state", name, array) for name, array in kept if not array.dtype.hasobject]
    return parts + [Part("parameter", name, to_host(leaf)) for name, leaf in nest.leaves(params) if name in trained]


def _settings(optimizer: Any) -> dict[str, Any]:
    """Hyper-parameters: all numbers among the attributes of our own optimizers; of others `lr` alone is known."""
    names = [name for name in vars(optimizer) if name[0] != "_"] if isinstance(optimizer, Optimizer) else ["lr"]
    found = {name: getattr(optimizer, name, None) for name in names if name != "global_step"}
    if isinstance(optimizer, Optimizer) and callable(optimizer.lr):
        found["learning_rate"] = optimizer.learning_rate
    return {name: value for name, value in nest.leaves(found) if isinstance(value, _NUMBERS)}


def fingerprint(parts: Sequence[Part]) -> int:
    """A 64-bit hash of all parts, with their names."""
    total = len(parts)
    for part, found in zip(parts, native.hashes([arrays.as_bytes(part.value) for part in parts]), strict=True):
        total = mix(mix(total, _hash_name(part.name)), found)
    return total


def table(parts: Sequence[Part]) -> Table:
    """What is compared of each part: numbers themselves, of arrays dtype, shape and hash.

    All NaN count as one: which of them a sum gives may differ between ranks.
    """
    found = {}
    for part in parts:
        value = part.value
        if arrays.is_float(value.dtype):
            value = np.where(np.isnan(value), np.full((), np.nan, value.dtype), value)
        number = part.kind == "setting" or (part.kind == "state" and not value.ndim)
        (hashed,) = native.hashes([arrays.as_bytes(value)])
        found[part.kind, part.name] = (
            str(value) if number else f"{arrays.describe(value.shape, value.dtype)} {hashed:x}"
        )
    return found


def verdict(
    tables: list[Table], step: int, equal_at: int, outside: list[int], ranks: Sequence[int], missed: bool = False
) -> str:
    """What differs on which ranks, in words, from every rank's table; "" if nothing does. The same on every rank.

    step: the step before which they were compared; equal_at: the one before which they were last found equal, or 0.
    outside: how many updates each rank's optimizer has made around its wrapper. ranks: their numbers. missed: some
    were not in all steps, for they had joined.
    """
    keys = list(dict.fromkeys(key for each in tables for key in each))
    differing = [key for key in keys if len({each.get(key) for each in tables}) > 1]
    if not differing:
        return ""
    words = [_difference(key, [each.get(key, "missing") for each in tables], ranks) for key in differing[:_NAMED]]
    more = f"; and {len(differing) - _NAMED} more" if len(differing) > _NAMED else ""
    since = f"after step {equal_at} and before step {step}" if equal_at else f"before step {step}"
    remedy = _remedy(differing, equal_at, outside, ranks, missed)
    return (
        f"the ranks have drifted apart {since}: {'; '.join(words)}{more}. {remedy}; "
        "ALLRED_CHECK_STEPS=0 switches this check off"
    )


def _difference(key: tuple[str, str], texts: list[str], ranks: Sequence[int]) -> str:
    """A number with its values; an array with the ranks that differ from most, or from the first rank."""
    name = _CALLED[key[0]].format(key[1])
    if not any(" " in text for text in texts):
        return f"{name} is {by_rank(texts, ranks).replace(';', ',')}"
    usual = Counter(texts).most_common(1)[0][0]  # of equally many, the one that comes first
    odd = [(rank, text) for rank, text in zip(ranks, texts, strict=True) if text != usual]
    how = "is missing" if all(text == "missing" for _, text in odd) else "differs"
    return f"{name} {how} on {rank_list([rank for rank, _ in odd])}"


def _remedy(
    differing: list[tuple[str, str]], equal_at: int, outside: list[int], ranks: Sequence[int], missed: bool
) -> str:
    if any(outside):
        each = by_rank([str(count) for count in outside], ranks).replace(";", ",")
        return f"The optimizer has made updates outside of this wrapper ({each}); let all go through the wrapper's step"
    if any(kind == "setting" for kind, _ in differing):
        return "Give every rank the same optimizer settings; they are not broadcast"
    if missed:
        return "Ranks that had joined have missed steps: behind the Join block call broadcast(params, root=joined.last)"
    if not equal_at:
        return (
            "Start from the same values everywhere: call broadcast(params) of the distributed optimizer before training"
        )
    return (
        "Something changed them on some ranks only (an assignment, a step around the wrapper), or the optimizer does "
        "not do the same everywhere (random numbers, data of its rank)"
    )
