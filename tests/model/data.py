"""Scenarios of `allred.data`: shares of global batches, epochs, and resuming with other ranks and batch sizes.

The oracle knows the promises only: each epoch has each sample once, ranks split each global batch evenly, and after a
restore no sample of an epoch is skipped or repeated.
"""

import dataclasses
import pathlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import trees

import allred
from allred import data


@dataclasses.dataclass(frozen=True, repr=False)
class Part(trees.Plan):
    """One run of a loop: with these ranks, it ends after `steps` global batches, or at the end."""

    ranks: int
    batch_size: int
    steps: int | None
    workers: int = 0


@dataclasses.dataclass(frozen=True, repr=False)
class Scenario(trees.Plan):
    kind: str  # "batches", "stream" or "sampler"
    rows: int
    epochs: int
    seed: int | None
    drop_last: bool
    columns: int
    parts: tuple[Part, ...]


def scenario(rng: random.Random, size: int) -> Scenario:
    rows = rng.choice([1, 2, 3, 7, 12, 40, 97])
    drop_last = rng.random() < 0.3
    parts = []
    for number in range(rng.randint(1, 3)):
        ranks = size if number == 0 else rng.randint(1, 4)
        batch_size = rng.randint(ranks, ranks + 20)
        parts.append(Part(ranks, batch_size, rng.choice([None, 0, 1, 2, 5]), int(rng.random() < 0.02)))
    if drop_last:  # positions behind batches of another size leave out other rows
        parts = [dataclasses.replace(parts[0], batch_size=max(parts[0].ranks, min(parts[0].batch_size, rows)))]
        drop_last = parts[0].batch_size <= rows
    kind = rng.choice(["batches", "batches", "stream", "sampler"])
    seed = rng.choice([None, 0, 5]) if kind == "batches" else 3
    return Scenario(kind, rows, rng.randint(1, 3), seed, drop_last, rng.choice([1, 2]), tuple(parts))


def loader_of(made: Scenario, part: Part, rank: int) -> Any:
    options = {"batch_size": part.batch_size, "epochs": made.epochs, "drop_last": made.drop_last}
    columns = [np.arange(made.rows) * 10, np.arange(made.rows, dtype="f4")][: made.columns]
    if made.kind == "stream":
        return data.stream(list(range(made.rows)), rank=rank, size=part.ranks, **options)
    return data.batches(*columns, seed=made.seed, rank=rank, size=part.ranks, **options)


def samples_of(made: Scenario, batch: Any) -> list[int]:
    """Return the rows of a batch."""
    if made.kind == "stream":
        return [int(row) for row in batch]
    first = batch[0] if made.columns == 2 else batch
    if made.columns == 2:
        assert (batch[0] == batch[1] * 10).all()
    return [int(value) // 10 for value in first]


def check(made: Scenario, directory: pathlib.Path) -> Iterator[tuple[str, str]]:
    """Each rank plays all ranks of all parts; the first part also with its own rank as the default."""
    state, seen = None, []
    for part in made.parts:
        loaders = [loader_of(made, part, rank) for rank in range(part.ranks)]
        if state is not None:
            for loader in loaders:
                loader.load_state_dict(state)
        iterators = [iter(data.prefetch(each, workers=part.workers) if part.workers else each) for each in loaders]
        steps = 0
        while steps != part.steps:
            batches = [next(each, None) for each in iterators]
            if any(batch is None for batch in batches):
                if not all(batch is None for batch in batches):
                    yield f"{part}: ranks end at different steps", ""
                break
            shares = [samples_of(made, batch) for batch in batches]
            sizes = [len(share) for share in shares]
            if max(sizes) - min(sizes) > 1 or sizes != sorted(sizes, reverse=True) or sum(sizes) > part.batch_size:
                yield f"{part}: shares of {sizes}", ""
            states = [loader.state_dict() for loader in loaders]
            if any(other != states[0] for other in states):
                yield f"{part}: positions {states}", ""
            state, steps = states[0], steps + 1
            seen += [row for share in shares for row in share]
        else:
            continue
        break
    complete = len(seen) // made.rows
    problem = ""
    for epoch in range(complete if not made.drop_last else 0):
        rows = seen[epoch * made.rows : (epoch + 1) * made.rows]
        if sorted(rows) != list(range(made.rows)):
            problem = f"epoch {epoch} has the rows {rows}"
        if made.kind == "stream" and rows != list(range(made.rows)):
            problem = f"epoch {epoch} of the stream has the order {rows}"
    if len(set(rest := seen[complete * made.rows :])) < len(rest) and not made.drop_last:
        problem = f"rows {rest} of an incomplete epoch"
    yield problem, f"{seen} {state} {allred.size()}"
