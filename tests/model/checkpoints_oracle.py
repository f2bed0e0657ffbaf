"""Scenarios of checkpoints and sessions (checkpoints.py), and the oracle: a training in parts in one process.

A part is a session (or a loop with `opt.restore` and `opt.save`) that resumes from the newest checkpoint of a
directory, in which checkpoints may have been damaged, deleted, or made obsolete by a rollback to an older step. It ends
with its data, by a stop, or by an exception somewhere in the loop. The oracle makes the steps of a part in numpy, with
the optimizer unwrapped and global batches, from the state at the checkpoint: so a resumed run has to equal one without
an interruption. It knows which checkpoints there are.
"""

import copy
import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import array_nests
import numpy as np
import optimizers

from allred import optim

FAILURES = ("before", "after", "before_step", "hook", "exit")
ENDS = ("data", "data", "max_steps", "request", "signal", "break", "break early", *FAILURES, *FAILURES)
DAMAGE = ("flip", "truncate", "manifest", "delete")
DIRECTORIES = ("a", "b")


class Remembering(optimizers.Descent):
    """An optimizer of the program, with a state."""

    def __init__(self, lr: float) -> None:
        super().__init__(lr)
        self.calls = 0

    def step(self, params: Any, grads: Any) -> None:
        self.calls += 1
        self.lr = 0.5 / (1 + self.calls % 3)
        super().step(params, grads)

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


OPTIMIZERS = {**optimizers.OPTIMIZERS, "remembering": lambda: Remembering(0.5)}


@dataclasses.dataclass(frozen=True, repr=False)
class TrainingRun(array_nests.Plan):
    """One part of a training. directory: of its checkpoints; the hook Checkpoint writes into the other one. at: index
    of the batch after which the part ends. alone: the rank that fails, if only one does. damage: done before, to the
    newest checkpoint. wrong: a restore that has to be refused, tried before. session: else a loop without one."""

    ranks: int
    batch_size: int
    servers: int = 0  # in mode ps: the other one of the ranks is a worker
    directory: str = "a"
    session: bool = True
    options: tuple[tuple[str, Any], ...] = ()
    scaled: bool = False
    hooks: tuple[str, ...] = ()
    save_steps: int = 1000
    keep: int = 5
    keep_every: int = 0
    end: str = "data"
    at: int = 0
    max_steps: int | None = None
    alone: int | None = None
    damage: tuple[str, ...] = ()
    rollback: bool = False
    wrong: str = ""

    @property
    def micro_steps(self) -> int:
        return int(dict(self.options).get("accumulate", 1))


@dataclasses.dataclass(frozen=True, repr=False)
class Scenario(array_nests.Plan):
    tree: array_nests.Tree
    seed: int
    optimizer: str
    rows: int
    epochs: int
    order: int | None  # the seed of the batches
    nan_rows: tuple[int, ...]
    parts: tuple[TrainingRun, ...]


def scenario(rng: random.Random, size: int) -> Scenario:
    dtypes = rng.choice([["f4"], ["f8"], ["f4", "f2"], ["bf16", "f4"], ["c8"], list(array_nests.DTYPES)])
    tree = array_nests.tree(rng, dtypes, ties=False)
    while len(set(tree.names)) < len(tree.names):
        tree = array_nests.tree(rng, dtypes, ties=False)
    rows, optimizer = rng.choice([1, 3, 7, 12, 30]), rng.choice(list(OPTIMIZERS))
    most_servers = 0 if not tree.leaves else 3 if isinstance(OPTIMIZERS[optimizer](), optim.Optimizer) else 1
    return Scenario(
        tree=tree,
        seed=rng.randrange(2**16),
        optimizer=optimizer,
        rows=rows,
        epochs=rng.randint(1, 3),
        order=rng.choice([None, 3]),
        nan_rows=tuple(rng.sample(range(rows), 1)) if rng.random() < 0.25 else (),
        parts=tuple(_part(rng, size, number, most_servers) for number in range(rng.randint(2, 5))),
    )


