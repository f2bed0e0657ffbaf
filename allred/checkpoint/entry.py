"""Entries: each names the elements of one tensor that a shard holds. Pickled objects are entries too. Pure functions.

Parameter names are data. They are stored in the manifest and in the shards, never in a file name, so any text is valid.

Unpickling runs code from the file: restore only checkpoints that you trust as you trust the program.
"""

import dataclasses
import json
import math
import operator
import pickle
from collections.abc import Iterable
from typing import Any

import numpy as np

from allred import arrays
from allred.arrays import Array
from allred.errors import CheckpointError, InputError

DTYPES = frozenset(arrays.DTYPES)
_PICKLED_NAME = ""  # a nest that is a single array has this name too; its slots "state" and "extra" are escaped
_STATE, _EXTRA = "state", "extra"
_MOST_DIMENSIONS, _MOST_ELEMENTS = 64, 2**58  # of an array of any dtype
_ESCAPE = "\0"  # prefix of slot names that the format reserves, and of names that begin with it


@dataclasses.dataclass(frozen=True)
class Entry:
    """Elements `start` to `stop` of a tensor, flattened in C order.

    name: the name of the parameter; any text. slot: the result of `stored_slot` for the name of the optimizer slot of
    that parameter; "" for the parameter itself. dtype: numpy's name of the dtype, or "bfloat16". shape: the shape of
    the whole tensor. The shape of a slot may differ from its parameter's. start, stop: 0 <= start <= stop <= elements
    of the whole tensor; 0 and 1 for a 0-d tensor.
    Raises InputError: the dtype cannot be saved, or the range is not within the tensor.
    """

    name: str
    slot: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    def __post_init__(self) -> None:
        for field in ("start", "stop"):  # json does not accept numpy's integers
            object.__setattr__(self, field, operator.index(getattr(self, field)))
        object.__setattr__(self, "shape", tuple(map(operator.index, self.shape)))
        if self.dtype not in DTYPES:
            raise InputError(
                f"checkpoint: {self.title} has dtype {self.dtype}, which cannot be saved; "
                f"convert it to one of {', '.join(sorted(DTYPES))}"
            )
        if not 0 <= self.start <= self.stop <= self.elements:
            raise InputError(
                f"checkpoint: {self.title} has {self.elements} elements, but the entry has start={self.start} and "
                f"stop={self.stop}; expected 0 <= start <= stop <= {self.elements}"
            )

    @property
    def elements(self) -> int:
        """The number of elements of the whole tensor."""
        return arrays.size_of(self.shape)

    @property
    def nbytes(self) -> int:
        """The number of bytes of the elements of the entry."""
        return (self.stop - self.start) * (2 if self.dtype == "bfloat16" else np.dtype(self.dtype).itemsize)

    def check(self) -> "Entry":
        """Return the entry of a file if an array of its shape is possible, and its names are text. Raises ValueError or
        TypeError."""
        largest = math.prod(max(size, 1) for size in self.shape)
        if len(self.shape) > _MOST_DIMENSIONS or min(self.shape, default=0) < 0 or largest > _MOST_ELEMENTS:
            raise ValueError(f"no array can have {len(self.shape)} dimensions of these sizes")
        if not isinstance(self.name, str) or not isinstance(self.slot, str):
            raise TypeError("a name is not text")
        return self

    @property
    def is_whole(self) -> bool:
        """Whether the entry covers the whole tensor."""
        return self.stop - self.start == self.elements

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the array in the shard: that of the tensor if the entry is whole, else flat."""
        return self.shape if self.is_whole else (self.stop - self.start,)

    @property
    def key(self) -> str:
        """The unique ASCII name of the array in the shard.

        >>> Entry("fc1.weight", "m", "float32", (4, 2), 0, 6).key
        '["fc1.weight", "m", 0, 6]'
        """
        return json.dumps([self.name, self.slot, self.start, self.stop])

    @property
    def title(self) -> str:
        """The name of the tensor in messages."""
        return f"slot {self.slot_name!r} of {self.name!r}" if self.slot else f"{self.name!r}"

    @property
    def slot_name(self) -> str:
        """The name that the optimizer uses for the slot; only if `slot` is not ""."""
        return self.slot.removeprefix(_ESCAPE)

    @property
    def is_pickled(self) -> bool:
        """Whether the entry holds a pickle: `pickled_state` or `pickled_extra` made it. Earlier versions did not escape
        slots."""
        is_bytes = self.dtype == "uint8" and len(self.shape) == 1
        return self.name == _PICKLED_NAME and self.slot in (_STATE, _EXTRA) and is_bytes

    @property
    def is_extra(self) -> bool:
        """Whether `pickled_extra` made the entry."""
        return self.is_pickled and self.slot == _EXTRA


def stored_slot(name: str, slot: str) -> str:
    """Return the name under which the slot `slot` of the parameter `name` is stored. Names that the format reserves are
    escaped with "\\0"."""
    is_reserved = not slot or (name == _PICKLED_NAME and slot in (_STATE, _EXTRA))
    return _ESCAPE + slot if is_reserved or slot.startswith(_ESCAPE) else slot


def whole(name: str, array: Any, slot: str | None = None) -> tuple[Entry, Array]:
    """Return the entry of a whole tensor and the tensor, as `write_shard` takes them.

    name: the name of the parameter. slot: the name of its optimizer slot, any text; None for the parameter itself.
    array: a host array of any shape and layout, or a number. Not copied.
    Raises InputError: the array is on a GPU, or its dtype cannot be saved.
    """
    return _whole(name, array, "" if slot is None else stored_slot(name, slot))


def _whole(name: str, array: Any, slot: str) -> tuple[Entry, Array]:
    host = arrays.as_host_array(array)
    return Entry(name, slot, arrays.name_of(host.dtype), tuple(host.shape), 0, host.size), host


def pickled_state(state: Any) -> tuple[Entry, Array]:
    """Return the entry of the state of an optimizer that is not from allred.optim."""
    return _pickled(state, _STATE)


def pickled_extra(value: Any) -> tuple[Entry, Array]:
    """Return the entry of the object that a session saves with parameters and optimizer."""
    return _pickled(value, _EXTRA)


def _pickled(value: Any, slot: str) -> tuple[Entry, Array]:
    return _whole(_PICKLED_NAME, np.frombuffer(pickle.dumps(value, pickle.HIGHEST_PROTOCOL), np.uint8), slot)


def unpickle_state(pickled: dict[str, Array]) -> Any:
    """Return the object given to `pickled_state` from the pickles of a checkpoint; None if there is none."""
    return _unpickled(pickled, _STATE)


def unpickle_extra(pickled: dict[str, Array]) -> Any:
    """Return the object given to `pickled_extra` from the pickles of a checkpoint; None if there is none."""
    return _unpickled(pickled, _EXTRA)


def _unpickled(pickled: dict[str, Array], slot: str) -> Any:
    return pickle.loads(pickled[slot].tobytes()) if slot in pickled else None


def check_cover(who: str, entries: Iterable[tuple[str, Entry]]) -> None:
    """Raise CheckpointError unless each element of each tensor is in exactly one of the entries.

    who: the beginning of the message. entries: those of all shards, each with the file name of its shard.
    """
    tensors: dict[tuple[str, str], list[tuple[str, Entry]]] = {}
    for file, entry in entries:
        tensors.setdefault((entry.name, entry.slot), []).append((file, entry))
    for pieces in tensors.values():
        first_file, first = pieces[0]
        for file, entry in pieces:
            if (entry.dtype, entry.shape) != (first.dtype, first.shape):
                raise CheckpointError(
                    f"{who}: {first.title} is {first.dtype} {first.shape} in {first_file}, but {entry.dtype} "
                    f"{entry.shape} in {file}; all pieces must be of one tensor"
                )
        _check_ranges(who, pieces)


def _check_ranges(who: str, pieces: list[tuple[str, Entry]]) -> None:
    tensor, end = pieces[0][1], pieces[0][1].elements
    if end == 0 and len(pieces) > 1:
        files = ", ".join(file for file, _ in pieces)
        raise CheckpointError(f"{who}: {tensor.title}, which is empty, is in {files}; expected it in exactly one shard")
    ranges = sorted((entry.start, entry.stop, file) for file, entry in pieces if entry.start < entry.stop)
    covered, previous = 0, "its begin"
    for start, stop, file in [*ranges, (end, end, "its end")]:
        if start != covered:
            where = "in no shard" if covered < start else "in two shards"
            raise CheckpointError(
                f"{who}: elements {min(covered, start)} to {max(covered, start)} of {tensor.title}, {tensor.dtype} "
                f"{tensor.shape}, are {where}, between {previous} and {file}; expected each element in exactly one "
                "shard"
            )
        covered, previous = stop, file
