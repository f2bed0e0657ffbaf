"""Plans of the surface `tables`, and its oracle: all rows in dicts, updated by the optimizers of dense arrays."""

import copy
import dataclasses
import random
from typing import Any

import array_nests
import numpy as np

from allred import embeddings, optim
from allred.native import row_twins

# Gradients may nearly cancel out: with a large eps the difference stays small where the order of workers is not fixed.
OPTIMIZERS = {
    "SGD": lambda: optim.SGD(0.1),
    "momentum": lambda: optim.SGD(0.1, momentum=0.75, nesterov=True, weight_decay=0.125),
    "schedule": lambda: optim.SGD(optim.exponential_decay(0.5, 2, 0.5)),
    "Adagrad": lambda: optim.Adagrad(0.1, eps=0.5),
    "row-wise": lambda: optim.Adagrad(0.1, eps=0.5, row_wise=True, weight_decay=0.125),
    "RMSProp": lambda: optim.RMSProp(0.01, eps=0.5, momentum=0.5, centered=True),
    "Adam": lambda: optim.Adam(0.05, eps=0.5),
    "AdamW": lambda: optim.AdamW(0.05, eps=0.5),
}
INITS: dict[str, tuple[Any, tuple[int, float, float]]] = {  # the argument, and those of row_twins.RowTable
    "number": (0.25, (0, 0.25, 0.0)),
    "uniform": (embeddings.Uniform(-1.0, 0.5), (1, -1.0, 0.5)),
    "normal": (embeddings.Normal(0.5, 0.25), (2, 0.5, 0.25)),
}
DTYPES = ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", ">i4", ">u8"]
FORMS = ["list", "tuple", "number", "unsigned numbers"]
ANY_ID = [*range(10), -1, -2, -128, 2**15, 2**31, -(2**40), 2**62 + 1, 2**63 - 1, -(2**63)]
WRONG: dict[str, dict[str, Any]] = {  # arguments of lookup, prefetch and assign that are refused in any table
    "lookup": {
        "floats": ([0.0, 1.0],), "no array": ([[1], [2, 3]],), "bools": ([True],), "strings": (["1"],),
        "complex": ([1j],), "no floats": (np.zeros(0),), "large": ([2**64],), "none": (None,), "not 0": ([0, 0], [1]),
        "objects": (np.array([0, 0], object),), "dates": (np.array(["2020-01-01"], "M8[D]"),),
        "decreasing": ([0, 0], [0, 2, 1]), "beyond": ([0, 0], [0, 3]), "no bag": ([0], []), "one": ([0], 0),
        "float offsets": ([0], [0.0]), "bool offsets": ([0], [False]), "offsets 2-d": ([0], [[0]]),
        "ids 2-d": ([[0]], [0]), "large offsets": ([0], np.array([0, 2**64 - 1], "u8")), "pooling": ([0], [0], "max"),
    },
    "prefetch": {"floats": ([0.5],), "staleness": ([0], -1)},
}  # fmt: skip
WRONG_ROWS = ["repeated", "width", "integers", "nan", "too large", "none"]
WRONG_GRADIENTS = ["no lookup", "other vectors", "shape", "integers", "complex", "twice"]
KINDS = ["step"] * 8 + ["calls"] * 2 + ["assign", "save", "save", "restore", "lr", "wrong", "wrong", "wrong"]
KINDS_OF_CHECKPOINTS = ["step", "step", "step", "step", "save", "save", "save", "restore", "assign"]


# ---- Plans


@dataclasses.dataclass(frozen=True, repr=False)
class Table(array_nests.Plan):
    dim: int
    rows: int | None
    init: str
    optimizer: str
    dtype: str
    seed: int
    admit_after: int = 1
    expire_after: int | None = None
    full_every: int = 1


