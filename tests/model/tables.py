"""Scenarios of embedding tables: parts of a training, each in a world of its own, in mode sync or mode ps. Their oracle
is in tables_oracle.py.

After each action a rank compares all rows bit for bit, the parameter beside them, and the counters. A part may restore
what an earlier one has saved with another number of ranks or servers. With one process, the parts run in threads.
"""

import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import array_nests
import numpy as np
from tables_oracle import (
    INITS,
    OPTIMIZERS,
    WRONG,
    Action,
    Ids,
    Oracle,
    Part,
    Scenario,
    dense_gradient,
    learning_rate,
    scenario,
)

import allred
from allred import optim, startup, testing, world
from allred.errors import AllredError, InputError, MismatchError, NonFiniteError
from allred.modes import ps_join

__all__ = ["check", "scenario"]

NODES = {2: "1,1", 3: "2,1", 4: "2,2"}
POLICIES = {"async": allred.ps.Async(), "bounded": allred.ps.Bounded(staleness=1), "sync": allred.ps.Sync()}


class Rank:
    """A part on this rank, with allred."""

    def __init__(self, oracle: Oracle, root: pathlib.Path) -> None:
        self.oracle, self.part, self.root, self.rank = oracle, oracle.part, root, allred.rank()
        self.plans = oracle.plan.tables
        self.tables = [
            allred.Embedding(
                f"table {number}", plan.dim, plan.rows, INITS[plan.init][0], OPTIMIZERS[plan.optimizer](), plan.dtype,
                plan.seed, plan.admit_after, plan.expire_after, plan.full_every,
            )
            for number, plan in enumerate(self.plans)
        ]  # fmt: skip
        options = dict(self.part.options)
        if "policy" in options:
            options["consistency"] = POLICIES[options.pop("policy")]
        if "op" in options:
            options["op"] = allred.Sum
        self.opt = allred.distributed(optim.SGD(0.5), tables=self.tables, **options)
        self.params = {"w": np.arange(3, dtype="f4")}
        # In mode ps the order of the workers is not fixed; two numbers have one sum.
        self.rough = self.part.servers > 0 and self.part.workers > 2
        self.vectors: dict[tuple[int, bool], np.ndarray] = {}  # of the last lookup of a table: with a gradient, without
        self.problems: list[str] = []
        self.shared: list[str] = []

    def run(self) -> tuple[str, str]:
        """Run the part. Return the first difference, and what must be equal on all ranks."""
        self.opt.broadcast(self.params)
        for number, action in enumerate(self.part.actions):
            before = len(self.problems)
            if self.part.servers:
                allred.barrier()
            getattr(self, action.kind)(action)
            if self.part.servers:
                allred.barrier()
            self.compare()
            self.problems[before:] = [f"action {number} ({action.kind}): {text}" for text in self.problems[before:]]
        return next(iter(self.problems), ""), " ".join(self.shared)

    def expect(self, name: str, got: Any, want: Any, tolerance: float = 0.0) -> None:
        if text := array_nests.first_difference({name: got}, {name: want}, {name: tolerance}):
            self.problems.append(text)

    def tolerance(self, table: int) -> float:
        return array_nests.TOLERANCES[self.plans[table].dtype] if self.rough else 0.0

    def compare(self) -> None:
        found = []
        for number, (table, rows) in enumerate(zip(self.tables, self.oracle.tables, strict=True)):
            got, want = table.export(), rows.export()
            self.expect(f"size of table {number}", table.size(), len(rows.rows))
            self.expect(f"ids of table {number}", got["ids"], want["ids"])
            self.expect(f"vectors of table {number}", got["vectors"], want["vectors"], self.tolerance(number))
            found += got.values()
        if self.part.servers:
            self.opt.pull(self.params)
        self.expect("w", self.params["w"], self.oracle.w, 1e-5)
        self.expect("step", [self.opt.global_step, self.opt.skipped], [self.oracle.step_count, self.oracle.skipped])
        self.shared.append(array_nests.digest([*found, self.params["w"]]))

    def fails(self, error: type[AllredError] | None, call: Callable[[], Any], alone: bool = False) -> None:
        """Make a call that has to raise an error, or none. alone: on this rank."""
        try:
            call()
        except AllredError as raised:
            if type(raised) is not error:
                self.problems.append(f"expected {error and error.__name__}, got {type(raised).__name__}: {raised}")
            if not (self.part.servers or alone):
                self.shared.append(str(raised))
        else:
            self.problems += [f"expected {error.__name__}, got no error"] if error else []

    def calls(self, action: Action) -> bool:
        """Return whether the gradients of the step are finite."""
        results, finite = self.oracle.apply(action)
        for call, wants in zip(action.calls, results, strict=True):
            table, ids = self.tables[call.table], call.ids[self.rank]
            if ids is not None and call.staleness is not None:
                table.prefetch(ids.make(), staleness=call.staleness)
            elif ids is not None:
                got = table.lookup(ids.make(), ids.make_offsets(), ids.pooling, call.train)
                self.expect("vectors", got, wants[self.rank], self.tolerance(call.table))
                got[...] = 7.0  # they are the caller's
                if call.train:
                    self.vectors[call.table, ids.grad is not None] = got
                    self.give(call.table, ids, got)
        return finite

    def give(self, number: int, ids: Ids, vectors: np.ndarray) -> None:
        if ids.grad is None:
            return
        gradient = ids.gradient(self.plans[number].dim)
        kept = np.array(gradient)
        is_alone = (number, False) not in self.vectors and ids.grad % 2
        self.tables[number].gradient(gradient, *([] if is_alone else [vectors]))
        self.expect("a gradient", np.array(gradient), kept)
        gradient[...] = 5.0  # it was taken

    def step(self, action: Action) -> None:
        raises = not self.calls(action) and self.part.options["nonfinite"] == "raise"
        seed = action.dense[self.rank]
        grads = {"w": None if seed is None else dense_gradient(seed)}
        samples = None if action.samples is None else action.samples[self.rank]
        self.fails(NonFiniteError if raises else None, lambda: self.opt.step(self.params, grads, samples))
        self.vectors = {}

    def assign(self, action: Action) -> None:
        self.oracle.apply(action)
        if self.rank == 0 or not self.part.servers:
            assert action.ids is not None
            self.tables[action.table].assign(action.ids.make(), self.oracle.vectors(action))

    def save(self, action: Action) -> None:
        self.oracle.apply(action)
        if self.rank == 0 or not self.part.servers:
            self.opt.save(self.root / str(action.number), self.params)

    def restore(self, action: Action) -> None:
        step, self.vectors = self.oracle.apply(action), {}
        if (found := self.opt.restore(self.root / str(action.number), self.params)) != step:
            self.problems.append(f"restored step {found}, expected {step}")

    def lr(self, action: Action) -> None:
        self.oracle.apply(action)
        optimizer = self.tables[action.table].optimizer
        if not callable(optimizer.lr):
            optimizer.lr = learning_rate(action)

    def wrong(self, action: Action) -> None:
        """Make a call on one rank that has to be refused. In mode sync the other ranks make a correct one."""
        table, plan, (what, name) = self.tables[action.table], self.plans[action.table], action.wrong
        is_here, ones, error = self.rank == action.rank, np.ones((1, plan.dim)), InputError
        good: tuple[Any, ...] = ([0],)
        if what == "gradient":
            return self.wrong_gradient(table, action) if is_here else None
        if what == "train":  # refused because the ranks differ
            if self.part.servers or self.part.workers == 1:
                return None
            wrong, good, method, error = (
                ([0], None, "sum", False),
                ([0], None, "sum", True),
                table.lookup,
                MismatchError,
            )
        elif what == "range":
            outside = 2**70 if plan.rows is None else [-1, plan.rows][action.number]
            wrong, method = ([0, outside],), table.lookup
        elif what == "assign":
            cases = {
                "repeated": ([0, 0], np.ones((2, plan.dim))), "width": ([0], np.ones((1, plan.dim + 1))),
                "integers": ([0], ones.astype(int)), "nan": ([0], ones * np.nan), "none": ([0], []),
                "too large": ([0], ones * (1e39 if plan.dtype == "f4" else 1e5)),
            }  # fmt: skip
            wrong, good, method = cases[name], ([0], ones), table.assign
        else:
            wrong, method = WRONG[what][name], getattr(table, what)
        if is_here or not self.part.servers:
            self.fails(error, lambda: method(*(wrong if is_here else good)))

    def wrong_gradient(self, table: allred.Embedding, action: Action) -> None:
        ones, name = np.ones((1, table.dim)), action.wrong[1]
        used, waiting = (self.vectors.get((action.table, has)) for has in (True, False))
        arguments: tuple[Any, ...] = (ones, ones)
        if name == "twice" and used is not None:
            arguments = (np.ones(used.shape), used)
        elif name == "no lookup" and waiting is None:
            arguments = (ones,)
        elif name in ("shape", "integers", "complex") and waiting is not None:
            dtypes = {"integers": int, "complex": complex}
            shape = (*waiting.shape, 1) if name == "shape" else waiting.shape
            arguments = (np.ones(shape, dtypes.get(name)), waiting)
        self.fails(InputError, lambda: table.gradient(*arguments), alone=True)


