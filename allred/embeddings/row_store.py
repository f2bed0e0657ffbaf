"""RowStore: the rows of a table that one process holds, with the optimizer that updates them."""

import copy
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from allred import native
from allred.arrays import Array
from allred.embeddings.table_form import Normal, TableForm, Uniform
from allred.errors import AllredError
from allred.native import row_twins

_SLOTS = 3  # of a rule at most (csrc/update.h)
_MOST_STEPS = 2**32 - 2  # a row has the number of its last step as 32 bits
_CONSTANT, _UNIFORM, _NORMAL = range(3)  # csrc/row_table.h


Rule = tuple[str, tuple[float, ...], int]  # of an update: the rule of csrc/update.h, its numbers, the update's number


def _slots_of(form: TableForm) -> list[tuple[str, int, float]]:
    """Return (name, elements, first value) of each slot that a rule has; ("", 0, 0.0) for those that it does not."""
    kernel = form.optimizer.kernel(0.1, 1)
    assert kernel is not None  # checked by TableForm
    first = form.optimizer.slots(np.zeros((1, form.dim), np.float32))
    none = "", 0, 0.0
    found = [none if name is None else (name, first[name].size, float(first[name].flat[0])) for name in kernel.slots]
    return found + [none] * (_SLOTS - len(found))


def widths(form: TableForm) -> dict[str, tuple[int, ...]]:
    """Return the columns of the rows of a table, with the shape of one row in each."""
    slots: dict[str, tuple[int, ...]] = {name: (size,) for name, size, _ in _slots_of(form) if name}
    return {"ids": (), "vectors": (form.dim,), "seen": (), "steps": (), **slots}


class SavedRows(NamedTuple):
    """A checkpoint of the rows. root: the directory that has it. step: the number of updates in it. partial: the number
    of partial checkpoints in its chain, itself included."""

    root: Path
    name: str
    step: int
    partial: int


