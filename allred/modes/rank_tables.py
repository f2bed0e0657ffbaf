"""Embedding tables in mode sync: each rank holds a part of the rows, and all ranks look up and update together.

A step of the optimizer: before anything changes, `prepare` tells all ranks whether a gradient of any rank is not
finite. Then the dense gradients are reduced, and `commit` sends each gradient to the rank that owns the row. This rank
adds up the gradients of all ranks in their order, as an allreduce does, and updates the row.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from allred.arrays import Array
from allred.checkpoint import table_rows
from allred.comm import functions
from allred.comm.communicator import Communicator
from allred.comm.ops import ReduceOp
from allred.embeddings.embedding import DistinctIds, Embedding, describe_nonfinite
from allred.embeddings.row_store import RowStore
from allred.errors import InputError
from allred.modes.detect.mistake_checks import MistakeChecks


class RankTables:
    """The tables of one optimizer, and the rows that this rank holds. title: of the step, in errors."""

    def __init__(self, tables: Sequence[Embedding], title: str, op: ReduceOp) -> None:
        self._tables, self._title, self._op = tables, title, op
        self._gathered: dict[str, dict[str, Array]] = {}
        self._stores = {table.name: RowStore(table.form) for table in tables}
        self._gradients: list[tuple[DistinctIds, Array]] = []

    # The link of a table: see TableLink.

    @property
    def owners(self) -> int:
        return functions.current().size

    def check(self, table: Embedding, call: str, problem: str, ready: bool = False, settings: str = "") -> bool:
        communicator = functions.current()
        title = f"table {table.name!r}, {call}()"
        if communicator.size > 1:
            settings = f"{table.form.text} {settings}"
            fields = communicator.check("table", title, settings=settings, note=ready, problem=problem).wait()
            return all(each.note for each in fields)
        if problem:
            raise InputError(f"{title}: {problem}")
        return ready

    def fetch(self, table: Embedding, distinct: DistinctIds, train: bool) -> Array:
        communicator, store = functions.current(), self._stores[table.name]
        if communicator.size == 1:
            return store.lookup(distinct.ids, train)
        ids, counts = communicator.alltoall(distinct.ids, distinct.counts.tolist(), f"ids of {table.name}").wait()
        rows = store.lookup(ids, train)
        return communicator.alltoall(rows, counts.tolist(), f"vectors of {table.name}").wait()[0]

    def prefetch(self, table: Embedding, distinct: DistinctIds) -> Callable[[], Array]:
        rows = self.fetch(table, distinct, True)
        return lambda: rows

    def size(self, table: Embedding) -> int:
        self.check(table, "size", "")
        return int(functions.allreduce(np.array([self._stores[table.name].rows]), ReduceOp.SUM)[0])

    def columns(self, table: Embedding) -> dict[str, Array]:
        self.check(table, "export", "")
        own = self._stores[table.name].columns()
        columns = {name: functions.allgather(column, f"{name} of {table.name}") for name, column in own.items()}
        order = np.argsort(columns["ids"])
        return {name: column[order] for name, column in columns.items()}

    def write(self, table: Embedding, columns: dict[str, Array]) -> None:
        communicator = functions.current()
        distinct = DistinctIds.of(columns["ids"], communicator.size)
        start = int(distinct.counts[: communicator.rank].sum())
        own = np.argsort(distinct.positions)[start : start + int(distinct.counts[communicator.rank])]
        self._stores[table.name].write({name: column[own] for name, column in columns.items()})

    # Checkpoints.

    def gather(self) -> None:
        """Send the rows of all ranks to the first one, which keeps them for `take_gathered`. Collective."""
        communicator = functions.current()
        self._gathered = {}
        for table in self._tables:
            store = self._stores[table.name]
            store.expire()
            own = store.columns()
            splits = [len(own["ids"]), *[0] * (communicator.size - 1)]
            if communicator.size > 1:
                title = f"checkpoint of {table.name}"
                own = {name: communicator.alltoall(each, splits, title).wait()[0] for name, each in own.items()}
            self._gathered[table.name] = own

    def take_gathered(self) -> Callable[[Path], dict[str, Any]]:
        """Return a function that writes the rows that `gather` has sent here into the directory of a checkpoint, and
        returns their description for the manifest."""
        gathered, self._gathered = self._gathered, {}
        steps = {name: store.optimizer.global_step for name, store in self._stores.items()}

        def write(directory: Path) -> dict[str, Any]:
            parts = {
                name: [table_rows.write_rows(directory, number, name, 0, 1, columns)]
                for number, (name, columns) in enumerate(gathered.items())
            }
            return table_rows.describe_tables(parts, steps, dict.fromkeys(parts, ""))

        return write

    def load(self, path: Path, saved: dict[str, Any], everywhere: bool) -> None:
        """Read the rows of a checkpoint. everywhere: whether all ranks see its files; else the first rank sends the
        rows. Collective."""
        communicator = functions.current()
        for table in self._tables:
            parts: Iterable[dict[str, Array]] = table_rows.read_rows(path, table.name)
            if not everywhere and communicator.size > 1:
                first = communicator.ranks[0]
                whole = list(parts) if communicator.rank == 0 else None
                parts = communicator.broadcast_object(whole, first, f"rows of {table.name}").wait()
            step = saved[table.name]["step"]
            self._stores[table.name].load(step, parts, communicator.rank, communicator.size)

    # Steps.

    def prepare(self, communicator: Communicator, checks: MistakeChecks, problem: str, has_samples: bool) -> bool:
        """Return whether the gradients of the tables of all ranks may be used. has_samples: False if the batch of this
        rank is empty; its gradients are then ignored. Raises InputError if a rank has a problem, and NonFiniteError, on
        all ranks. Collective."""
        self._gradients = [table.take_gradient(communicator.size, has_samples) for table in self._tables]
        found: dict[str, str] = {}
        rates = []
        try:
            for table in self._tables:
                optimizer = self._stores[table.name].optimizer
                optimizer.lr = table.optimizer.lr
                rates.append(f"lr of table {table.name!r}: {optimizer.learning_rate}")
        except InputError as error:
            problem = problem or str(error)
        if checks.policy != "ignore" and not problem:
            for table, (distinct, gradients) in zip(self._tables, self._gradients, strict=True):
                if text := describe_nonfinite(distinct.ids, gradients, communicator.size):
                    found[table.name] = text
        settings = ", ".join(rates)
        fields = communicator.check("table", self._title, settings=settings, note=bool(found), problem=problem).wait()
        return not any(each.note for each in fields) or checks.passes_tables(communicator, found)

    def commit(self, communicator: Communicator, used: bool, weight: float | None) -> None:
        """Update the rows, if the step is used on all ranks; else forget the gradients. weight: the factor of this
        rank's gradients; None means 1. Collective."""
        gradients, self._gradients = self._gradients, []
        divisor = 1.0 if self._op is ReduceOp.SUM else float(communicator.size)
        for table, (distinct, sums) in zip(self._tables, gradients, strict=True):
            if not used:
                continue
            store = self._stores[table.name]
            if communicator.size == 1:
                store.apply(distinct.ids, sums)
                continue
            if weight is not None:
                np.multiply(sums, weight, out=sums)
            counts = distinct.counts.tolist()
            ids = communicator.alltoall(distinct.ids, counts, f"ids of {table.name}").wait()[0]
            store.add(ids, communicator.alltoall(sums, counts, f"gradients of {table.name}").wait()[0])
            store.apply_mean(divisor)
