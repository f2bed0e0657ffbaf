"""An entry: which elements of which tensor a shard holds; and the check that entries make whole tensors. All pure.

Names are data: they stand in the manifest and in the shards, never in a file name, so any text is a valid name.
"""

import dataclasses
import json
import operator
from collections.abc import Iterable
from typing import Any

from allred import arrays
from allred.arrays import Array
from allred.errors import CheckpointError, InputError

# What numpy and every safetensors from 0.4 on can hold. More than allred moves: random generators have uint32 keys.
DTYPES = frozenset(
    {"bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"}
    | {"float16", "bfloat16", "float32", "float64"}
)


@dataclasses.dataclass(frozen=True)
class Entry:
    """Elements `start` to `stop` of a tensor, flattened in C order.

    Arguments:
        name: of the parameter; any text.
        slot: of the optimizer's state of that parameter; "" for the parameter itself.
        dtype: numpy's name of it, or "bfloat16".
        shape: of the whole tensor. A slot has its own, which may differ from its parameter's.
        start, stop: 0 <= start <= stop <= elements of the whole tensor; 0 and 1 for a 0-d tensor.

    Raises:
        InputError: the dtype cannot be saved, or the range is not within the tensor.
    """

    name: str
    slot: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    def __post_init__(self) -> None:
        for field in ("start", "stop"):  # numpy's integers are welcome, but json does not take them
            object.__setattr__(self, field, operator.index(getattr(self, field)))
        object.__setattr__(self, "shape", tuple(map(operator.index, self.shape)))
        if self.dtype not in DTYPES:
            raise InputError(
                f"checkpoint: {self.title} has dtype {self.dtype}, which cannot be saved; "
                f"convert it to one of {', '.join(sorted(DTYPES))}"
            )
        if not 0 <= self.start <= self.stop <= self.elements:
            raise InputError(
                f"checkpoint: {self.title} has {self.elements} elements, but the entry is of {self.start} to "
                f"{self.stop}; expected 0 <= start <= stop <= {self.elements}"
            )

    @property
    def elements(self) -> int:
        """Of the whole tensor."""
        return arrays.size_of(self.shape)

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the tensor."""
        return self.stop - self.start == self.elements

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the array in the shard: the tensor's own, so that other programs can use it; flat for a piece."""
        return self.shape if self.is_whole else (self.stop - self.start,)

    @property
    def key(self) -> str:
        """What the array is called in the shard: ASCII, and different for different entries whatever their names.

        >>> Entry("fc1.weight", "m", "float32", (4, 2), 0, 6).key
        '["fc1.weight", "m", 0, 6]'
        """
        return json.dumps([self.name, self.slot, self.start, self.stop])

    @property
    def title(self) -> str:
        """What messages call the tensor."""
        return f"slot {self.slot!r} of {self.name!r}" if self.slot else f"{self.name!r}"


def whole(name: str, array: Any, slot: str = "") -> tuple[Entry, Array]:
    """The entry of a tensor that is not split, and the tensor, as `write_shard` takes them.

    Arguments:
        name, slot: see Entry.
        array: a host array of any shape and layout, or a number. Not copied.

    Raises:
        InputError: it lives on a GPU, or has a dtype that cannot be saved.
    """
    host = arrays.as_host_array(array)
    return Entry(name, slot, arrays.name_of(host.dtype), tuple(host.shape), 0, host.size), host


def check_cover(who: str, entries: Iterable[tuple[str, Entry]]) -> None:
    """Raise CheckpointError unless each tensor is there once: every element in exactly one of the entries.

    Arguments:
        who: begins the message.
        entries: of all shards, each with the name of its shard's file.
    """
    tensors: dict[tuple[str, str], list[tuple[str, Entry]]] = {}
    for file, entry in entries:
        tensors.setdefault((entry.name, entry.slot), []).append((file, entry))
    for pieces in tensors.values():
        _check_same(who, pieces)
        _check_ranges(who, pieces)


def _check_same(who: str, pieces: list[tuple[str, Entry]]) -> None:
    """Dtype and shape of the tensor must be the same in all of its pieces."""
    first_file, first = pieces[0]
    for file, entry in pieces:
        if (entry.dtype, entry.shape) != (first.dtype, first.shape):
            raise CheckpointError(
                f"{who}: {first.title} is {first.dtype} {first.shape} in {first_file}, but {entry.dtype} {entry.shape} "
                f"in {file}; all pieces must be of one tensor"
            )


def _check_ranges(who: str, pieces: list[tuple[str, Entry]]) -> None:
    tensor, end = pieces[0][1], pieces[0][1].elements
    if end == 0 and len(pieces) > 1:
        files = ", ".join(file for file, _ in pieces)
        raise CheckpointError(f"{who}: {tensor.title}, which is empty, is in {files}; expected it in exactly one shard")
    ranges = sorted((entry.start, entry.stop, file) for file, entry in pieces if entry.start < entry.stop)
    done, before = 0, "its begin"
    for start, stop, file in [*ranges, (end, end, "its end")]:
        if start != done:
            what = "in no shard" if done < start else "in two shards"
            raise CheckpointError(
                f"{who}: elements {min(done, start)} to {max(done, start)} of {tensor.title}, {tensor.dtype} "
                f"{tensor.shape}, are {what}, between {before} and {file}; expected each element in exactly one shard"
            )
        done, before = stop, file
