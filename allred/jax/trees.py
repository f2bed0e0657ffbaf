"""Pytrees as named arrays: "hidden.w" for the leaf of {"hidden": {"w": ...}}, as in nests of numpy arrays."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from allred.arrays import Array
from allred.errors import InputError


def names_of(tree: Any) -> list[str]:
    """Return the names of all leaves, in the order of `jax.tree.leaves`. Raises InputError if two have one name."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path in paths]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"two leaves of a pytree have the name '{twice}'; rename one of the keys")
    return names


def is_key(leaf: Any) -> bool:
    """Whether a leaf is an array of random keys, of `jax.random.key`."""
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


class Arrays(NamedTuple):
    """The arrays of a pytree. Random keys are replaced by their data. rebuild: makes the pytree with other arrays;
    other leaves, such as functions, stay."""

    names: list[str]
    values: list[Any]
    rebuild: Callable[[Sequence[Any]], Any]

    def to_numpy(self) -> dict[str, Array]:
        """Return copies by name."""
        return {name: np.array(value) for name, value in zip(self.names, self.values, strict=True)}

    def from_numpy(self, arrays: dict[str, Array]) -> Any:
        """Return the pytree with copies of these arrays, which are given by name."""
        return self.rebuild([like(old, arrays[name]) for name, old in zip(self.names, self.values, strict=True)])


def like(old: Any, array: Array) -> Any:
    """Return a copy of an array with the class of another leaf: an array of JAX or numpy, or a number."""
    if isinstance(old, np.ndarray):
        return np.array(array)
    return jnp.array(array) if isinstance(old, jax.Array) else type(old)(array.item())


_ARRAYS = jax.Array, np.ndarray, np.generic


def arrays_of(tree: Any, numbers: bool = False) -> Arrays:
    """Return the arrays of a pytree. numbers: also Python's numbers and bools."""
    leaves, structure = jax.tree_util.tree_flatten(tree)
    kinds = (*_ARRAYS, int, float) if numbers else _ARRAYS
    indices = [index for index, leaf in enumerate(leaves) if isinstance(leaf, kinds)]
    names = names_of(tree)

    def rebuild(values: Sequence[Any]) -> Any:
        filled = list(leaves)
        for index, value in zip(indices, values, strict=True):
            old = leaves[index]
            filled[index] = jax.random.wrap_key_data(value, impl=jax.random.key_impl(old)) if is_key(old) else value
        return jax.tree_util.tree_unflatten(structure, filled)

    values = [jax.random.key_data(leaves[index]) if is_key(leaves[index]) else leaves[index] for index in indices]
    return Arrays([names[index] for index in indices], values, rebuild)