def outcome(oracle: Oracle, root: pathlib.Path) -> tuple[str, str]:
    rank = Rank(oracle, root)
    try:
        return rank.run()
    except Exception as error:  # the other ranks may wait for this one
        return " ".join([*rank.problems[:1], f"{type(error).__name__}: {error}"]), ""


def play(oracles: list[Oracle], part: Part, root: pathlib.Path, rank: int, size: int) -> list[tuple[str, str]]:
    """Run a part. Return the outcomes of those of its ranks that are here."""
    has_worker = part.servers <= rank < part.ranks
    for oracle in oracles:
        oracle.begin(part)
    for oracle in oracles[part.ranks if size == 1 else int(has_worker) :]:
        for action in part.actions:
            oracle.apply(action)
    if size == 1:
        return testing.threads(part.ranks, lambda: outcome(oracles[allred.rank()], root), timeout_s=60)
    if rank >= part.ranks:
        return []
    if "ALLRED_PRETEND_NODES" in os.environ:
        os.environ["ALLRED_PRETEND_NODES"] = NODES.get(part.ranks, "1")
    ranks = list(range(part.ranks))
    if part.servers:  # as allred.Server, which lets servers return
        startup.enter(ranks, startup.Cluster(tasks=("",) * part.ranks), mode="ps", num_ps=part.servers)
    else:
        allred.init(ranks)
    try:
        if has_worker:
            return [outcome(oracles[0], root)]
        ps_join.join()
        return []
    finally:
        allred.shutdown()


def check(plan: Scenario, directory: pathlib.Path) -> Iterator[tuple[str, str | None]]:
    """Run a scenario on this rank. Yield a difference, and what must be equal on all ranks of a part, after each."""
    rank, size = 0, 1
    if had_world := world.is_initialized():
        rank, size = allred.rank(), allred.size()
        allred.shutdown()
    kept = {name: os.environ.get(name) for name in ("ALLRED_PRETEND_NODES", "ALLRED_WATCHER")}
    os.environ["ALLRED_WATCHER"] = "0"  # the start of one takes longer than a part
    oracles = [Oracle(plan) for _ in range(max(part.ranks for part in plan.parts) if size == 1 else 1)]
    try:
        for number, part in enumerate(plan.parts):
            outcomes = play(oracles, part, directory, rank, size)
            problem = next((problem for problem, _ in outcomes if problem), "")
            texts = {text for _, text in outcomes}
            if len(texts) > 1:
                problem = problem or f"ranks differ: {texts}"
            yield problem and f"part {number}: {problem}", min(texts, default=None)
    finally:
        for name, value in kept.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})
    if had_world:
        allred.init()