@dataclasses.dataclass(frozen=True, repr=False)
class Ids(array_nests.Plan):
    """The ids of a call on one rank. grad: a seed; None for a lookup without a gradient. grad_form: dtype and layout.
    fault: an element of the gradient."""

    values: tuple[int, ...]
    shape: tuple[int, ...]
    form: str
    layout: str = "C"
    offsets: tuple[int, ...] | None = None
    pooling: str = "sum"
    grad: int | None = None
    grad_form: tuple[str, str] = ("f4", "C")
    fault: float = 0.0

    def make(self) -> Any:
        numbers = np.array(self.values, "i8").reshape(self.shape)
        if self.form == "number":
            return numbers.tolist()
        if self.form in ("list", "unsigned numbers"):
            return (numbers.view("u8") if self.form == "unsigned numbers" else numbers).tolist()
        if self.form == "tuple":
            return tuple(numbers)
        array = array_nests.laid_out(numbers.astype(self.form), self.layout)
        array.flags.writeable = False
        return array

    def make_offsets(self) -> Any:
        if self.offsets is None or self.layout == "C":
            return self.offsets
        return array_nests.laid_out(np.array(self.offsets, "u1" if self.layout == "F" else "i4"), self.layout)

    @property
    def keys(self) -> list[int]:
        return [value % 2**64 for value in self.values]

    @property
    def bags(self) -> list[list[int]]:
        """The ids of each vector of the result."""
        if self.offsets is None:
            return [[key] for key in self.keys]
        ends = [*self.offsets, len(self.values)][1:]
        return [self.keys[start:end] for start, end in zip(self.offsets, ends, strict=True)]

    def shape_of_vectors(self, dim: int) -> tuple[int, ...]:
        return (*self.shape, dim) if self.offsets is None else (len(self.offsets), dim)

    def gradient(self, dim: int) -> np.ndarray:
        values = np.random.default_rng(self.grad).normal(size=self.shape_of_vectors(dim)).astype(self.grad_form[0])
        if self.fault and values.size:
            values.reshape(-1)[(self.grad or 0) % values.size] = self.fault
        return array_nests.laid_out(values, self.grad_form[1])

    def sums(self, dim: int) -> dict[int, np.ndarray]:
        """The gradients of each id, added up."""
        sums = {key: np.zeros(dim, "f4") for key in self.keys}
        for bag, row in zip(self.bags, self.gradient(dim).astype("f4").reshape(-1, dim), strict=True):
            for key in bag:
                sums[key] += row / np.float32(len(bag)) if self.pooling == "mean" else row
        return sums


@dataclasses.dataclass(frozen=True, repr=False)
class Call(array_nests.Plan):
    """A lookup of a table, with the ids of each rank; None on a worker that makes none. staleness: of a prefetch."""

    table: int
    ids: tuple[Ids | None, ...]
    train: bool = True
    staleness: int | None = None


@dataclasses.dataclass(frozen=True, repr=False)
class Action(array_nests.Plan):
    """kind: "step", "calls" (without a step), "assign", "save", "restore", "lr", or "wrong": a call that is refused.
    dense: of each rank the seed of the other gradient, None if it is missing, -1 if it is not finite."""

    kind: str
    calls: tuple[Call, ...] = ()
    dense: tuple[int | None, ...] = ()
    samples: tuple[int, ...] | None = None
    table: int = 0
    number: int = 0
    rank: int = 0
    wrong: tuple[str, str] = ("", "")
    ids: Ids | None = None


@dataclasses.dataclass(frozen=True, repr=False)
class Part(array_nests.Plan):
    ranks: int
    actions: tuple[Action, ...]
    servers: int = 0
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def workers(self) -> int:
        return self.ranks - self.servers


@dataclasses.dataclass(frozen=True, repr=False)
class Scenario(array_nests.Plan):
    tables: tuple[Table, ...]
    parts: tuple[Part, ...]


def scenario(rng: random.Random, size: int) -> Scenario:
    tables = tuple(
        Table(
            dim=rng.choice([1, 2, 3, 4, 5, 8, 9, 16, 17]),
            rows=rng.choice([None, None, 1, 3, 12, 300]),
            init=rng.choice(list(INITS)),
            optimizer=rng.choice(list(OPTIMIZERS)),
            dtype=rng.choice(["f4", "f4", "f2"]),
            seed=rng.choice([0, 1, 2**64 - 1]),
            admit_after=rng.choice([1, 1, 1, 2, 3]),
            expire_after=rng.choice([None, None, 1, 2, 4]),
            full_every=rng.choice([1, 2, 3]),
        )
        for _ in range(rng.randint(1, 2))
    )
    kinds = rng.choice([KINDS, KINDS, KINDS_OF_CHECKPOINTS])
    return Scenario(tables, tuple(_part(rng, tables, size, kinds, number) for number in range(rng.randint(1, 3))))