class RowStore:
    """Rows of the table `form`. optimizer: a copy of the optimizer of `form`, which counts the updates here."""

    def __init__(self, form: TableForm) -> None:
        self.form, self.optimizer = form, copy.copy(form.optimizer)
        slots = _slots_of(form)
        self._slot_names = [name for name, _, _ in slots if name]
        self._sizes = tuple(size for _, size, _ in slots)
        if isinstance(form.init, Uniform):
            init, a, b = _UNIFORM, form.init.low, form.init.high
        elif isinstance(form.init, Normal):
            init, a, b = _NORMAL, form.init.mean, form.init.std
        else:
            init, a, b = _CONSTANT, form.init, 0.0
        half = form.dtype == np.float16
        slot_values = tuple(value for _, _, value in slots)
        self._table = native.RowTable(
            form.dim, half, self._sizes, slot_values, init, float(a), float(b), form.seed, form.admit_after
        )
        self._saved: SavedRows | None = None  # the last complete checkpoint
        self._unfinished: SavedRows | None = None  # the one after it, which may be complete
        self._sums: Any = None  # a table of the sums of gradients

    @property
    def rows(self) -> int:
        count: int = self._table.rows
        return count

    @property
    def row_bytes(self) -> int:
        """Bytes of a vector."""
        return self.form.dim * self.form.dtype.itemsize

    def lookup(self, ids: Array, train: bool) -> Array:
        """Return the vectors of ids, which are uint64: an array of the table's dtype, shape (ids, dim)."""
        vectors = np.empty((len(ids), self.form.dim), self.form.dtype)
        self.lookup_into(ids, vectors, train)
        return vectors

    def lookup_into(self, ids: Array, vectors: Array, train: bool) -> None:
        """As `lookup`, into contiguous memory of row_bytes for each id."""
        self._table.lookup(ids, vectors, self.optimizer.global_step + 1 if train else 0)

    def begin(self) -> Rule:
        """Count one update, and return its rule, with which `update` makes each part."""
        optimizer = self.optimizer
        if optimizer.global_step >= _MOST_STEPS:
            raise AllredError(f"table {self.form.name!r}: more than {_MOST_STEPS} steps")
        lr = optimizer.learning_rate
        optimizer.global_step += 1
        kernel = optimizer.kernel(lr, optimizer.global_step)
        assert kernel is not None  # checked by TableForm
        return kernel.rule, tuple(map(float, kernel.numbers)), optimizer.global_step

    def apply(self, ids: Array, gradients: Array) -> None:
        """Make one update. ids: distinct. gradients: float32, shape (ids, dim)."""
        self.update(self.begin(), ids, gradients)

    def update(self, rule: Rule, ids: Array, gradients: Array) -> None:
        """Make a part of an update."""
        self._table.update(ids, gradients, *rule)

    def add(self, ids: Array, gradients: Array, weight: float = 1.0) -> None:
        """Add gradients to the sums of the current step."""
        if self._sums is None:
            none = (0,) * _SLOTS
            self._sums = native.RowTable(self.form.dim, False, none, (0.0,) * _SLOTS, _CONSTANT, 0.0, 0.0, 0, 0)
        self._sums.add(ids, gradients, weight)

    def apply_mean(self, divisor: float) -> None:
        """Make one update with the sums divided by `divisor`, and forget them."""
        rule = self.begin()
        if self._sums is not None:
            self._table.update_mean(self._sums, divisor, *rule)
            self._sums.clear()

    def columns(self, since: int = 0) -> dict[str, Array]:
        """Return the rows used in step `since` or later, sorted by id: "ids" (uint64), "vectors" (the table's dtype),
        "seen" and "steps" (uint32), and each slot of the optimizer (float32, shape (rows, dim) or (rows, 1))."""
        numbers = np.empty(self.rows, np.uint32)
        count = self._table.select(since, numbers)
        numbers = numbers[:count].copy()
        ids = np.empty(count, np.uint64)
        self._table.read(numbers, ids, None, None, None, ())
        order = np.argsort(ids)
        numbers, ids = numbers[order], ids[order]
        seen, steps = np.empty(count, np.uint32), np.empty(count, np.uint32)
        vectors = np.empty((count, self.form.dim), np.float32)
        slots = [np.empty((count, size), np.float32) if size else None for size in self._sizes]
        self._table.read(numbers, None, seen, steps, vectors, tuple(slots))
        named = dict(zip(self._slot_names, [slot for slot in slots if slot is not None], strict=True))
        vectors = vectors.astype(self.form.dtype, copy=False)
        return {"ids": ids, "vectors": vectors, "seen": seen, "steps": steps, **named}

    def write(self, columns: dict[str, Array]) -> None:
        """Write rows, as `columns` returns them; columns other than "ids" may be missing."""

        def column(name: str, dtype: Any) -> Array | None:
            return np.ascontiguousarray(columns[name], dtype) if name in columns else None

        if "steps" not in columns:
            step = self.optimizer.global_step + 1
            columns = {**columns, "steps": np.full(len(columns["ids"]), step, np.uint32)}
        names = iter(self._slot_names)
        slots = tuple(column(next(names), np.float32) if size else None for size in self._sizes)
        self._table.write(
            np.ascontiguousarray(columns["ids"], np.uint64), column("seen", np.uint32), column("steps", np.uint32),
            column("vectors", np.float32), slots,
        )  # fmt: skip

    def load(self, step: int, parts: Iterable[dict[str, Array]], owner: int, owners: int) -> None:
        """Replace all rows by the rows of a checkpoint that belong to process `owner` of `owners`. step: the number of
        updates then. parts: later rows replace earlier ones. The next checkpoint has all rows."""
        self._table.clear()
        self._sums = self._saved = self._unfinished = None
        self.optimizer.global_step = step
        for columns in parts:
            hashes = row_twins.hashes(columns["ids"])
            own = (hashes >> np.uint64(32)) * np.uint64(owners) >> np.uint64(32) == owner
            self.write({name: column[own] for name, column in columns.items()})
        self.expire()

    def save(self, root: Path, name: str, complete: Collection[str]) -> tuple[dict[str, Array], str]:
        """Remove the rows that have expired. Return the columns for a checkpoint, and the name of its base: "" if these
        are all rows. All processes with rows of the table choose the same base. root, name: of the checkpoint.
        complete: the names of the complete checkpoints of this training in `root`."""
        self.expire()
        known, step = [each for each in (self._unfinished, self._saved) if each is not None], self.optimizer.global_step
        last = next((each for each in known if each.root == root and each.name in complete), None)
        self._saved = last or self._saved
        if last is None or last.name >= name or last.partial + 1 >= self.form.full_every:
            self._unfinished = SavedRows(root, name, step, 0)
            return self.columns(), ""
        self._unfinished = SavedRows(root, name, step, last.partial + 1)
        return self.columns(last.step + 1), last.name

    def expire(self) -> None:
        """Remove the rows that no lookup for training has used for `expire_after` steps."""
        after = self.form.expire_after
        if after is not None and (oldest := self.optimizer.global_step + 1 - after) > 0:
            self._table.remove_older(oldest)
