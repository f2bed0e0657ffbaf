"""Shard: one server's parameters with their memory layout, and the optimizer that updates them.

All pieces of one dtype are contiguous and form a group. A cell is a range of a group that fits into the cache of a
core; server and workers have the same cells. The server receives gradients, applies them and returns parameters cell by
cell, without a loop over tensors. Gradients travel in the dtype of the update's arithmetic, `compute_dtype`.

An elementwise optimizer updates each cell when it arrives, from the receive buffer. Other optimizers (LAMB, a class of
the user) need whole tensors: the gradient is collected first, and the step follows the last cell. With policy sync the
gradients of several workers are summed, and the mean is applied after the last.

A shard has one sum and one collected gradient, so only one request at a time may fill them. Without locking several
gradients are applied cell by cell at the same time; each has an Update of its own.
"""

import dataclasses
import functools
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from allred import nest
from allred.arrays import Array, name_of, size_of, view_as_real
from allred.embeddings.row_store import RowStore
from allred.errors import InputError
from allred.fusion import Tensor
from allred.optim.base import Optimizer, compute_dtype, splittable
from allred.ps.consistency import Sync
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


Parts = dict[int, dict[str, Array]]  # {piece: {slot: values}}


def locks(use_locking: bool, policy: Any, optimizer: Any) -> bool:
    """Whether servers handle requests one by one: as the user wants, and where gradients are collected.

    Gradients of two workers whose cells take turns would mix in a sum (policy sync) and in a collected gradient (an
    optimizer that is not `splittable`).
    """
    return use_locking or isinstance(policy, Sync) or not splittable(optimizer)


class Update(NamedTuple):
    """One update of the parameters. step: its number. absent: the pieces without a gradient."""

    lr: float
    step: int
    absent: Collection[int]


