"""Pytrees as named arrays: "hidden.w" for the leaf of {"hidden": {"w": ...}}, as in nests of numpy arrays."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from allred.arrays import Array


def names_of(tree: Any) -> list[str]:
    """Return the names of all leaves, in the order of `jax.tree.leaves`."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    return [jax.tree_util.keystr(path, simple=True, separator=".") for path in paths]


def is_key(leaf: Any) -> bool:
    """Whether a leaf is an array of random keys, of `jax.random.key`."""
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


class Arrays(NamedTuple):
    """The arrays and numbers of a pytree. Random keys are replaced by their data. rebuild: makes the pytree with other
    arrays; leaves that are neither arrays nor numbers, such as functions, stay."""

    names: list[str]
    values: list[Any]
    rebuild: Callable[[Sequence[Any]], Any]

    def to_numpy(self) -> dict[str, Array]:
        """Return copies by name."""
        return {name: np.array(value) for name, value in zip(self.names, self.values, strict=True)}

    def from_numpy(self, arrays: dict[str, Array]) -> Any:
        """Return the pytree with copies of these arrays, which are given by name."""
        return self.rebuild([jnp.array(arrays[name]) for name in self.names])


def arrays_of(tree: Any) -> Arrays:
    leaves, structure = jax.tree_util.tree_flatten(tree)
    indices = [index for index, leaf in enumerate(leaves) if _is_array(leaf)]
    names = names_of(tree)

    def rebuild(values: Sequence[Any]) -> Any:
        filled = list(leaves)
        for index, value in zip(indices, values, strict=True):
            old = leaves[index]
            filled[index] = jax.random.wrap_key_data(value, impl=jax.random.key_impl(old)) if is_key(old) else value
        return jax.tree_util.tree_unflatten(structure, filled)

    values = [jax.random.key_data(leaves[index]) if is_key(leaves[index]) else leaves[index] for index in indices]
    return Arrays([names[index] for index in indices], values, rebuild)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | int | float) and not isinstance(leaf, bool)
