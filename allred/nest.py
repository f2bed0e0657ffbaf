"""Nests of parameters or gradients: a single array, or lists, tuples and dicts of nests.

A leaf is anything that is not a list, a tuple or a dict. Leaves are named by their path ("fc1.weight", "layers.0.bias")
and visited in one order on every rank: sequences by index, dicts by sorted key.
"""

import copy
import hashlib
from collections.abc import Callable, Iterable
from typing import Any

from allred import arrays, native
from allred.errors import InputError

Leaf = tuple[str, Any]


def leaves(tree: Any, path: str = "") -> list[Leaf]:
    """Name and value of every leaf of `tree`, in the same order on every rank. Raises InputError for a cyclic nest.

    >>> leaves({"b": [1.0, None], "a": 2.0})
    [('a', 2.0), ('b.0', 1.0), ('b.1', None)]
    """
    found: list[Leaf] = []
    try:
        _walk(tree, path, found)
    except RecursionError:
        raise InputError("a nest of parameters is too deep or contains itself; flatten it") from None
    return found


def _walk(tree: Any, path: str, found: list[Leaf]) -> None:
    if isinstance(tree, dict):
        children: Iterable[Leaf] = ((str(key), tree[key]) for key in sorted(tree, key=str))
    elif isinstance(tree, (list, tuple)):
        children = ((str(index), value) for index, value in enumerate(tree))
    else:
        found.append((path, tree))
        return
    for name, value in children:
        name = f"{path}.{name}" if path else name
        if isinstance(value, (dict, list, tuple)):
            _walk(value, name, found)
        else:
            found.append((name, value))


def quoted(name: str, what: str = "") -> str:
    """Return the name of a leaf for a message, after `what` it is.

    >>> quoted("fc1.w"), quoted("fc1.w", "parameter"), quoted(""), quoted("", "parameter")
    ("'fc1.w'", "parameter 'fc1.w'", 'the array', 'the parameter')
    """
    return f"{what} '{name}'".strip() if name else f"the {what or 'array'}"


# The structure of a nest: None for a leaf, else (class, keys of a dict or None, structures of the children).
Structure = tuple[type, tuple[Any, ...] | None, tuple[Any, ...]] | None
NO_STRUCTURE: Structure = object, None, ()  # that of no nest


def structure(tree: Any) -> Structure:
    """Return the structure of a nest, by which native.leaves_of finds the leaves of another nest, in the order of
    `leaves`. NO_STRUCTURE for a nest that has other classes than dict, list and tuple.

    >>> structure({"b": [1.0, None], "a": 2.0})
    (<class 'dict'>, ('a', 'b'), (None, (<class 'list'>, None, (None, None))))
    """
    try:
        return _structure(tree)
    except (TypeError, RecursionError):
        return NO_STRUCTURE


def _structure(tree: Any) -> Structure:
    """Raises TypeError for a nest of other classes."""
    if not isinstance(tree, (dict, list, tuple)):
        return None
    if type(tree) is dict:
        keys = tuple(sorted(tree, key=str))
        return dict, keys, tuple(_structure(tree[key]) for key in keys)
    if type(tree) is list or type(tree) is tuple:
        return type(tree), None, tuple(map(_structure, tree))
    raise TypeError(f"{type(tree).__name__} may have its own behaviour")


def rebuild(tree: Any, values: list[Any]) -> Any:
    """Build a nest with the structure of `tree` and the leaves `values`, in the order of `leaves(tree)`.

    >>> rebuild({"b": [1.0, None], "a": 2.0}, [10, 20, 30])
    {'b': [20, 30], 'a': 10}
    """
    remaining = iter(values)
    return _rebuild(tree, lambda: next(remaining))


def _rebuild(tree: Any, take: Callable[[], Any]) -> Any:
    if isinstance(tree, dict):
        filled = copy.copy(tree)  # keeps the class and the order of keys
        for key in sorted(tree, key=str):
            filled[key] = _rebuild(tree[key], take)
        return filled
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):  # a named tuple
        return type(tree)(*(_rebuild(value, take) for value in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)([_rebuild(value, take) for value in tree])
    return take()


def digest(tree: Any) -> str:
    """Hash of all names, shapes, dtypes and bytes of a nest, 12 hex digits. Equal nests have equal digests.
    Different nests have equal digests with a probability of about 2**-32; it is easy to construct such nests (CRC-32).

    >>> digest({"w": [1.0, 2.0]}) == digest({"w": (1.0, 2.0)})
    True
    """
    total = hashlib.blake2b(digest_size=6)
    for name, leaf in leaves(tree):
        array = arrays.as_host_array(leaf)
        total.update(f"{name} {arrays.describe(array.shape, array.dtype)}\n".encode())
        checksum = native.crc32(arrays.as_bytes(array).data)  # much faster than a cryptographic hash
        total.update(checksum.to_bytes(4, "little"))
    return total.hexdigest()
