"""How the ids, vectors and gradients of embedding tables are sent: in cells of whole rows.

A lookup sends ids in cells. The vectors come back in smaller cells, through memory of the server that has room for a
few of them; the vectors of a prefetch must all fit into it. A push begins with one cell that has a header for each
table, the number of ids and the learning rate. Then come, for each table, cells of ids and of their gradients in turn.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from allred.arrays import Array
from allred.ps.shard import CELL_BYTES

LOOKUP_BYTES = 2**17  # of a cell of vectors: it stays in the cache of a core
VECTORS_BYTES = 2**25  # of the memory for vectors
_WAITING_CELLS = 8  # in this memory at once, if the worker waits
ID_BYTES = 8
_HEADER = np.dtype([("ids", np.int64), ("lr", np.float64)])


class TableGradient(NamedTuple):
    """The gradients of one table for one server: ids (uint64), and float32 of shape (ids, dim). lr: the learning rate;
    NaN for no change."""

    ids: Array
    gradients: Array
    lr: float


def ranges(count: int, row_bytes: int, cell_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of the rows of each cell."""
    step = max(cell_bytes // max(row_bytes, ID_BYTES), 1)
    for start in range(0, count, step):
        yield start, min(start + step, count)


def id_ranges(count: int) -> list[tuple[int, int]]:
    """Return (start, stop) of the ids of each cell of a lookup."""
    return list(ranges(count, ID_BYTES, CELL_BYTES))


def vector_ranges(count: int, row_bytes: int) -> list[tuple[int, int]]:
    """Return (start, stop) of the ids of each cell of vectors, in the order of the cells. A cell of vectors
    never has ids of two cells of ids."""
    return [
        (first + start, first + stop)
        for first, end in id_ranges(count)
        for start, stop in ranges(end - first, row_bytes, LOOKUP_BYTES)
    ]


def vector_cells(row_bytes: int, waits: bool) -> int:
    """Return how many cells of vectors are in the memory for vectors at once. waits: whether the worker waits."""
    return _WAITING_CELLS if waits else VECTORS_BYTES // max(row_bytes, LOOKUP_BYTES)


def vectors_at(number: int, row_bytes: int, waits: bool) -> int:
    """Return the place of a cell of vectors in their memory, in bytes."""
    return number % vector_cells(row_bytes, waits) * max(row_bytes, LOOKUP_BYTES)


def push_parts(given: Sequence[TableGradient]) -> tuple[list[Array], Array]:
    """Return the arrays of a push, and the sizes of its cells in bytes."""
    headers = np.array([(len(each.ids), each.lr) for each in given], _HEADER)
    parts = [headers.view(np.uint8)]
    for ids, gradients, _ in given:
        for start, stop in ranges(len(ids), gradients.shape[1] * gradients.itemsize, CELL_BYTES):
            parts += ids[start:stop], gradients[start:stop]
    return parts, np.array([part.nbytes for part in parts], np.int64)


def header_bytes(tables: int) -> int:
    """Return the size of the first cell of a push."""
    return tables * _HEADER.itemsize


def unpack_headers(cell: Array) -> list[tuple[int, float]]:
    """Return (number of ids, learning rate) of each table."""
    headers: list[tuple[int, float]] = np.frombuffer(cell, _HEADER).tolist()
    return headers


def pair_sizes(counts: Sequence[int], dims: Sequence[int]) -> Array:
    """Return the sizes in bytes of the cells after the first one."""
    sizes: list[int] = []
    for count, dim in zip(counts, dims, strict=True):
        for start, stop in ranges(count, dim * 4, CELL_BYTES):
            sizes += (stop - start) * ID_BYTES, (stop - start) * dim * 4
    return np.array(sizes, np.int64)