class Shard:
    """Parameters in `memory` (layout.nbytes bytes). skeleton: the nest of the model with the numbers of tensors as
    leaves. in_place: whether a cell changes when its gradient arrives. version: number of updates. added, weights:
    number of gradients in the sum, and the sum of their weights."""

    def __init__(self, layout: Layout, memory: Any, optimizer: Any, skeleton: Any) -> None:
        self.layout = layout
        self.version = 0
        self.params = layout.groups_of(memory)
        self.bytes = [part.view(np.uint8) for part in self._cells_of(self.params)]
        self.bytes_up, self.bytes_down = int(layout.up.sum()), sum(cell.size for cell in self.bytes)
        self.added, self.weights = 0, 0.0
        self.tables: list[RowStore] = []
        self._optimizer = optimizer
        self.in_place = splittable(optimizer)
        self._gradients = [layout.groups[cell.group].gradient for cell in layout.cells]
        self._sums: list[Array] = []  # of gradients; created at the first use
        self._sum_cells: list[Array] = []
        self._seen: set[int] = set()  # pieces with a gradient in the sum
        if self.in_place:
            self._slots = [optimizer.new_slots(group) for group in self.params]
            self._cells = [
                (part, {name: slot[cell.start : cell.stop] for name, slot in self._slots[cell.group].items()})
                for part, cell in zip(self._cells_of(self.params), layout.cells, strict=True)
            ]
        else:
            self._nest = self._prune(skeleton)

    @property
    def cells(self) -> list[tuple[Array, dict[str, Array]]]:
        """The parameters and slots of each cell, if `in_place`."""
        return self._cells

    def start(self, number: int, cell: Any) -> None:
        """Set one cell of the parameters."""
        where = self.layout.cells[number]
        self.params[where.group][where.start : where.stop] = np.frombuffer(cell, self._gradients[number])

    # A gradient that is applied directly: begin, apply each cell, finish.

    def begin(self, absent: Collection[int] = ()) -> Update:
        """Begin an update. absent: the pieces without a gradient."""
        if not self.in_place:
            self._make_sums()
            return Update(0.0, 0, absent)  # the optimizer's step has its own numbers
        lr = self._optimizer.lr
        lr = lr if type(lr) is float and lr >= 0 else self._optimizer.learning_rate
        self._optimizer.global_step += 1
        return Update(lr, self._optimizer.global_step, absent)

    def apply(self, update: Update, number: int, cell: Any) -> None:
        """Apply one cell of a gradient, given as bytes."""
        gradient = np.frombuffer(cell, self._gradients[number])
        if self.in_place:
            self._update(update, number, gradient)
        else:
            self._sum_cells[number][...] = gradient

    def finish(self, update: Update) -> None:
        """End an update after its last cell."""
        if not self.in_place:
            self._step_whole(update.absent)
        self.version += 1
        self.added, self.weights = 0, 0.0
        self._seen.clear()

    def _update(self, update: Update, number: int, gradient: Array) -> None:
        param, slots = self._cells[number]
        lr, step, absent = update
        if not absent:
            self._optimizer.update_tensor(param, gradient, slots, lr, step)
            return
        for a, b in self._present(number, absent):
            part = {name: slot[a:b] for name, slot in slots.items()}
            self._optimizer.update_tensor(param[a:b], gradient[a:b], part, lr, step)

    def _present(self, number: int, absent: Collection[int]) -> Iterator[tuple[int, int]]:
        """Yield the ranges of a cell that have a gradient."""
        cell = self.layout.cells[number]
        for index, (group, start) in enumerate(self.layout.starts):
            stop = start + self.layout.pieces[index].stop - self.layout.pieces[index].start
            low, high = max(start, cell.start), min(stop, cell.stop)
            if group == cell.group and index not in absent and low < high:
                yield low - cell.start, high - cell.start

    # Gradients that are averaged: add each cell, end_add; then begin_mean, apply_mean of each cell, finish.

    def add(self, number: int, cell: Any, weight: float = 1.0) -> None:
        """Add one cell of a gradient to the sum, multiplied by the weight."""
        self._make_sums()
        total, gradient = self._sum_cells[number], np.frombuffer(cell, self._gradients[number])
        gradient = gradient if weight == 1.0 else gradient * weight
        if self.added:
            np.add(total, gradient, out=total)
        else:
            total[...] = gradient

    def end_add(self, absent: Collection[int] = (), weight: float = 1.0) -> None:
        """End a gradient after its last cell. absent: pieces without a gradient, added as zeros."""
        self.added += 1
        self.weights += weight
        self._seen.update(set(range(len(self.layout.pieces))) - set(absent))

    def begin_mean(self) -> Update:
        """Begin the update with the mean. A piece without a gradient of any worker does not change."""
        return self.begin(set(range(len(self.layout.pieces))) - self._seen)

    def apply_mean(self, update: Update, number: int) -> None:
        mean = self._sum_cells[number]
        if self.weights:
            np.divide(view_as_real(mean), self.weights, out=view_as_real(mean))
        if self.in_place:
            self._update(update, number, mean)

    def _make_sums(self) -> None:
        if not self._sums:
            self._sums = [np.zeros(group.elements, group.gradient) for group in self.layout.groups]
            self._sum_cells = self._cells_of(self._sums)

    def _cells_of(self, groups: list[Array]) -> list[Array]:
        return [groups[cell.group][cell.start : cell.stop] for cell in self.layout.cells]

    # Whole tensors.

    def _prune(self, skeleton: Any) -> Any:
        """Return the part of the model's nest on this server, with the numbers of pieces as leaves."""
        if isinstance(self._optimizer, Optimizer):  # it uses the names of the whole model
            return {self._name(index): index for index in range(len(self.layout.pieces))}
        here = {piece.tensor: index for index, piece in enumerate(self.layout.pieces)}
        if len(here) == len(self.layout.tensors):
            return nest.rebuild(skeleton, [here[number] for number in sorted(here)])
        return _pruned(skeleton, here)

    def _name(self, index: int) -> str:
        return self.layout.tensors[self.layout.pieces[index].tensor].name

    def _view(self, groups: list[Array], index: int) -> Array:
        return self.layout.piece_of(groups, index).reshape(self.layout.tensors[self.layout.pieces[index].tensor].shape)

    def _step_whole(self, absent: Collection[int]) -> None:
        if not self.layout.pieces:  # more servers than tensors: only count
            if isinstance(self._optimizer, Optimizer):
                self._optimizer.global_step += 1
            return
        numbers = [index for _, index in nest.leaves(self._nest)]
        params = [self._view(self.params, index) for index in numbers]
        grads = [None if index in absent else self._view(self._sums, index) for index in numbers]
        tree = nest.rebuild(self._nest, params)
        self._optimizer.step(tree, nest.rebuild(self._nest, grads))
        for param, (_, left) in zip(params, nest.leaves(tree), strict=True):
            if left is not param:  # replaced in the nest instead of updated in place
                param[...] = left

    # The optimizer's state.

    def set_lr(self, lr: float) -> None:
        self._optimizer.lr = lr

    def state(self) -> tuple[Any, Parts]:
        """Return ({"global_step": ...}, slots of each piece), no copies; for an optimizer of the user (state, {})."""
        if not isinstance(self._optimizer, Optimizer):
            return (self._optimizer.state_dict() if hasattr(self._optimizer, "state_dict") else None), {}
        numbers = range(len(self.layout.pieces))
        if self.in_place:
            return {"global_step": self._optimizer.global_step}, {
                i: {name: self._slot(i, name) for name in self._slots[self.layout.starts[i][0]]} for i in numbers
            }
        state = self._optimizer.live_state()
        slots = state["slots"]
        others = {key: value for key, value in state.items() if key != "slots"}
        return others, {i: slots[self._name(i)] for i in numbers if self._name(i) in slots}

    def load(self, state: Any, parts: Parts) -> None:
        """Load the result of `state`; None resets. Raises InputError for the state of another optimizer."""
        if not isinstance(self._optimizer, Optimizer):
            if state is not None:
                self._optimizer.load_state_dict(state)
            return
        step = 0 if state is None else state["global_step"]
        if not self.in_place:
            named = {self._name(index): part for index, part in parts.items()}
            self._optimizer.load_state_dict({**(state or {}), "global_step": step, "slots": named})
            return
        targets = {i: {n: self._slot(i, n) for n in self._slots[g]} for i, (g, _) in enumerate(self.layout.starts)}
        for index, part in parts.items():
            if set(part) != set(targets[index]) or any(part[n].size != t.size for n, t in targets[index].items()):
                expected = ", ".join(sorted(targets[index])) or "none"
                raise InputError(
                    f"the state of '{self._name(index)}' must have the slots {expected} of the parameter's size, but "
                    f"has {', '.join(sorted(part)) or 'none'}; it belongs to another optimizer"
                )
        self._optimizer.global_step = step
        for index, slots in targets.items():
            fresh = parts.get(index) or self._optimizer.new_slots(self.layout.piece_of(self.params, index))
            for name, target in slots.items():
                target[...] = fresh[name].reshape(target.shape)

    def _slot(self, index: int, name: str) -> Array:
        group, start = self.layout.starts[index]
        piece, slot = self.layout.pieces[index], self._slots[group][name]
        part: Array = slot[start : start + piece.stop - piece.start]
        shape = self.layout.tensors[piece.tensor].shape
        return part.reshape(shape) if part.size == size_of(shape) else part

    def parameter(self, index: int) -> Array:
        return self.layout.piece_of(self.params, index)


def _pruned(tree: Any, here: dict[int, int]) -> Any:
    """Return a nest with the numbers of pieces instead of those of tensors; None if no tensor is here."""
    if isinstance(tree, dict):
        return {key: found for key, value in tree.items() if (found := _pruned(value, here)) is not None} or None
    if isinstance(tree, (list, tuple)):
        rest = [found for value in tree if (found := _pruned(value, here)) is not None]
        return (rest if isinstance(tree, list) else tuple(rest)) or None
    return here.get(tree)
