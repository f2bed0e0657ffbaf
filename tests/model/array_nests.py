"""Random nests of arrays: containers, names, shapes, dtypes, layouts, and arrays that share memory.

A `Tree` is a plan, without arrays, so ranks and the oracle make the same arrays of it. All choices come from a
`random.Random`: a scenario follows from a seed, and hypothesis shrinks failures (`strategies.randoms`).
"""

import collections
import dataclasses
import hashlib
import random
from collections.abc import Iterable
from typing import Any

import ml_dtypes
import numpy as np

from allred import nest

Pair = collections.namedtuple("Pair", ["x", "y"])

SHAPES = [(), (3,), (1,), (0,), (2, 3), (4, 1, 2), (1, 1), (0, 5), (17,), (40, 50)]
DTYPES = {name: np.dtype(name) for name in ("f4", "f8", "f2", "c8")} | {"bf16": np.dtype(ml_dtypes.bfloat16)}
TOLERANCES = {"f8": 1e-10, "f4": 1e-5, "c8": 1e-5, "f2": 4e-2, "bf16": 4e-2}  # relative and absolute
LAYOUTS = ["C", "F", "strided", "reversed", "offset", "subclass", "transposed"]
KEYS: list[Any] = ["a", "b", "", "a.b", "0", "é", " ", 1, "w"]


class Subclass(np.ndarray):
    pass


class Plan:
    """Base class of plans: dataclasses whose repr leaves out the fields with their default value."""

    def __repr__(self) -> str:
        fields = [(field.name, getattr(self, field.name), field.default) for field in dataclasses.fields(self)]
        return f"{type(self).__name__}({', '.join(f'{n}={v!r}' for n, v, default in fields if v != default)})"


@dataclasses.dataclass(frozen=True, repr=False)
class Leaf(Plan):
    """One array. tie: the leaf that it shares memory with ("same", or "overlap": the second half of a buffer)."""

    shape: tuple[int, ...]
    dtype: str
    layout: str = "C"
    tie: tuple[str, int] | None = None


@dataclasses.dataclass(frozen=True, repr=False)
class Tree(Plan):
    """A nest with the index of a leaf in place of each array."""

    nest: Any
    leaves: tuple[Leaf, ...]

    def fill(self, values: list[Any], order: random.Random | None = None) -> Any:
        """Return the nest with these leaves. order: of the keys of dicts."""
        return _fill(self.nest, values, order)

    @property
    def names(self) -> list[str]:
        """The name of each leaf, by its index."""
        named = {index: name for name, index in nest.leaves(self.nest)}
        return [named[index] for index in range(len(self.leaves))]

    @property
    def order(self) -> list[int]:
        """The indices of the leaves in the order of the nest."""
        return [index for _, index in nest.leaves(self.nest)]


def tree(rng: random.Random, dtypes: list[str], ties: bool) -> Tree:
    kind = rng.choice(["list", "nested", "dict", "bare", "one", "empty", "many", "tuple", "pair"])
    count = {"bare": 1, "one": 1, "empty": 0, "pair": 2, "many": rng.choice([40, 300])}.get(kind, rng.randint(1, 5))
    leaves: list[Leaf] = []
    tied: set[int] = set()
    for index in range(count):
        shape, dtype = rng.choice(SHAPES), rng.choice(dtypes)
        if ties and index and rng.random() < 0.3:
            other = rng.randrange(index)
            how = rng.choice(["same", "overlap"])
            if leaves[other].tie is None and other not in tied and (how == "same" or len(leaves[other].shape) == 1):
                tied.add(other)
                leaves.append(dataclasses.replace(leaves[other], tie=(how, other)))
                continue
        leaves.append(Leaf(shape, dtype, rng.choice(LAYOUTS) if rng.random() < 0.3 else "C"))
    return Tree(_nest_of(rng, kind, count), tuple(leaves))


def _nest_of(rng: random.Random, kind: str, count: int) -> Any:
    indices = list(range(count))
    if kind == "bare":
        return 0
    if kind == "one":
        return rng.choice([[0], (0,), {"": 0}, {"w": 0}, {"": {"": 0}}, [[[0]]]])
    if kind == "empty":
        return rng.choice([[], {}, (), [[], {}]])
    if kind == "pair":
        return Pair(0, [1])
    if kind == "dict":
        return dict(zip(rng.sample(KEYS, min(count, len(KEYS))), indices, strict=False)) | {
            f"k{index}": index for index in indices[len(KEYS) :]
        }
    if kind == "nested":
        cut = rng.randint(0, count)
        return {"z": indices[:cut], rng.choice(["", "a", "b.c"]): tuple(indices[cut:])}
    return tuple(indices) if kind == "tuple" else indices


