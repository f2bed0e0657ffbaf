"""`allred.Embedding`: a table of vectors by id, held by the ranks or by parameter servers.

A step, from top to bottom: `lookup` sends each distinct id once to the process that owns it, and copies the vectors to
every position of their id; `gradient` adds up the gradients of each distinct id; the step of the optimizer sends these
sums to the owners (`TableLink`), which update the rows (row_store.py).
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from allred import arena, native
from allred.arrays import Array, describe
from allred.embeddings.table_form import Normal, TableForm, Uniform
from allred.errors import InputError
from allred.optim.base import Optimizer
from allred.validators import integer

_MOST_LOOKUPS = 1000  # for training, since the last step


@dataclasses.dataclass(eq=False)
class DistinctIds:
    """The distinct ids of a lookup, grouped by owner: ids[:counts[0]] belong to owner 0, and so on.

    positions[i]: the index of id number i of the lookup in `ids`.
    """

    ids: Array  # uint64
    counts: Array  # int64
    positions: Array  # uint32

    @classmethod
    def of(cls, ids: Array, owners: int) -> "DistinctIds":
        distinct, positions = np.empty(len(ids), np.uint64), np.empty(len(ids), np.uint32)
        counts = np.empty(owners, np.int64)
        found = native.distinct_ids(ids, distinct, positions, counts)
        return cls(distinct[:found], counts, positions)

    @property
    def in_order(self) -> bool:
        """Whether the lookup had no duplicates, and needs no other order."""
        return len(self.counts) == 1 and len(self.ids) == len(self.positions)


@dataclasses.dataclass(eq=False)
class Lookup:
    """A lookup for training. offsets: where its bags begin, and the end; None without bags. mean: whether bags are
    averaged."""

    vectors: Array
    distinct: DistinctIds
    offsets: Array | None
    mean: bool
    gradient: Array | None = None  # of each distinct id: float32, shape (ids, dim)


@dataclasses.dataclass(eq=False)
class Prefetched:
    """A lookup that was begun before its step. wait: returns the rows of the distinct ids. until: the number of the
    last step that may use them."""

    ids: Array
    distinct: DistinctIds
    wait: Callable[[], Array]
    until: int


class TableLink(Protocol):
    """Where the rows of a table are. owners: how many processes hold them."""

    @property
    def owners(self) -> int: ...
    def check(self, table: "Embedding", call: str, problem: str, ready: bool = False, settings: str = "") -> bool:
        """Raise InputError if there is a problem on this rank, or, if the call is collective, on any rank. call: the
        name of the method. settings: must be equal on all ranks. Return whether this rank is `ready`, or all are."""

    def fetch(self, table: "Embedding", distinct: DistinctIds, train: bool) -> Array:
        """Return the vectors of the distinct ids, in their order, in the dtype of the table."""

    def prefetch(self, table: "Embedding", distinct: DistinctIds) -> Callable[[], Array]:
        """Begin `fetch` for training, and return a function that waits for its result."""

    def size(self, table: "Embedding") -> int:
        """Return the number of rows of all owners."""

    def columns(self, table: "Embedding") -> dict[str, Array]:
        """Return the rows of all owners: see `RowStore.columns`."""

    def write(self, table: "Embedding", columns: dict[str, Array]) -> None:
        """Write rows to their owners."""

    def load(self, path: Path, saved: dict[str, Any], everywhere: bool) -> None:
        """Read the rows of all tables from a checkpoint. saved: of `checkpoint.tables_in`. everywhere: whether all
        ranks see its files."""


class Embedding:
    """A table of vectors by id. Each step reads and changes the rows of a few ids.

        users = allred.Embedding("user", dim=64, optimizer=allred.optim.Adagrad(0.05, row_wise=True))
        opt = allred.distributed(allred.optim.Adam(0.001), tables=[users])
        opt.broadcast(params)
        for ids, y in batches:
            vectors = users.lookup(ids)                 # shape (len(ids), 64)
            grads, vectors_grad = backward(params, vectors, y)
            users.gradient(vectors_grad)
            opt.step(params, grads)                     # updates the rows of these ids too

    In mode sync each rank holds a part of the rows, and `lookup` is collective. In mode ps the parameter servers hold
    them. In both a row is on the process that a hash of its id chooses. A step sends only the rows of the ids
    that it looks up, each once. A row is made when its id is first looked up for training; its initial values follow
    from `seed` and the id only. Made after allred.init(), with the same arguments on all ranks.

    Arguments:
        name: of the table, in errors and checkpoints; each table of a program has its own.
        dim: the size of a vector.
        rows: ids are 0 to rows - 1; None: any integer of 64 bits.
        init: the initial values: `allred.embeddings.Uniform(low, high)`, `Normal(mean, std)`, or one number.
        optimizer: SGD, Adagrad, RMSProp, Adam or AdamW of allred.optim. A step changes the rows that have a gradient,
            and no others: the momentum and averages of other rows stay unchanged, and weight decay does not change
            them. Its `lr` may be assigned.
        dtype: float32 or float16, in which vectors are stored and sent; sums and state are float32.
        seed: of the initial values, an integer >= 0.
        admit_after: lookups for training of an id before its row is made; until then it has its initial values, and
            its gradients are dropped. For ids that are seen once only.
        expire_after: steps after which a checkpoint removes a row that no lookup for training has used; None: never.
        full_every: one of this many checkpoints has all rows; the others have the rows used since the one before, which
            is kept as their base. The first one after a start or a restore has all. Mode ps; in mode sync each has all.

    Attributes: `optimizer` as given, and `name`, `dim`, `rows` and `dtype`.

    Raises InputError for an argument that cannot be used.
    """

    def __init__(
        self,
        name: str,
        dim: int,
        rows: int | None = None,
        init: "float | Uniform | Normal" = Uniform(-0.05, 0.05),  # noqa: B008  (it is frozen)
        optimizer: Optimizer | None = None,
        dtype: Any = np.float32,
        seed: int = 0,
        admit_after: int = 1,
        expire_after: int | None = None,
        full_every: int = 1,
    ) -> None:
        if optimizer is None:
            raise InputError(
                f"allred.Embedding {name!r}: pass optimizer, such as allred.optim.Adagrad(0.05, row_wise=True)"
            )
        self.form = TableForm(name, dim, rows, init, optimizer, dtype, seed, admit_after, expire_after, full_every)
        self.name, self.dim, self.rows, self.dtype = name, self.form.dim, self.form.rows, self.form.dtype
        self.optimizer = optimizer
        self.attached: Any = None  # the distributed optimizer that has this table
        self._lookups: list[Lookup] = []  # for training, since the last step
        self._prefetched: Prefetched | None = None
        self._steps = 0  # of the optimizer

    def __repr__(self) -> str:
        return f"allred.Embedding({self.form.text})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"the table {self.name!r} cannot be copied or pickled: the ranks or parameter servers hold its rows. "
            "export() returns them, and the optimizer's save() writes them"
        )

    @property
    def _link(self) -> TableLink:
        if self.attached is None:
            raise InputError(
                f"the table {self.name!r} belongs to no optimizer; pass tables=[...] to allred.distributed"
            )
        link: TableLink = self.attached.table_link
        return link

    def lookup(self, ids: Any, offsets: Any = None, pooling: str = "sum", train: bool = True) -> Array:
        """Return the vectors of ids. Mode sync: collective.

        Arguments:
            ids: integers of any shape, repeated ones allowed.
            offsets: bags of ids, as for torch's EmbeddingBag: bag i has the ids from offsets[i] to offsets[i + 1], the
                last one to the end of `ids`, which then has one axis. Their vectors are combined.
            pooling: "sum" or "mean" of the vectors of a bag; an empty bag gives zeros.
            train: False for a lookup without a gradient, as in an evaluation: it makes no rows and counts nothing.

        Returns a new float32 array of shape ids.shape + (dim,), or (bags, dim).

        Raises InputError: ids are no integers, or out of range; offsets do not begin with 0, decrease, or exceed the
        ids. In mode sync on all ranks.
        """
        link, problem = self._link, ""
        try:
            flat, shape, ends = self._checked(ids, offsets, pooling)
            if train and len(self._lookups) >= _MOST_LOOKUPS:
                raise InputError(f"{_MOST_LOOKUPS} lookups since the last step; pass train=False where none follows")
        except InputError as error:
            problem = str(error)
        prefetched = self._usable_prefetched(flat) if train and not problem else None
        all_ready = link.check(self, "lookup", problem, prefetched is not None, f"train={bool(train)}")
        if train:
            self._prefetched = None
        distinct = DistinctIds.of(flat, link.owners) if prefetched is None else prefetched.distinct
        rows = prefetched.wait() if prefetched is not None and all_ready else link.fetch(self, distinct, train)
        if ends is None and distinct.in_order and rows.dtype == np.float32:
            vectors = rows
        else:
            vectors = arena.empty((len(flat) if ends is None else len(ends) - 1, self.dim), np.float32)
            half = rows.dtype == np.float16
            native.spread_rows(vectors, rows, half, distinct.positions, self.dim, ends, pooling == "mean")
        vectors = vectors.reshape(shape)
        if train:
            self._lookups.append(Lookup(vectors, distinct, ends, pooling == "mean"))
        return vectors

    def prefetch(self, ids: Any, staleness: int = 1) -> None:
        """Fetch the vectors of the ids of a later `lookup` now. Mode sync: collective.

            table.prefetch(next_ids)          # before the step of the current batch
            opt.step(params, grads)
            vectors = table.lookup(next_ids)  # the same ids, of any shape

        The vectors lack the updates of the steps between the two calls. Another lookup of the table for training
        discards them. With one worker, and in mode sync, the result is reproducible. In mode ps on one machine the
        server reads the rows while this worker computes.

        Arguments:
            ids: as in `lookup`.
            staleness: how many steps may be between the two calls; after more the lookup fetches the vectors again.

        Raises InputError: as `lookup`.
        """
        link, problem = self._link, ""
        try:
            flat, *_ = self._checked(ids, None, "sum")
            bound = integer("staleness", staleness, 0, "it counts steps")
        except InputError as error:
            problem = str(error)
        link.check(self, "prefetch", problem)
        distinct = DistinctIds.of(flat, link.owners)
        self._prefetched = Prefetched(flat.copy(), distinct, link.prefetch(self, distinct), self._steps + bound)

    def _usable_prefetched(self, ids: Array) -> Prefetched | None:
        """Return the result of `prefetch`, if it was called with these ids and is not too old."""
        given = self._prefetched
        is_usable = given is not None and given.until >= self._steps and np.array_equal(given.ids, ids)
        return given if is_usable else None

    def _checked(self, ids: Any, offsets: Any, pooling: str) -> tuple[Array, tuple[int, ...], Array | None]:
        """Return the ids as a uint64 vector, the shape of the result, and the offsets with the end."""
        if pooling not in ("sum", "mean"):
            raise InputError(f"pooling={pooling!r} must be 'sum' or 'mean'")
        given = _as_array("ids", ids)
        flat = self._as_ids(given)
        if offsets is None:
            return flat, (*given.shape, self.dim), None
        starts = _as_array("offsets", offsets)
        if given.ndim != 1 or starts.ndim != 1 or starts.dtype.kind not in "iu":
            raise InputError(
                f"with offsets, ids and offsets must be integers with one axis, but ids are "
                f"{describe(given.shape, given.dtype)} and offsets {describe(starts.shape, starts.dtype)}"
            )
        ends = np.append(starts.astype(np.int64), len(flat))
        if ends[0] != 0 or (np.diff(ends) < 0).any():
            raise InputError(
                f"offsets must begin with 0, not decrease, and not exceed the {len(flat)} ids; they are "
                f"{np.array2string(starts, threshold=8)}"
            )
        return flat, (len(starts), self.dim), ends

    def _as_ids(self, given: Array) -> Array:
        if given.dtype.kind not in "iu":
            raise InputError(f"ids must be integers, but are {describe(given.shape, given.dtype)}")
        flat = np.ascontiguousarray(given).reshape(-1)
        if self.rows is not None and flat.size and not (flat.min() >= 0 and flat.max() < self.rows):
            wrong = int(np.flatnonzero((flat < 0) | (flat >= self.rows))[0])
            raise InputError(f"ids must be 0 to {self.rows - 1}, but id number {wrong} is {flat[wrong]}")
        return flat.astype(np.int64 if given.dtype.kind == "i" else np.uint64, copy=False).view(np.uint64)

    def gradient(self, vectors_grad: Any, vectors: Array | None = None) -> None:
        """Keep the gradient of a lookup for the next step of the optimizer.

        Arguments:
            vectors_grad: the gradient at the result of `lookup`: a float array of its shape, not changed. The
                gradients of an id that was looked up several times are added up.
            vectors: the result of the lookup; needed if there were several since the last step.

        Raises InputError: every lookup for training since the last step has its gradient already, or the shapes differ.
        """
        title = f"table {self.name!r}, gradient()"
        found = self._find(title, vectors)
        given = np.asarray(vectors_grad)
        if given.shape != found.vectors.shape or given.dtype.kind != "f":
            raise InputError(
                f"{title}: expected a float array of the shape {found.vectors.shape} of the vectors, got "
                f"{describe(given.shape, given.dtype)}"
            )
        distinct = found.distinct
        room = arena.empty((len(distinct.positions), self.dim), np.float32)  # servers read the gradients there
        sums = room[: len(distinct.ids)]
        if found.offsets is None and distinct.in_order:
            sums[...] = given.reshape(-1, self.dim)
        else:
            gradients = np.ascontiguousarray(given, np.float32)
            native.sum_gradients(sums, gradients, distinct.positions, self.dim, found.offsets, found.mean)
        found.gradient = sums

    def _find(self, title: str, vectors: Array | None) -> Lookup:
        waiting = [each for each in self._lookups if each.gradient is None]
        if vectors is not None:
            waiting = [each for each in waiting if each.vectors is vectors]
        if len(waiting) == 1:
            return waiting[0]
        if waiting:
            raise InputError(
                f"{title}: {len(waiting)} lookups wait for a gradient; pass the vectors too: gradient(grad, vectors)"
            )
        which = "these vectors are of no lookup" if vectors is not None else "no lookup"
        raise InputError(f"{title}: {which} for training since the last step that waits for a gradient")

    # For the optimizer.

    def attach(self, optimizer: Any) -> None:
        """Make `optimizer` the one whose steps update the rows. Raises InputError if there is one already."""
        if self.attached is not None and self.attached is not optimizer:
            raise InputError(f"the table {self.name!r} belongs to another optimizer; make a table for each")
        self.attached = optimizer

    def take_gradient(self, owners: int, has_samples: bool) -> tuple[DistinctIds, Array]:
        """Return the distinct ids with a gradient since the last step, and their gradients; forget the lookups.
        has_samples: False if the batch is empty; its gradients are then ignored."""
        given = [each for each in self._lookups if each.gradient is not None and has_samples]
        self._lookups, self._steps = [], self._steps + 1
        if len(given) == 1:
            assert given[0].gradient is not None
            return given[0].distinct, given[0].gradient
        empty = np.empty(0, np.uint64)
        distinct = DistinctIds.of(np.concatenate([empty, *(each.distinct.ids for each in given)]), owners)
        sums = np.empty((len(distinct.ids), self.dim), np.float32)
        gradients = [each.gradient for each in given if each.gradient is not None]
        all_of_them = np.concatenate([np.empty((0, self.dim), np.float32), *gradients])
        native.sum_gradients(sums, all_of_them, distinct.positions, self.dim)
        return distinct, sums

    def forget_gradients(self) -> None:
        """Forget the gradients that no step has used."""
        self._lookups = [each for each in self._lookups if each.gradient is None]

    def forget_lookups(self) -> None:
        """Forget the lookups whose gradients would belong to the next step."""
        self._lookups, self._prefetched = [], None

    # Rows.

    def size(self) -> int:
        """Return the number of rows that exist, on all processes. Mode sync: collective."""
        return self._link.size(self)

    def export(self) -> dict[str, Array]:
        """Return all rows, sorted by id: {"ids": shape (rows,), "vectors": shape (rows, dim)}. Ids are int64; see them
        as uint64 with `.view(np.uint64)`. Mode sync: collective; all ranks get all rows.

        Example: `np.savez("users.npz", **users.export())`.
        """
        columns = self._link.columns(self)
        ids = columns["ids"].view(np.int64)
        order = np.argsort(ids)
        return {"ids": ids[order], "vectors": columns["vectors"][order]}

    def assign(self, ids: Any, vectors: Any) -> None:
        """Set the vectors of ids, such as pretrained ones; missing rows are made. Mode sync: collective, with the same
        arrays on all ranks. Mode ps: on one worker.

        Raises InputError: ids as in `lookup`, repeated ids, or vectors that are not of shape (len(ids), dim).
        """
        link, problem = self._link, ""
        try:
            flat, values = self._as_ids(_as_array("ids", ids)), _as_array("vectors", vectors)
            if len(flat) == 0:
                values = values.reshape(0, self.dim).astype(np.float32)
            if values.shape != (len(flat), self.dim) or values.dtype.kind != "f":
                raise InputError(
                    f"vectors must be floats of shape {(len(flat), self.dim)}, but are "
                    f"{describe(values.shape, values.dtype)}"
                )
            if len(np.unique(flat)) < len(flat):
                raise InputError("an id occurs twice")
            with np.errstate(over="ignore"):
                wrong = np.flatnonzero(~np.isfinite(values.astype(self.dtype)).all(axis=1))
            if wrong.size:
                raise InputError(f"the vector of id {flat[wrong[0]].view(np.int64)} is not finite in {self.dtype}")
        except InputError as error:
            problem = str(error)
        link.check(self, "assign", problem)
        self._prefetched = None
        link.write(self, {"ids": flat, "vectors": values.astype(np.float32)})


def _as_array(name: str, value: Any) -> Array:
    """Return an array of integers or floats; empty lists are of integers."""
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise InputError(f"{name} cannot be converted to an array: {error}") from None
    return array.astype(np.int64) if array.size == 0 and not isinstance(value, np.ndarray) else array


def describe_nonfinite(ids: Array, gradients: Array, ranks: int = 1) -> str:
    """Describe the gradients that are not finite, or whose sum over the ranks may not be; "" if there are none. ids:
    uint64, of each gradient."""
    largest = np.float32(np.finfo(np.float32).max if ranks == 1 else np.finfo(np.float32).max / (2 * ranks))
    if not native.exceeds([gradients], 4, int(largest.view(np.int32))):
        return ""
    wrong = ~(np.abs(gradients) <= largest)
    rows = np.flatnonzero(wrong.any(axis=1))
    number = gradients[rows[0]][wrong[rows[0]]][0]
    sums = f", and the sum over {ranks} ranks may exceed float32" if np.isfinite(number) else ""
    first = f"id {ids[rows[0]].view(np.int64)} has {number:g}{sums}"
    return first if len(rows) == 1 else f"{len(rows)} of {len(gradients)} ids, the first: {first}"