def _part(rng: random.Random, size: int, number: int, most_servers: int) -> TrainingRun:
    ranks = rng.randint(1, size if size > 1 else 4)
    options = {"accumulate": rng.randint(2, 3)} if rng.random() < 0.3 else {}
    options |= {"sharded": True} if rng.random() < 0.2 else {}
    scaled = rng.random() < 0.2
    servers = min(most_servers, ranks - 1) if size > 1 and rng.random() < 0.25 else 0
    options |= {"nonfinite": rng.choice(["raise", "skip"])} if not scaled and rng.random() < 0.5 else {}
    end = rng.choice(ENDS)
    end = "request" if end == "signal" and size == 1 else end  # threads get no signals
    hooks = tuple(hook for hook in ("averaging", "early", "every", "best") if rng.random() < 0.35)
    hooks = hooks[:-1] if {"every", "best"} <= set(hooks) else hooks
    alone = rng.randrange(ranks) if size == 1 and rng.random() < 0.5 and end in FAILURES else None
    if alone is not None and end == "hook":  # the chief may have written in a hook, or not
        hooks = tuple(hook for hook in hooks if hook not in ("every", "best"))
    if servers:
        options.pop("sharded", None)
        hooks = tuple(hook for hook in hooks if hook != "early")  # a stop that is not announced comes later
        end = "data" if end in ("request", "signal") else end
    return TrainingRun(
        ranks=servers + 1 if servers else ranks,
        batch_size=rng.randint(ranks, ranks + 8),
        servers=servers,
        directory=rng.choice(["a", "a", "a", "b"]),
        session=rng.random() < 0.8,
        options=tuple(options.items()),
        scaled=scaled,
        hooks=hooks,
        save_steps=rng.choice([1, 2, 3, 1000]),
        keep=rng.choice([1, 2, 5]),
        keep_every=rng.choice([0, 0, 2]),
        end=end,
        at=rng.choice([0, 1, 2, 3, 5, 8]),
        max_steps=rng.randint(1, 12) if end == "max_steps" else None,
        alone=alone,
        damage=tuple(rng.choice(DAMAGE) for _ in range(rng.randint(1, 2))) if number and rng.random() < 0.3 else (),
        rollback=rng.random() < 0.4,
        wrong=rng.choice(["optimizer", "shape", "names", "integer"]) if number and rng.random() < 0.3 else "",
    )


def data_of(plan: Scenario) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(plan.seed)
    rows = rng.integers(-16, 17, plan.rows) / 8
    rows[list(plan.nan_rows)] = np.nan
    return rows, rng.normal(size=plan.rows)


def start_values(plan: Scenario) -> list[np.ndarray]:
    return optimizers.start_values(plan)  # type: ignore[arg-type]


def gradients(params: list[np.ndarray], rows: np.ndarray, scale: float = 1.0) -> list[np.ndarray]:
    """Return the mean gradients of these rows; zeros without rows."""
    mean = rows.mean() if len(rows) else 0.0
    grads = []
    for i, p in enumerate(params):
        slope = np.array([1, -0.5]) if p.dtype.kind == "c" else 1
        grads.append(array_nests.wide(p) * bool(len(rows)) / 4 + mean * slope * (1 + i % 3) / 4)
    return [array_nests.narrow(grad * scale, p.dtype) for grad, p in zip(grads, params, strict=True)]


# ---- The oracle


@dataclasses.dataclass
class State:
    """What a checkpoint has. position: epoch and samples. The values of hooks are None without these hooks."""

    params: list[np.ndarray]
    optimizer: Any
    step: int = 0
    scale: float | None = None
    position: tuple[int, int] = (0, 0)
    average: list[np.ndarray] | None = None
    early: tuple[float, int] | None = None
    best: float | None = None


@dataclasses.dataclass
class Saved:
    """A checkpoint on disk. training: the number of its part. damage: why it cannot be read; the bytes may be short."""

    state: State
    training: int
    damage: str = ""