def _part(rng: random.Random, tables: tuple[Table, ...], size: int, kinds: list[str], number: int) -> Part:
    ranks = rng.randint(1, size if size > 1 else 3)
    servers = rng.randint(1, ranks - 1) if size > 1 and ranks > 1 and rng.random() < 0.6 else 0
    options: dict[str, Any] = {"nonfinite": rng.choice(["raise", "skip"])}
    if servers:
        options["policy"] = rng.choice(["async", "bounded", "sync"]) if ranks - servers == 1 else "sync"
        options |= {"use_locking": False} if rng.random() < 0.2 else {}
    elif rng.random() < 0.2:
        options["op"] = "sum"
    part = Part(ranks, (), servers, options)
    prefetched: dict[int, Call] = {}  # the last one of each table
    actions = [_action(rng, tables, part, rng.choice(kinds), prefetched) for _ in range(rng.randint(1, 8))]
    if number and rng.random() < (0.8 if kinds is KINDS else 0.5):
        actions.insert(0, Action("restore", number=rng.randrange(2)))
    if rng.random() < 0.5:
        actions.append(Action("save", number=rng.randrange(2)))
    if kinds is KINDS_OF_CHECKPOINTS:
        actions += [Action("restore", number=directory) for directory in (0, 1)]
    return dataclasses.replace(part, actions=tuple(actions))


def _action(
    rng: random.Random, tables: tuple[Table, ...], part: Part, kind: str, prefetched: dict[int, Call]
) -> Action:
    table, rank = rng.randrange(len(tables)), rng.randrange(part.workers)
    if kind == "wrong":
        names = {"assign": WRONG_ROWS, "gradient": WRONG_GRADIENTS, "range": ["range"], "train": ["train"]}
        names |= {method: list(cases) for method, cases in WRONG.items()}
        method = rng.choice(["lookup", *names])
        rank = 0 if part.servers and method == "assign" else rank
        return Action(kind, table=table, rank=rank, wrong=(method, rng.choice(names[method])), number=rng.randrange(2))
    if kind == "assign":
        ids = _ids(rng, tables[table], False)
        values = tuple(dict.fromkeys(ids.values))
        return Action(kind, table=table, number=rng.randrange(2**16), ids=Ids(values, (len(values),), ids.form))
    if kind not in ("step", "calls"):
        return Action(kind, table=table, number=rng.randrange(2))
    calls = tuple(_call(rng, tables, part, prefetched) for _ in range(rng.choice([0, 1, 1, 1, 2, 3])))
    dense = [rng.choice([None, *[rng.randrange(2**16)] * 5]) for _ in range(part.workers)]
    samples = None
    if rng.random() < 0.15 and not part.servers:
        samples = (*(rng.choice([0, 1, 2, 5]) for _ in dense[1:]), rng.randint(1, 3))
    if rng.random() < 0.2 and (part.workers == 1 or not part.servers):  # else the others wait for this worker
        fault = rng.choice([np.nan, np.inf, 3e38 if part.workers > 1 else np.nan, None])
        if fault is None:
            dense[rank] = -1
        else:
            calls = tuple(_with_fault(call, rank, fault) for call in calls)
    return Action(kind, calls, tuple(dense), samples)


def _call(rng: random.Random, tables: tuple[Table, ...], part: Part, prefetched: dict[int, Call]) -> Call:
    table, kind = rng.randrange(len(tables)), rng.choice(["train"] * 6 + ["evaluation", "prefetch"])
    if kind == "prefetch" and part.servers and part.workers > 1:  # whether it has the next update is not fixed
        kind = "train"
    if kind == "train" and table in prefetched and rng.random() < 0.7:  # the same ids
        given = prefetched.pop(table).ids
        if rng.random() < 0.9:
            return Call(table, given)
    ids = [_ids(rng, tables[table], kind != "prefetch") for _ in range(part.workers)]
    call = Call(
        table, tuple(None if part.servers and rng.random() < 0.1 else each for each in ids), kind != "evaluation",
        rng.randrange(3) if kind == "prefetch" else None,
    )  # fmt: skip
    if kind == "prefetch":
        prefetched[table] = call
    return call


