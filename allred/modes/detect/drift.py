"""Finds ranks that have drifted apart: parameters, optimizer states or learning rates that are not equal bit for bit.

A check compares one hash of everything; only if it differs, the ranks exchange a hash of each tensor. Parameters that
no rank has a gradient for are not compared: they may differ on purpose, like running statistics.
"""

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from allred import arrays, log, native, nest
from allred.arrays import Array
from allred.comm.arguments import memory_conflicts
from allred.comm.header import by_rank, hash_text, mix
from allred.gpu.device_arrays import is_device, to_host
from allred.optim.base import Optimizer
from allred.wording import named

_hash_name = functools.lru_cache(maxsize=2**16)(hash_text)
_NAMED = 3  # differences named in an error; the others are counted
# A stale first gradient is normal up to this number of updates per worker, and up to this time after a pull.
_STALE_STEPS, _LATE_S = 10, 1.0
_BLOCK = 2**14  # elements that are hashed together, and exchanged, to find the first one that differs
_NUMBERS = (int, float, complex, np.number)
_COMPARABLE = (*_NUMBERS, np.ndarray)


class Part(NamedTuple):
    """A value that must be equal on all ranks. kind: "setting", "state", "parameter", or "memory" (two parameters share
    memory)."""

    kind: str
    name: str
    value: Array


Table = dict[tuple[str, str], str]  # by kind and name: the text that is compared
_TITLES = {
    "setting": "the optimizer's {}",
    "state": "the optimizer's state '{}'",
    "parameter": "parameter '{}'",
    "memory": "parameters {}",
}


def parts_of(params: Any, trained: set[str], optimizer: Any) -> list[Part]:
    """Return the parts to compare: the parameters named in `trained`, and the settings and state of the optimizer."""
    parts = [Part("setting", name, np.asarray(value)) for name, value in _settings(optimizer).items()]
    state: Any = getattr(optimizer, "live_state", getattr(optimizer, "state_dict", dict))()
    kept = [
        (name, np.asarray(to_host(leaf)))
        for name, leaf in nest.leaves(state)
        if isinstance(leaf, _COMPARABLE) or is_device(leaf)
    ]
    parts += [Part("state", name, array) for name, array in kept if not array.dtype.hasobject]
    named = [(name, leaf) for name, leaf in nest.leaves(params) if name in trained]
    host = [(name, leaf) for name, leaf in named if type(leaf) is np.ndarray]
    for first, second in memory_conflicts([leaf for _, leaf in host]):
        parts.append(Part("memory", f"'{host[first][0]}' and '{host[second][0]}'", np.asarray(True)))
    return parts + [Part("parameter", name, to_host(leaf)) for name, leaf in named]


def _settings(optimizer: Any) -> dict[str, Any]:
    """Return the hyper-parameters: all numbers of an optimizer of allred.optim; `lr` of any other."""
    own = isinstance(optimizer, Optimizer)
    found = optimizer.hyperparameters() if own else {"lr": getattr(optimizer, "lr", None)}
    if isinstance(optimizer, Optimizer) and callable(optimizer.lr):
        found["learning_rate"] = optimizer.learning_rate
    return {name: value for name, value in nest.leaves(found) if isinstance(value, _NUMBERS)}


def fingerprint(parts: Sequence[Part]) -> int:
    total = len(parts)
    for part, found in zip(parts, native.hashes([arrays.as_bytes(part.value) for part in parts]), strict=True):
        total = mix(mix(total, _hash_name(part.name)), found)
    return total


def table(parts: Sequence[Part]) -> Table:
    """Return the text to compare of each part: numbers as they are; dtype, shape and hash of arrays."""
    found = {}
    for part in parts:
        value = _comparable(part.value)
        number = part.kind in ("setting", "memory") or (part.kind == "state" and not value.ndim)
        (hashed,) = native.hashes([arrays.as_bytes(value)])
        found[part.kind, part.name] = (
            str(value) if number else f"{arrays.describe(value.shape, value.dtype)} {hashed:x}"
        )
    return found


def _comparable(value: Array) -> Array:
    """Make all NaN equal: the payload of a NaN in a sum may differ between ranks."""
    if arrays.is_inexact(value.dtype):
        numbers = arrays.view_as_real(value)
        numbers = np.where(np.isnan(numbers), np.full((), np.nan, numbers.dtype), numbers)
        return numbers if numbers.ndim == value.ndim else arrays.view_as_complex(numbers)
    return value


def differing_parts(tables: list[Table]) -> list[tuple[str, str]]:
    """Return kind and name of the parts that differ between ranks. tables: of all ranks."""
    keys = list(dict.fromkeys(key for each in tables for key in each))
    return [key for key in keys if len({each.get(key) for each in tables}) > 1]