def _fill(tree: Any, values: list[Any], order: random.Random | None) -> Any:
    if isinstance(tree, dict):
        keys = list(tree)
        if order is not None:
            order.shuffle(keys)
        return {key: _fill(tree[key], values, order) for key in keys}
    if isinstance(tree, Pair):
        return Pair(*(_fill(child, values, order) for child in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(_fill(child, values, order) for child in tree)
    return values[tree]


def arrays(leaves: tuple[Leaf, ...], values: list[np.ndarray], apart: bool = False) -> list[np.ndarray]:
    """Return arrays with these values, layouts and ties. apart: without ties."""
    made: list[np.ndarray] = []
    for leaf, value in zip(leaves, values, strict=True):
        if leaf.tie is None or apart:
            made.append(laid_out(value, leaf.layout))
        elif leaf.tie[0] == "same":
            made.append(made[leaf.tie[1]])
        else:
            other = leaf.tie[1]
            length, shift = leaf.shape[0], leaf.shape[0] // 2
            buffer = np.empty(length + shift, value.dtype)
            buffer[:length], buffer[shift:] = made[other], value
            made[other] = buffer[:length]
            made.append(buffer[shift:])
    return made


def laid_out(value: np.ndarray, layout: str) -> np.ndarray:
    """Return a writable copy with a memory layout."""
    if layout == "F":
        return np.array(value, order="F")
    if layout == "strided" and value.ndim:
        return np.repeat(value, 2, axis=-1)[..., ::2]
    if layout == "reversed" and value.ndim:
        return np.array(value[::-1])[::-1]
    if layout == "offset":
        buffer = np.empty(value.size + 3, value.dtype)
        buffer[3:] = value.reshape(-1)
        return buffer[3:].reshape(value.shape)
    if layout == "subclass":
        return np.array(value).view(Subclass)
    if layout == "transposed":
        return np.array(value.T).T
    return np.array(value)


# ---- Comparisons


def wide(value: Any, dtype: np.dtype[Any] | None = None) -> np.ndarray:
    """Return numbers as float64; complex numbers (...) as float64 (..., 2). dtype: to convert to first."""
    array = np.asarray(value, dtype)
    if array.dtype.kind != "c":
        return array.astype("f8")
    return np.stack([array.real, array.imag], axis=-1).astype("f8")


def narrow(parts: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """Return the result of `wide` as numbers of a dtype."""
    if dtype.kind != "c":
        return np.asarray(parts).astype(dtype)
    numbers = np.empty(parts.shape[:-1], dtype)
    numbers.real, numbers.imag = parts[..., 0], parts[..., 1]
    return numbers


def draw(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Return random numbers: multiples of 1/8 from -2 to 2, which are exact in each dtype."""
    values = rng.integers(-16, 17, shape) / 8
    if dtype.kind == "c":
        values = values + 1j * rng.integers(-16, 17, shape) / 8
    return np.asarray(values).astype(dtype)


def digest(values: list[Any]) -> str:
    """Return a hash of numbers and arrays, with one code for all NaN."""
    numbers = [np.ravel(wide(value)) for value in values]
    total = np.nan_to_num(np.concatenate([np.zeros(0), *numbers]))
    return hashlib.blake2b(total.tobytes() + str([each.size for each in numbers]).encode(), digest_size=6).hexdigest()


def tolerances(tree: Tree, state: Iterable[str] = (), rough: bool = False) -> dict[str, float]:
    """Return the tolerances of "leaf 0", of "all" leaves, and of names of a state: that of their leaf, or 0. rough: as
    for 16-bit numbers, for all."""
    limits = [TOLERANCES["f2" if rough else leaf.dtype] for leaf in tree.leaves]
    found = {f"leaf {index}": limit for index, limit in enumerate(limits)} | {"all": max(limits, default=0.0)}
    by_name = dict(zip(tree.names, limits, strict=True))
    # "slots.", the name of the leaf, and the name of the slot
    return found | {name: by_name.get(name.removeprefix("slots.").rpartition(".")[0], 0.0) for name in state}


def first_difference(got: dict[str, Any], want: dict[str, Any], tolerances: dict[str, float]) -> str:
    """Compare numbers and arrays by name. Return the first difference as text, or "". tolerances: of the names that are
    not equal exactly, relative and absolute."""
    if got.keys() != want.keys():
        return f"got {sorted(got)}, expected {sorted(want)}"
    unequal: list[tuple[str, Any, Any]] = []
    for name, value in got.items():
        one, two = np.asarray(value), np.asarray(want[name])
        if one.shape != two.shape or one.dtype != two.dtype:
            return f"{name} is {one.dtype} {one.shape}, expected {two.dtype} {two.shape}"
        if one.tobytes() != two.tobytes():
            unequal.append((name, one, two))
    if not unequal:
        return ""
    parts = [(np.ravel(wide(one)), np.ravel(wide(two))) for _, one, two in unequal]
    limits = np.concatenate(
        [np.full(one.size, tolerances.get(name, 0.0)) for (name, _, _), (one, _) in zip(unequal, parts, strict=True)]
    )
    ones, twos = (np.concatenate([each[i] for each in parts]) for i in (0, 1))
    with np.errstate(invalid="ignore"):
        bad = ~((ones == twos) | (np.isnan(ones) & np.isnan(twos)) | (abs(ones - twos) <= limits * (1 + abs(twos))))
    if not bad.any():
        return ""
    last = np.cumsum([one.size for one, _ in parts])
    name, one, two = unequal[int(np.searchsorted(last, np.argmax(bad), side="right"))]
    return f"{name} is {one.tolist()}, expected {two.tolist()}"