class Oracle:
    """The checkpoints on disk, and the parts so far in one process."""

    def __init__(self, plan: Scenario) -> None:
        self.plan, self.rows = plan, data_of(plan)
        self.disk: dict[str, dict[int, Saved]] = {name: {} for name in DIRECTORIES}
        self.part: TrainingRun = plan.parts[0]
        self.number = 0

    def newest(self, directory: str) -> Saved | None:
        good = [step for step, saved in self.disk[directory].items() if not saved.damage]
        return self.disk[directory][max(good)] if good else None

    @property
    def older(self) -> int | None:
        """The older step that a part returns to by itself."""
        good = [step for step, saved in self.disk[self.part.directory].items() if not saved.damage]
        ours = isinstance(OPTIMIZERS[self.plan.optimizer](), optim.Optimizer)
        return min(good) if self.part.rollback and not self.part.session and ours and len(good) > 1 else None

    def begin(self, number: int) -> None:
        """Set the state at the beginning of a part."""
        self.number, self.part = number, self.plan.parts[number]
        part, found = self.part, self.newest(self.part.directory)
        self.found, self.is_unreadable = copy.deepcopy(found), bool(self.disk[part.directory]) and found is None
        self.older_step = old = self.older
        if old is not None:
            found = Saved(dataclasses.replace(self.disk[part.directory][old].state, scale=None), -1)
        fresh = State(
            array_nests.arrays(self.plan.tree.leaves, start_values(self.plan)), OPTIMIZERS[self.plan.optimizer]()
        )
        state = self.state = fresh if found is None else copy.deepcopy(found.state)
        self.restored = None if found is None else state.step
        state.scale = (state.scale or 8.0) if part.scaled else None
        if not part.session:
            state.position, state.average, state.early, state.best = (0, 0), None, None, None
            return
        names = part.hooks
        copies = [array_nests.wide(p) for p in state.params]
        state.average = (state.average or copies) if "averaging" in names else None
        state.early = (state.early or (np.inf, 0)) if "early" in names else None
        state.best = (np.inf if state.best is None else state.best) if {"every", "best"} & {*names} else None
        self.start = copy.deepcopy(state)
        self.saved = dict.fromkeys(DIRECTORIES, state.step)

    def has_fractions(self, index: int) -> bool:
        """Whether integers cannot hold a parameter of the newest checkpoint."""
        assert self.found is not None
        param = self.found.state.params[index]
        value = array_nests.wide(param)
        return param.dtype.kind == "c" or bool((abs(value - np.round(value)) > 0.01).any())

    def batches(self) -> Iterator[tuple[tuple[int, int], np.ndarray]]:
        """Yield positions and rows of global batches."""
        plan, size = self.plan, self.part.batch_size
        begin, first = self.state.position
        for epoch in range(begin, plan.epochs):
            order = np.arange(plan.rows)
            if plan.order is not None:
                order = np.random.default_rng([plan.order, epoch]).permutation(plan.rows)
            for row in range(first if epoch == begin else 0, plan.rows, size):
                yield (epoch, min(row + size, plan.rows)), order[row : row + size]

    def damage(self, kind: str) -> int | None:
        """Note that the newest checkpoint is damaged. Return its step."""
        files = self.disk[self.part.directory]
        if (found := self.newest(self.part.directory)) is None:
            return None
        found.damage = kind
        if kind == "delete":
            del files[found.state.step]
        return found.state.step

    def loop(self) -> bool:
        """Make the steps of a part without a session: some, a checkpoint, and two more batches after a restore."""
        micro: list[np.ndarray] = []
        for number, (_, rows) in enumerate(self.batches()):
            if number == self.part.at:
                micro = []
                self.save(self.part.directory)
            if number == self.part.at + 2:
                break
            micro.append(rows)
            if len(micro) == self.part.micro_steps:
                self._update(np.concatenate(micro))
                micro = []
        return False

    def run(self) -> bool:
        """Make the steps of a part. Return whether it ends with an error."""
        if not self.part.session:
            return self.loop()
        part, micro, number, batches = self.part, [], 0, self.batches()
        stops, requested = self._stops(), False
        while not stops:
            fails = number == part.at
            if part.end == "before_step" and not micro and number >= part.at:
                return self._failed(False)
            if (batch := next(batches, None)) is None:
                break
            if fails and part.end == "before":
                return self._failed(False)
            if fails and part.end == "break early":
                break
            micro.append(batch)
            before = self.state.step
            is_end = len(micro) == part.micro_steps
            if is_end:
                self._update(np.concatenate([rows for _, rows in micro]))
            updated = self.state.step != before
            if fails and part.end in ("after", "exit"):
                return self._failed(updated)
            leaves = fails and part.end == "break"
            requested = requested or (fails and part.end in ("request", "signal"))
            if is_end and (updated or not leaves):
                if part.end == "hook" and number >= part.at:
                    return self._failed(True)
                self._end_step(micro, requested)
                stops, micro = requested or self._stops(), []
            if leaves:
                break
            number += 1
        self._save_once()
        return False

    def _stops(self) -> bool:
        early, part = self.state.early, self.part
        return (part.max_steps is not None and self.state.step >= part.max_steps) or bool(early and early[1] >= 3)

    def _update(self, rows: np.ndarray) -> None:
        state, values = self.state, self.rows[0][rows]
        if np.isnan(values).any() and any(p.size for p in state.params):
            state.scale = None if state.scale is None else state.scale * 0.5
            return
        grads = self.plan.tree.fill(gradients(state.params, values))
        state.optimizer.step(self.plan.tree.fill(state.params), grads)
        state.step += 1

    def _end_step(self, micro: list[Any], stops: bool) -> None:
        state, part = self.state, self.part
        state.position = micro[-1][0]
        loss = float(np.concatenate([self.rows[1][rows] + 0.014 * position[0] for position, rows in micro]).mean())
        if state.average is not None:
            decay = min(0.75, (1 + state.step) / (10 + state.step))
            pairs = zip(state.average, state.params, strict=True)
            state.average = [decay * a + (1 - decay) * array_nests.wide(p) for a, p in pairs]
        if state.early is not None:
            best, since = state.early
            state.early = (loss, 0) if loss < best - 1e-6 else (best, since + 1)
        other = DIRECTORIES[1 - DIRECTORIES.index(part.directory)]
        if "every" in part.hooks and self._due(other, 2):
            self._save(other, 1, 0)
        if "best" in part.hooks and state.best is not None and loss < state.best:
            state.best = loss
            self._save(other, 1, 0)
        if self._due(part.directory, part.save_steps) and not stops and not self._stops():
            self._save(part.directory, part.keep, part.keep_every)

    def _due(self, directory: str, steps: int) -> bool:
        step, saved = self.state.step, self.saved[directory]
        return step != saved and step // steps > saved // steps

    def _failed(self, is_unfinished: bool) -> bool:
        if not is_unfinished:
            self._save_once()
        return True

    def _save_once(self) -> None:
        if self.state.step != self.saved[self.part.directory]:
            self._save(self.part.directory, self.part.keep, self.part.keep_every)

    def _save(self, directory: str, keep: int, keep_every: int) -> None:
        self.save(directory)
        self.saved[directory] = self.state.step
        files, last = self.disk[directory], self.state.step
        whole = [s for s in sorted(files) if s <= last and files[s].damage in ("", "flip")][:-keep]
        for step in whole:
            if not (keep_every and step % keep_every == 0):
                del files[step]

    def save(self, directory: str) -> None:
        files, step = self.disk[directory], self.state.step
        for later in [s for s in files if s > step and files[s].training != self.number]:
            del files[later]  # renamed
        files[step] = Saved(copy.deepcopy(self.state), self.number)
