"""Memory layout of one server's parameters, and the cells in which they travel; the same on server and workers.

All pieces of one dtype are contiguous and form a group. An elementwise optimizer updates a group as one vector. A cell
is a range of a group. The server receives gradients, applies them and returns parameters cell by cell, without a loop
over tensors; a cell fits into the cache of a core.

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


class DtypeGroup(NamedTuple):
    """All elements of one dtype. gradient: dtype of their gradients. offset: of the first element, in bytes."""

    dtype: np.dtype[Any]
    gradient: np.dtype[Any]
    elements: int
    offset: int


class Cell(NamedTuple):
    """Elements `start` to `stop` of a group."""

    group: int
    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class Layout:
    """Layout of the pieces of one server. starts[i]: the group of pieces[i], and its first element in it."""

    tensors: tuple[Tensor, ...]  # of the whole model
    pieces: tuple[Piece, ...]
    starts: tuple[tuple[int, int], ...]
    groups: tuple[DtypeGroup, ...]

    @property
    def nbytes(self) -> int:
        """Size of the parameters in bytes."""
        return max((_aligned(g.offset + g.elements * g.dtype.itemsize) for g in self.groups), default=0)

    @functools.cached_property
    def has_bfloat16(self) -> bool:
        """Whether some parameters are bfloat16, which lacks the buffer protocol."""
        return any(name_of(group.dtype) == "bfloat16" for group in self.groups)

    @functools.cached_property
    def cells(self) -> tuple[Cell, ...]:
        """All cells, in the order of transfer."""
        found = []
        for number, group in enumerate(self.groups):
            step = max(CELL_BYTES // group.gradient.itemsize, 1)
            found += [Cell(number, at, min(at + step, group.elements)) for at in range(0, group.elements, step)]
        return tuple(found)

    @functools.cached_property
    def up(self) -> Array:
        """Size of each cell of a gradient in bytes: int64, shape (cells,)."""
        return np.array([(c.stop - c.start) * self.groups[c.group].gradient.itemsize for c in self.cells], np.int64)

    @functools.cached_property
    def down(self) -> Array:
        """Offset and size of each cell of the parameters in bytes: int64, shape (cells, 2)."""
        pairs = [
            (g.offset + c.start * g.dtype.itemsize, (c.stop - c.start) * g.dtype.itemsize)
            for c in self.cells
            for g in [self.groups[c.group]]
        ]
        return np.array(pairs, np.int64).reshape(-1, 2)

    def groups_of(self, memory: Any) -> list[Array]:
        """Return each group as a vector in `memory`, which has `nbytes` bytes."""
        data = np.frombuffer(memory, np.uint8)
        return [data[g.offset : g.offset + g.elements * g.dtype.itemsize].view(g.dtype) for g in self.groups]

    def piece_of(self, groups: Sequence[Array], index: int) -> Array:
        """Return the elements of one piece, given the arrays of all groups."""
        group, start = self.starts[index]
        return groups[group][start : start + self.pieces[index].stop - self.pieces[index].start]


def lay_out(tensors: Sequence[Tensor], pieces: Sequence[Piece]) -> Layout:
    """Return the layout of one server's pieces of `tensors`."""
    dtypes = list(dict.fromkeys(tensors[piece.tensor].dtype for piece in pieces))
    ordered, starts, groups, offset = [], [], [], 0
    for number, dtype in enumerate(dtypes):
        at = 0
        for piece in pieces:
            if tensors[piece.tensor].dtype == dtype:
                ordered.append(piece)
                starts.append((number, at))
                at += piece.stop - piece.start
        groups.append(DtypeGroup(dtype, compute_dtype(np.empty(0, dtype)), at, offset))
        offset = _aligned(offset + at * dtype.itemsize)
    return Layout(tuple(tensors), tuple(ordered), tuple(starts), tuple(groups))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