def _with_fault(call: Call, rank: int, value: float) -> Call:
    ids = [
        dataclasses.replace(each, fault=value, grad_form=("f4", "C")) if each is not None and number == rank else each
        for number, each in enumerate(call.ids)
    ]
    return dataclasses.replace(call, ids=tuple(ids)) if call.train else call


def _ids(rng: random.Random, table: Table, bags: bool) -> Ids:
    count = rng.choice([0, 1, 1, 2, 3, 4, 6, 6, 12, 40])
    pool = ANY_ID if table.rows is None else range(table.rows)
    values = tuple(rng.choice(pool) for _ in range(count))
    if rng.random() < 0.2:
        values = tuple(dict.fromkeys(values))
    count, form, offsets = len(values), rng.choice(DTYPES + FORMS), None
    if rng.random() < 0.3 and bags:
        cuts = rng.choice([0, 1, 2, 5]) if count else rng.choice([-1, 0, 2])
        offsets = tuple(sorted([0, *(rng.randint(0, count) for _ in range(cuts))]))[: cuts + 1]
    shapes: list[tuple[int, ...]] = [(count,)] * 4 + [(count, 1), (1, count), (1, 1, count)]
    shapes += [(2, count // 2), (count // 2, 1, 2)] if count % 2 == 0 else []
    shapes += [()] * 3 if count == 1 else [(3, 0, 2)] if count == 0 else []
    shape = (count,) if offsets is not None else rng.choice(shapes)
    if form in DTYPES and form not in ("u8", ">u8"):
        limits = np.iinfo(form)
        form = form if all(limits.min <= value <= limits.max for value in values) else "i8"
    if form == "unsigned numbers" and len({value < 0 for value in values}) > 1:  # numpy makes floats of them
        form = "list"
    form = "list" if form == "number" and shape else "number" if form == "tuple" and not shape else form
    if form in FORMS and not count:
        shape = np.shape(np.empty(shape).tolist())
    return Ids(
        values, shape, form, rng.choice(array_nests.LAYOUTS), offsets, rng.choice(["sum", "mean"]),
        rng.choice([None, *[rng.randrange(2**16)] * 5]),
        (rng.choice(["f4", "f4", "f8", "f2"]), rng.choice(array_nests.LAYOUTS)),
    )  # fmt: skip


def dense_gradient(seed: int) -> np.ndarray:
    values = array_nests.draw(np.random.default_rng(abs(seed)), (3,), np.dtype("f4"))
    return values if seed >= 0 else values * np.float32(np.nan)


def learning_rate(action: Action) -> float:
    return 0.25 / (1 + action.number)


# ---- The oracle


class Rows:
    """All rows of a table: {id: [vector, slots, last step]}, and {id: [lookups, last step]} of ids without a row."""

    def __init__(self, plan: Table) -> None:
        self.plan, self.optimizer = plan, OPTIMIZERS[plan.optimizer]()
        self.rows: dict[int, list[Any]] = {}
        self.candidates: dict[int, list[int]] = {}
        init = INITS[plan.init][1]
        self._new = row_twins.RowTable(plan.dim, plan.dtype == "f2", (0,) * 3, (0.0,) * 3, *init, plan.seed, 1)

    @property
    def next_step(self) -> int:
        return self.optimizer.global_step + 1

    def first(self, key: int) -> np.ndarray:
        vector = np.empty((1, self.plan.dim), self.plan.dtype)
        self._new.lookup(np.array([key], np.uint64), vector, 0)
        return vector

    def _make(self, key: int) -> list[Any]:
        vector = self.first(key)
        return [vector, self.optimizer.slots(vector.astype("f4")), self.next_step]

    def lookup(self, keys: list[int], train: bool) -> dict[int, np.ndarray]:
        found = {}
        for key in dict.fromkeys(keys):
            if train and key not in self.rows:
                lookups = self.candidates.pop(key, [0])[0] + 1
                if lookups >= self.plan.admit_after:
                    self.rows[key] = self._make(key)
                else:
                    self.candidates[key] = [lookups, self.next_step]
            if train and key in self.rows:
                self.rows[key][2] = self.next_step
            found[key] = (self.rows[key][0] if key in self.rows else self.first(key)).astype("f4")[0]
        return found

    def update(self, gradients: dict[int, np.ndarray]) -> None:
        lr, step = self.optimizer.learning_rate, self.next_step
        self.optimizer.global_step = step
        for row, gradient in ((self.rows[key], gradients[key]) for key in gradients if key in self.rows):
            vector = row[0].astype("f4")
            self.optimizer.update(vector, gradient.reshape(1, -1), row[1], lr, step)
            row[0], row[2] = vector.astype(self.plan.dtype), step

    def assign(self, keys: list[int], vectors: np.ndarray) -> None:
        for key, vector in zip(keys, vectors.astype("f4").astype(self.plan.dtype), strict=True):
            row = self.rows.setdefault(key, self._make(key))
            row[0], row[2] = vector.reshape(1, -1), self.next_step

    def save(self) -> Any:
        if self.plan.expire_after is not None:
            oldest = self.next_step - self.plan.expire_after
            self.rows = {key: row for key, row in self.rows.items() if row[2] >= oldest}
            self.candidates = {key: found for key, found in self.candidates.items() if found[1] >= oldest}
        return copy.deepcopy((self.rows, self.optimizer.global_step))

    def load(self, saved: Any) -> None:
        self.rows, self.optimizer.global_step = copy.deepcopy(saved)
        self.candidates = {}

    def export(self) -> dict[str, np.ndarray]:
        ids = np.array(list(self.rows), np.uint64).view(np.int64)
        vectors = np.array([row[0][0] for row in self.rows.values()], self.plan.dtype).reshape(-1, self.plan.dim)
        return {"ids": ids[order := np.argsort(ids)], "vectors": vectors[order]}


class Oracle:
    """The whole training; `begin` starts a part."""

    def __init__(self, plan: Scenario) -> None:
        self.plan = plan
        self.disk: dict[int, dict[int, Any]] = {0: {}, 1: {}}  # by directory and step
        self.begin(plan.parts[0])

    def begin(self, part: Part) -> None:
        self.part, self.step_count, self.skipped, self.calls_of_step = part, 0, 0, 0
        self.tables = [Rows(table) for table in self.plan.tables]
        self.w = np.arange(3, dtype="f4")
        self.forget()

    def forget(self) -> None:
        """Forget all lookups. By rank and table: the ids of those for training; ids, vectors and last step of the
        prefetched."""
        self.lookups: list[list[list[Ids]]] = [[[] for _ in self.tables] for _ in range(self.part.workers)]
        self.prefetched: list[list[Any]] = [[None for _ in self.tables] for _ in range(self.part.workers)]

    @np.errstate(all="ignore")
    def apply(self, action: Action) -> Any:
        """Return of "step" and "calls" the results of the calls by rank, and whether the gradients are finite; of
        "restore" the step of the checkpoint."""
        rows = self.tables[action.table]
        if action.kind in ("step", "calls"):
            results = [self.call(call) for call in action.calls]
            return results, action.kind == "calls" or self.step(action)
        if action.kind == "assign":
            assert action.ids is not None
            rows.assign(action.ids.keys, self.vectors(action))
            for rank in range(1 if self.part.servers else self.part.workers):
                self.prefetched[rank][action.table] = None
        elif action.kind == "save":
            self.save(action.number)
        elif action.kind == "restore":
            return self.restore(action.number)
        elif action.kind == "lr" and not callable(rows.optimizer.lr):
            rows.optimizer.lr = learning_rate(action)
        return None

    def vectors(self, action: Action) -> np.ndarray:
        """The vectors that are assigned."""
        assert action.ids is not None
        dim = self.plan.tables[action.table].dim
        return np.random.default_rng(action.number).normal(size=(len(action.ids.values), dim))

    def call(self, call: Call) -> list[np.ndarray | None]:
        """Return the result of each rank; None of a prefetch."""
        rows, number = self.tables[call.table], call.table
        given = {rank: ids for rank, ids in enumerate(call.ids) if ids is not None}
        results: list[np.ndarray | None] = [None] * len(call.ids)
        if call.staleness is not None:
            for rank, ids in given.items():
                found = rows.lookup(ids.keys, True)
                self.prefetched[rank][number] = ids.keys, found, self.calls_of_step + call.staleness
            return results
        taken: dict[int, Any] = {}
        for rank, ids in given.items() if call.train else ():
            before, self.prefetched[rank][number] = self.prefetched[rank][number], None
            if before is not None and before[0] == ids.keys and before[2] >= self.calls_of_step:
                taken[rank] = before[1]
        if len(taken) < len(given) and not self.part.servers:  # all ranks, or none
            taken = {}
        for rank, ids in given.items():
            found = taken[rank] if rank in taken else rows.lookup(ids.keys, call.train)
            vectors = np.zeros((len(ids.bags), rows.plan.dim), "f4")
            for vector, bag in zip(vectors, ids.bags, strict=True):
                for key in bag:
                    vector += found[key]
                vector /= np.float32(len(bag)) if bag and ids.pooling == "mean" else np.float32(1)
            results[rank] = vectors.reshape(ids.shape_of_vectors(rows.plan.dim))
            if call.train:
                self.lookups[rank][number].append(ids)
        return results

    def step(self, action: Action) -> bool:
        """Return whether the gradients are finite."""
        part, workers, samples = self.part, self.part.workers, action.samples or (1,) * self.part.workers
        sums = [
            [
                _added(ids if samples[rank] else [], table.dim)
                for ids, table in zip(given, self.plan.tables, strict=True)
            ]
            for rank, given in enumerate(self.lookups)
        ]
        dense = [seed if count else None for seed, count in zip(action.dense, samples, strict=True)]
        self.lookups = [[[] for _ in self.tables] for _ in sums]
        self.calls_of_step += 1
        largest = np.finfo("f4").max / np.float32(1 if part.servers or workers == 1 else 2 * workers)
        finite = all((np.abs(row) <= largest).all() for tables in sums for table in tables for row in table.values())
        if -1 in dense or not finite:
            self.skipped += part.options["nonfinite"] == "skip"
            return False
        adds = "op" in part.options or part.options.get("policy") in ("async", "bounded")
        weights = [float(count > 0) if adds else count * workers / sum(samples) for count in samples]
        divisor = np.float32(1 if adds else workers)
        for number, rows in enumerate(self.tables):
            total: dict[int, np.ndarray] = {}
            for tables, weight in zip(sums, weights, strict=True):
                for key, row in tables[number].items():
                    total[key] = total.get(key, np.float32(0)) + row * np.float32(weight)
            rows.update({key: row / divisor for key, row in total.items()})
        for seed, weight in zip(dense, weights, strict=True):
            if seed is not None:
                self.w -= np.float32(0.5 * weight) / divisor * dense_gradient(seed)
        self.step_count += 1
        return True

    def save(self, directory: int) -> None:
        disk = self.disk[directory]
        for newer in [step for step in disk if step > self.step_count]:  # of another training
            del disk[newer]
        disk[self.step_count] = [rows.save() for rows in self.tables], self.w.copy()

    def restore(self, directory: int) -> int | None:
        self.forget()
        disk = self.disk[directory]
        if (newest := max(disk, default=None)) is not None:
            tables, w = disk[newest]
            self.step_count, self.w = newest, w.copy()
            for rows, saved in zip(self.tables, tables, strict=True):
                rows.load(saved)
        return newest


def _added(lookups: list[Ids], dim: int) -> dict[int, np.ndarray]:
    """Return the sum of the gradients of the lookups of a rank, by id."""
    each = [ids.sums(dim) for ids in lookups if ids.grad is not None]
    sums: dict[int, np.ndarray] = {}
    for one in each:
        for key, row in one.items():
            sums[key] = sums[key] + row if key in sums else row
    return sums