def describe_first_differences(
    parts: Sequence[Part], keys: list[tuple[str, str]], ranks: Sequence[int], exchange: Callable[[Any], list[Any]]
) -> dict[tuple[str, str], str]:
    """Return {part: text} with index and values of the first element that differs, for the parts that the error names.
    Collective. Called only after drift was found: two exchanges for each array (hashes of blocks, then one block).

    keys: the result of `differing_parts`. exchange: gathers an object from all ranks.
    """
    own = {(part.kind, part.name): part.value for part in parts}
    found = {}
    for key in keys[:_NAMED]:
        value = None if key not in own else _comparable(np.ascontiguousarray(own[key])).reshape(-1)
        blocks = [] if value is None else [value[i : i + _BLOCK] for i in range(0, value.size, _BLOCK)]
        layout = None if value is None else arrays.describe(own[key].shape, value.dtype)
        everyone = exchange((layout, native.hashes([arrays.as_bytes(block) for block in blocks])))
        if len({other for other, _ in everyone}) > 1 or value is None or not own[key].ndim:
            continue  # the error names the difference
        block = next(i for i in range(len(blocks)) if len({hashes[i] for _, hashes in everyone}) > 1)
        values = exchange(blocks[block])
        at = next(i for i in range(len(values[0])) if len({row[i].tobytes() for row in values}) > 1)
        place = [int(index) for index in np.unravel_index(block * _BLOCK + at, own[key].shape)]
        texts = by_rank([str(row[at]) for row in values], ranks).replace(";", ",")
        found[key] = f" (first difference at index {place}: {texts})"
    return found


def verdict(
    tables: list[Table],
    step: int,
    equal_at: int,
    outside: list[int],
    ranks: Sequence[int],
    missed: bool = False,
    values: dict[tuple[str, str], str] | None = None,
) -> str:
    """Describe what differs on which ranks; "" if nothing does. The same text on every rank.

    Arguments:
        tables: of all ranks.
        step: the step before which they were compared.
        equal_at: the step before which they were last equal, or 0.
        outside: by rank: updates that its optimizer has made without its wrapper.
        ranks: the numbers of the ranks.
        missed: whether some ranks have missed steps because they had joined.
        values: the result of `describe_first_differences`.
    """
    keys = differing_parts(tables)
    if not keys:
        return ""
    words = [
        _difference(key, [each.get(key, "missing") for each in tables], ranks) + (values or {}).get(key, "")
        for key in keys[:_NAMED]
    ]
    more = f"; and {len(keys) - _NAMED} more" if len(keys) > _NAMED else ""
    since = f"after step {equal_at} and before step {step}" if equal_at else f"before step {step}"
    remedy = _remedy(keys, equal_at, outside, ranks, missed)
    return (
        f"the ranks have drifted apart {since}: {'; '.join(words)}{more}. {remedy}; "
        "ALLRED_CHECK_STEPS=0 switches this check off"
    )


def _difference(key: tuple[str, str], texts: list[str], ranks: Sequence[int]) -> str:
    """Describe a difference: a number with its values, or an array with the ranks that differ from the majority."""
    name = _TITLES[key[0]].format(key[1])
    if key[0] == "memory":
        sharing = [rank for rank, text in zip(ranks, texts, strict=True) if text != "missing"]
        return f"{name} share memory on {named('rank', sharing)} only"
    if not any(" " in text for text in texts):
        return f"{name} is {by_rank(texts, ranks).replace(';', ',')}"
    usual = Counter(texts).most_common(1)[0][0]  # in a tie, the value of the first rank
    odd = [(rank, text) for rank, text in zip(ranks, texts, strict=True) if text != usual]
    how = "is missing" if all(text == "missing" for _, text in odd) else "differs"
    return f"{name} {how} on {named('rank', [rank for rank, _ in odd])}"


def _remedy(keys: list[tuple[str, str]], equal_at: int, outside: list[int], ranks: Sequence[int], missed: bool) -> str:
    if any(outside):
        each = by_rank([str(count) for count in outside], ranks).replace(";", ",")
        return f"The optimizer has made updates outside of this wrapper ({each}); let all go through the wrapper's step"
    if any(kind == "setting" for kind, _ in keys):
        return "Give every rank the same optimizer settings; they are not broadcast"
    if any(kind == "memory" for kind, _ in keys):
        return "Let the same parameters share memory on all ranks"
    if missed:
        return (
            "Ranks that had joined have missed steps: after the Join block call broadcast(params, root=joined.last), "
            "and before it broadcast(params)"
        )
    if not equal_at:
        return (
            "Start from the same values everywhere: call broadcast(params) of the distributed optimizer before "
            "training, or hvd.broadcast_parameters"
        )
    return (
        "Something changed them on some ranks only (an assignment, a step around the wrapper), or the optimizer does "
        "not do the same everywhere (random numbers, data of its rank)"
    )


def warn_of_stale_start(name: str, worker: int, workers: int, staleness: int, late_s: float) -> None:
    """Mode ps: warn if the first gradient of a worker is too stale, such as after a slow operation after its last pull.

    The other workers train meanwhile. The gradient is applied like any other, and may undo progress. staleness: the
    number of updates that its parameters lack. late_s: time from its last pull to its first step.
    """
    if staleness > _STALE_STEPS * workers and late_s >= _LATE_S:
        log.rank_warning(
            f"{name}.step(): the first gradient of worker {worker} was computed from parameters that lack {staleness} "
            f"updates; call {name}.broadcast(params) or {name}.pull(params) directly before the training loop"
        )
