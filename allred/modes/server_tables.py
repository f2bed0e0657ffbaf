"""Embedding tables in mode ps: the parameter servers hold the rows, and a worker sends requests to them."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from allred import arena
from allred.arrays import Array
from allred.embeddings.embedding import DistinctIds, Embedding, describe_nonfinite
from allred.errors import InputError
from allred.modes.ps_payload import PushedLearningRate
from allred.ps import protocol
from allred.ps.table_cells import TableGradient

if TYPE_CHECKING:
    from allred.ps.worker_client import Client


class ServerTables:
    """The tables of the optimizer of a worker. title: of the step, in errors. owners: the number of servers. client:
    None until the registration."""

    def __init__(self, tables: Sequence[Embedding], title: str, servers: int) -> None:
        self._tables, self._title, self.owners = tables, title, servers
        self.client: Client | None = None
        self._numbers = {table.name: number for number, table in enumerate(tables)}
        self._rates = [PushedLearningRate(table.optimizer, f"table {table.name!r}") for table in tables]

    # The link of a table: see TableLink.

    def check(self, table: Embedding, call: str, problem: str, ready: bool = False, settings: str = "") -> bool:
        if problem or self.client is None:
            problem = problem or "call broadcast(params) of the optimizer before, on all workers"
            raise InputError(f"table {table.name!r}, {call}(): {problem}")
        return ready

    def _servers(self, table: Embedding, call: str) -> "Client":
        self.check(table, call, "")
        assert self.client is not None
        return self.client

    def fetch(self, table: Embedding, distinct: DistinctIds, train: bool) -> Array:
        room = arena.empty((len(distinct.positions), table.dim), table.dtype)
        rows = room[: len(distinct.ids)]
        client = self._servers(table, "lookup")
        client.look_up(self._numbers[table.name], distinct.ids, distinct.counts.tolist(), rows, train)
        return rows

    def prefetch(self, table: Embedding, distinct: DistinctIds) -> Callable[[], Array]:
        rows = np.empty((len(distinct.ids), table.dim), table.dtype)
        client = self._servers(table, "prefetch")
        client.prefetch(self._numbers[table.name], distinct.ids, distinct.counts.tolist(), rows, True)

        def wait() -> Array:
            client.await_prefetch()
            return rows

        return wait

    def size(self, table: Embedding) -> int:
        return sum(self._servers(table, "size").call(protocol.CountRows(self._numbers[table.name])))

    def columns(self, table: Embedding) -> dict[str, Array]:
        parts = self._servers(table, "export").call(protocol.GetRows(self._numbers[table.name]))
        columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        order = np.argsort(columns["ids"])
        return {name: column[order] for name, column in columns.items()}

    def write(self, table: Embedding, columns: dict[str, Array]) -> None:
        distinct = DistinctIds.of(columns["ids"], self.owners)
        order, ends = np.argsort(distinct.positions), np.cumsum(distinct.counts)
        parts = np.split(order, ends[:-1])
        requests = [
            protocol.WriteRows(self._numbers[table.name], {name: column[part] for name, column in columns.items()})
            for part in parts
        ]
        self._servers(table, "assign").call_each(requests)

    def load(self, path: Path, saved: dict[str, Any], everywhere: bool) -> None:
        """Let the servers read the rows of a checkpoint. On worker 0."""
        for table in self._tables:
            request = protocol.LoadRows(self._numbers[table.name], path, saved[table.name]["step"])
            self._servers(table, "restore").call(request)

    # Steps.

    def take(self, sends_lr: bool, has_samples: bool) -> list[list[TableGradient]]:
        """Return the gradients since the last step, by server and table. sends_lr: whether this worker sends learning
        rates. has_samples: False if the batch of this worker is empty; its gradients are then ignored."""
        by_server: list[list[TableGradient]] = [[] for _ in range(self.owners)]
        for table, rate in zip(self._tables, self._rates, strict=True):
            distinct, gradients = table.take_gradient(self.owners, has_samples)
            lr = rate.value() if sends_lr else math.nan
            start = 0
            for server, count in enumerate(distinct.counts.tolist()):
                part = slice(start, start + count)
                by_server[server].append(TableGradient(distinct.ids[part], gradients[part], lr))
                start += count
        return by_server

    def describe_nonfinite(self, rows: list[list[TableGradient]]) -> dict[str, str]:
        """Return {table: description} of the gradients that are not finite."""
        found: dict[str, str] = {}
        for number, table in enumerate(self._tables):
            for part in (each[number] for each in rows):
                if text := describe_nonfinite(part.ids, part.gradients):
                    found.setdefault(table.name, text)
        return found
