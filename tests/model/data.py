"""Scenarios of `allred.data`: shares of global batches, epochs, and resuming with other ranks and batch sizes.

The oracle knows the promises only: each epoch has each sample once, ranks split each global batch evenly, and after a
restore no sample of an epoch is skipped or repeated. Each process runs the loaders of all ranks.
"""

import dataclasses
import pathlib
import random
from collections.abc import Iterator
from typing import Any

import array_nests
import numpy as np

import allred
from allred import data
from allred.errors import InputError


@dataclasses.dataclass(frozen=True, repr=False)
class LoaderRun(array_nests.Plan):
    """One run of a loop: with these ranks, it ends after `steps` global batches, or at the end."""

    ranks: int
    batch_size: int
    steps: int | None
    workers: int = 0


@dataclasses.dataclass(frozen=True, repr=False)
class Scenario(array_nests.Plan):
    kind: str  # "batches", "stream" or "sampler"
    rows: int
    epochs: int
    seed: int | None
    drop_last: bool
    columns: int
    runs: tuple[LoaderRun, ...]


def scenario(rng: random.Random, size: int) -> Scenario:
    kind, rows = rng.choice(["batches", "batches", "stream", "sampler"]), rng.choice([1, 2, 3, 7, 12, 40, 97])
    drop_last = rng.random() < 0.3
    runs = []
    for number in range(rng.randint(1, 3)):
        ranks = size if number == 0 and size > 1 else rng.randint(1, 4)
        batch_size = rng.randint(ranks, ranks + 20)
        runs.append(LoaderRun(ranks, batch_size, rng.choice([None, 0, 1, 2, 5]), int(rng.random() < 0.02)))
    if kind == "sampler":  # it needs a row for each rank
        rows = max([rows, *(run.ranks for run in runs)])
    if drop_last:  # positions after batches of another size leave out other rows
        runs = [dataclasses.replace(runs[0], batch_size=max(runs[0].ranks, min(runs[0].batch_size, rows)))]
        drop_last = runs[0].batch_size <= rows
    seed = rng.choice([None, 0, 5]) if kind != "stream" else None
    return Scenario(kind, rows, rng.randint(1, 3), seed, drop_last, rng.choice([1, 2]), tuple(runs))


def loader_of(plan: Scenario, run: LoaderRun, rank: int) -> Any:
    """Return the loader of a rank: with the default rank and size if they are those of this process."""
    options = {"batch_size": run.batch_size, "epochs": plan.epochs, "drop_last": plan.drop_last}
    if (rank, run.ranks) != (allred.rank(), allred.size()):
        options |= {"rank": rank, "size": run.ranks}
    columns = [np.arange(plan.rows) * 10, np.arange(plan.rows, dtype="f4")][: plan.columns]
    if plan.kind == "stream":
        return data.stream(list(range(plan.rows)), **options)
    if plan.kind == "sampler":
        return data.DistributedBatchSampler(plan.rows, seed=plan.seed, **options)
    return data.batches(*columns, seed=plan.seed, **options)


def samples_of(plan: Scenario, batch: Any) -> list[int]:
    """Return the rows of a batch."""
    if plan.kind != "batches":
        return [int(row) for row in batch]
    first = batch[0] if plan.columns == 2 else batch
    if plan.columns == 2:
        assert (batch[0] == batch[1] * 10).all()
    return [int(value) // 10 for value in first]


class Loop:
    """All runs. seen: the rows so far. ended: whether a run has come to the end of the data."""

    def __init__(self, plan: Scenario) -> None:
        self.plan, self.state, self.seen, self.ended = plan, None, list[int](), False

    def problem(self) -> str:
        """Return a difference from the promises, or ""."""
        for run in self.plan.runs:
            left = self.plan.rows - self.state["samples"] if self.state else self.plan.rows
            too_few = self.plan.kind == "sampler" and 0 < left < run.ranks and run.steps != 0
            try:
                problem = self.run(run)
            except InputError as error:
                return "" if too_few else f"{run}: {error}"
            if problem or too_few or self.ended:
                return problem or ("expected InputError, got no error" if too_few else self.wrong_rows())
        return self.wrong_rows()

    def run(self, run: LoaderRun) -> str:
        loaders = [loader_of(self.plan, run, rank) for rank in range(run.ranks)]
        if self.state is not None:
            for loader in loaders:
                loader.load_state_dict(self.state)
        iterators = [iter(data.prefetch(each, workers=run.workers) if run.workers else each) for each in loaders]
        joined = run.ranks - 1 if self.plan.kind == "sampler" else 0  # rows of a last batch that is too small
        steps = 0
        while steps != run.steps:
            batches = [next(each, None) for each in iterators]
            if any(batch is None for batch in batches):
                self.ended = True
                return "" if all(batch is None for batch in batches) else f"{run}: ranks end at different steps"
            shares = [samples_of(self.plan, batch) for batch in batches]
            sizes = [len(share) for share in shares]
            if max(sizes) - min(sizes) > 1 or sizes != sorted(sizes, reverse=True):
                return f"{run}: shares of {sizes}"
            if not 0 < sum(sizes) <= run.batch_size + joined or (self.plan.kind == "sampler" and not min(sizes)):
                return f"{run}: shares of {sizes}"
            states = [loader.state_dict() for loader in loaders]
            if any(other != states[0] for other in states):
                return f"{run}: positions {states}"
            self.state, steps = states[0], steps + 1
            self.seen += [row for share in shares for row in share]
        return ""

    def wrong_rows(self) -> str:
        """Compare the rows of all epochs."""
        plan, seen = self.plan, self.seen
        size = plan.runs[0].batch_size
        epoch_rows = plan.rows // size * size if plan.drop_last else plan.rows
        if self.ended and len(seen) != epoch_rows * plan.epochs:
            return f"{len(seen)} rows at the end of the data, expected {plan.epochs} times {epoch_rows}"
        for epoch, start in enumerate(range(0, len(seen), epoch_rows)):
            rows = seen[start : start + epoch_rows]
            if len(set(rows)) < len(rows) or not set(rows) <= set(range(plan.rows)):
                return f"epoch {epoch} has the rows {rows}"
            if plan.seed is None and rows != list(range(len(rows))):
                return f"epoch {epoch} has the order {rows}"
        return ""


def check(plan: Scenario, directory: pathlib.Path) -> Iterator[tuple[str, str]]:
    loop = Loop(plan)
    problem = loop.problem()
    yield problem, f"{loop.seen} {loop.state} {allred.size()}"
