"""How one server's part of the parameters lies in memory, and in which cells it passes; known to both ends.

All pieces of one dtype lie one behind the other, as a group: for an optimizer that works element by element a group is
one long vector, whatever tensors are in it. A cell is a stretch of a group. Gradients come, are applied and go back as
parameters cell by cell, so there is no loop over tensors at the server; a cell fits into a core's cache.

Gradients travel in the dtype of the update's arithmetic, `compute_dtype`: 16-bit parameters have float32 gradients.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from allred.arrays import Array, name_of
from allred.fusion import Tensor
from allred.optim.tensors import compute_dtype
from allred.ps.placement import Piece

CELL_BYTES = 2**19  # of gradients
_ALIGN = 64


class Group(NamedTuple):
    """All elements of one dtype: their number, the dtype of their gradients, and where they begin, in bytes."""

    dtype: np.dtype[Any]
    gradient: np.dtype[Any]
    elements: int
    offset: int


class Cell(NamedTuple):
    """Elements start to stop of a group."""

    group: int
    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class Layout:
    """Of the pieces of one server. `starts[i]`: the group of pieces[i], and its first element there."""

    tensors: tuple[Tensor, ...]  # of the whole model
    pieces: tuple[Piece, ...]
    starts: tuple[tuple[int, int], ...]
    groups: tuple[Group, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters' memory."""
        return max((_aligned(g.offset + g.elements * g.dtype.itemsize) for g in self.groups), default=0)

    @functools.cached_property
    def has_bfloat16(self) -> bool:
        """Whether some parameters lack the buffer protocol."""
        return any(name_of(group.dtype) == "bfloat16" for group in self.groups)

    @functools.cached_property
    def cells(self) -> tuple[Cell, ...]:
        """All cells, in the order in which they pass."""
        found = []
        for number, group in enumerate(self.groups):
            step = max(CELL_BYTES // group.gradient.itemsize, 1)
            found += [Cell(number, at, min(at + step, group.elements)) for at in range(0, group.elements, step)]
        return tuple(found)

    @functools.cached_property
    def up(self) -> Array:
        """Bytes of each cell on its way to the server, as int64."""
        return np.array([(c.stop - c.start) * self.groups[c.group].gradient.itemsize for c in self.cells], np.int64)

    @functools.cached_property
    def down(self) -> Array:
        """Offset and bytes of each cell in the parameters' memory, as int64 of shape (cells, 2)."""
        pairs = [
            (g.offset + c.start * g.dtype.itemsize, (c.stop - c.start) * g.dtype.itemsize)
            for c in self.cells
            for g in [self.groups[c.group]]
        ]
        return np.array(pairs, np.int64).reshape(-1, 2)

    def groups_of(self, memory: Any) -> list[Array]:
        """Each group as a vector in `memory`, which holds nbytes."""
        data = np.frombuffer(memory, np.uint8)
        return [data[g.offset : g.offset + g.elements * g.dtype.itemsize].view(g.dtype) for g in self.groups]

    def piece_of(self, groups: Sequence[Array], index: int) -> Array:
        """The elements of one piece in arrays like `groups_of`'s."""
        group, start = self.starts[index]
        return groups[group][start : start + self.pieces[index].stop - self.pieces[index].start]


def lay_out(tensors: Sequence[Tensor], pieces: Sequence[Piece]) -> Layout:
    """The layout of one server's pieces of `tensors`."""
    dtypes = list(dict.fromkeys(tensors[piece.tensor].dtype for piece in pieces))
    ordered, starts, groups, offset = [], [], [], 0
    for number, dtype in enumerate(dtypes):
        at = 0
        for piece in pieces:
            if tensors[piece.tensor].dtype == dtype:
                ordered.append(piece)
                starts.append((number, at))
                at += piece.stop - piece.start
        groups.append(Group(dtype, compute_dtype(np.empty(0, dtype)), at, offset))
        offset = _aligned(offset + at * dtype.itemsize)
    return Layout(tuple(tensors), tuple(ordered), tuple(starts), tuple(groups))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
