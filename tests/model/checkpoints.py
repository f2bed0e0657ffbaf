"""Scenarios of checkpoints and sessions on ranks: parts of a training. Their oracle is in
checkpoints_oracle.py.

Each part runs on a subset of the ranks. Under mpirun these are the first ranks, in mode sync, or in mode ps with one
worker. With one process they are 1 to 4 threads, of which one may fail. `check` shuts down the world of its caller and
initializes it again at the end.
"""

import contextlib
import os
import pathlib
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from typing import Any

import array_nests
import numpy as np
from checkpoints_oracle import (
    DIRECTORIES,
    OPTIMIZERS,
    Oracle,
    Scenario,
    State,
    data_of,
    gradients,
    scenario,
    start_values,
)

import allred
from allred import checkpoint, nest, startup, testing, world
from allred.checkpoint.directory import list_committed
from allred.errors import AllredError, CheckpointError, NonFiniteError, RemoteRankError
from allred.modes import ps_join
from allred.session import Averaging, Checkpoint, EarlyStopping, Hook, MovingAverage

__all__ = ["check", "scenario"]

NODES = {2: "1,1", 3: "2,1", 4: "2,2"}


# ---- A rank


class Injected(Exception):  # noqa: N818
    pass


class Probe(Hook):
    """Waits until checkpoints are written, which makes their steps known, and fails where the part says so."""

    def __init__(self, rank: "Rank") -> None:
        self.rank = rank

    def before_step(self, session: allred.Session) -> None:
        for saver in [session._saver, *(hook._saver for hook in session.hooks if isinstance(hook, Checkpoint))]:
            if saver._thread is not None:
                saver._thread.join()
        if self.rank.count >= self.rank.part.at:
            self.rank.fail("before_step", True)

    def after_step(self, session: allred.Session, values: dict[str, float]) -> None:
        if self.rank.count > self.rank.part.at:
            self.rank.fail("hook", True)


class Rank:
    """A part on this rank, with allred."""

    def __init__(self, oracle: Oracle, root: pathlib.Path) -> None:
        self.plan, self.part, self.oracle, self.root = oracle.plan, oracle.part, oracle, root
        values = start_values(self.plan)
        if allred.rank():
            values = [np.full_like(value, 99) for value in values]
        self.params = array_nests.arrays(self.plan.tree.leaves, values)
        self.nest = self.plan.tree.fill(self.params, random.Random(allred.rank()))
        self.scaler = allred.GradScaler(8.0) if self.part.scaled else None
        self.opt = self.distributed(OPTIMIZERS[self.plan.optimizer]())
        self.count = 0  # batches before this one
        self.hooks: dict[str, Any] = {}

    def distributed(self, optimizer: Any) -> Any:
        return allred.distributed(
            optimizer, **dict(self.part.options), **({"scaler": self.scaler} if self.scaler else {})
        )

    @property
    def directory(self) -> pathlib.Path:
        return self.root / self.part.directory

    def fail(self, where: str, fails: bool) -> None:
        if fails and self.part.end == where and self.part.alone in (None, allred.rank()):
            raise SystemExit(3) if where == "exit" else Injected(where)

    def refused(self) -> tuple[str, str]:
        """Try a restore that has to be refused. Return what is wrong, and the error."""
        kind = "damaged" if self.oracle.is_unreadable else self.part.wrong if self.oracle.found else ""
        params, optimizer = list(self.params), OPTIMIZERS[self.plan.optimizer]()
        if not kind or (kind in ("shape", "names", "integer") and not params):
            return "", ""
        if kind == "optimizer":
            others = [new() for new in OPTIMIZERS.values()]
            optimizer = next(o for o in others if type(o) is not type(optimizer))
        index = self.plan.seed % max(len(params), 1)
        if kind == "shape":
            params[index] = np.ones((*params[index].shape, 2), params[index].dtype)
        if kind == "integer":
            params[index] = np.ones(params[index].shape, int)
            if not self.oracle.has_fractions(index):
                return "", ""
        filled = self.plan.tree.fill(params)
        filled = [filled] if kind == "names" else filled
        opt, text = self.distributed(optimizer), ""

        def values() -> str:
            scale = self.scaler.get_scale() if self.scaler else 1.0
            return nest.digest([params, nest.leaves(optimizer.state_dict()), scale])

        before = values()
        try:
            if self.plan.seed % 2:
                opt.restore(self.directory, filled)
            else:
                with allred.Session(self.directory, log_steps=None) as session:
                    session.track(params=filled, optimizer=opt)
        except CheckpointError as error:
            text = str(error)
        if not text:
            return f"a wrong restore ({kind}) was not refused", ""
        changed = before != values() or opt.global_step
        return f"a refused restore ({kind}) has changed something" if changed else "", text

    def run(self) -> str:
        """Run the part. Return a difference."""
        problem = self.session() if self.part.session else self.loop()
        return problem or self.difference(self.oracle.state, "at the end")

    def session(self) -> str:
        part, other = self.part, self.root / DIRECTORIES[1 - DIRECTORIES.index(self.part.directory)]
        rows, losses = data_of(self.plan)
        data = allred.data.batches(
            rows, losses, batch_size=part.batch_size, epochs=self.plan.epochs, seed=self.plan.order
        )
        makers: dict[str, Callable[[], Hook]] = {
            "averaging": lambda: Averaging(MovingAverage(self.nest, 0.75)),
            "early": lambda: EarlyStopping("loss", patience=3, min_delta=1e-6),
            "every": lambda: Checkpoint(other, every_steps=2),
            "best": lambda: Checkpoint(other, best="loss"),
        }
        self.hooks = {name: makers[name]() for name in part.hooks}
        hooks: list[Hook] = [*self.hooks.values()]
        hooks.insert(self.plan.seed % (len(hooks) + 1), Probe(self))
        with allred.Session(
            self.directory if allred.rank() == 0 else None,
            save_steps=part.save_steps, keep=part.keep, keep_every=part.keep_every, max_steps=part.max_steps,
            hooks=hooks, log_steps=None,
        ) as session:  # fmt: skip
            restored = session.track(params=self.nest, optimizer=self.opt, data=data)
            if restored != self.oracle.restored:
                return f"restored step {restored}, expected {self.oracle.restored}"
            if problem := self.difference(self.oracle.start, "after track()"):
                return problem
            for x, y in session.steps(data):
                self.fail("before", is_it := self.count == part.at)
                if is_it and part.end == "break early":
                    break
                loss = (y.mean() if len(y) else 0.0) + 0.014 * data.state_dict()["epoch"]  # no two are equal
                self.step(x)
                self.fail("after", is_it)
                self.fail("exit", is_it)
                session.log(loss=loss, examples=len(y))
                if is_it and allred.rank() == self.plan.seed % part.ranks:
                    if part.end == "request":
                        session.request_stop()
                    if part.end == "signal":
                        signal.raise_signal(signal.SIGUSR1)
                if is_it and part.end == "break":
                    break
                self.count += 1
        return ""

    def step(self, rows: np.ndarray) -> None:
        scale = self.scaler.get_scale() if self.scaler else 1.0
        with contextlib.suppress(NonFiniteError):
            self.opt.step(self.nest, self.plan.tree.fill(gradients(self.params, rows, scale)))

    def difference(self, state: State, when: str) -> str:
        tree = self.plan.tree
        got, want = (dict(nest.leaves(each.state_dict())) for each in (self.opt, state.optimizer))
        if any(part.servers for part in self.plan.parts):  # they also have slots of parameters without a gradient
            got = {name: value for name, value in got.items() if name in want}
        tolerances = array_nests.tolerances(tree, want)
        got |= {f"leaf {index}": param for index, param in enumerate(self.params)}
        want |= {f"leaf {index}": param for index, param in enumerate(state.params)}
        got |= {"step": self.opt.global_step, "scale": self.scaler.get_scale() if self.scaler else 1.0}
        want |= {"step": state.step, "scale": state.scale or 1.0}
        if state.average is not None and self.hooks:
            averages = self.hooks["averaging"]._average.state_dict()["averages"]
            got |= {f"average {i}": array_nests.wide(averages[name]) for i, name in enumerate(tree.names)}
            want |= {f"average {i}": value for i, value in enumerate(state.average)}
            tolerances |= {f"average {i}": tolerances[f"leaf {i}"] for i in range(len(tree.names))}
        if state.early is not None and self.hooks:
            early = self.hooks["early"]
            got |= {"best": early.best, "since": early.since}
            want |= {"best": state.early[0], "since": state.early[1]}
            tolerances["best"] = 1e-10
        text = array_nests.first_difference(got, want, tolerances)
        return text and f"{when}: {text}"

    def loop(self) -> str:
        if (step := self.oracle.older_step) is not None:
            saved = checkpoint.read_checkpoint(self.directory / f"step-{step:08d}")
            for param, name in zip(self.params, self.plan.tree.names, strict=True):
                param[...] = saved.params[name]
            if self.part.servers:  # which have no parameters before the first step
                self.opt.broadcast(self.nest)
            self.opt.load_state_dict({**saved.meta["optimizer"], "slots": saved.slots})
        elif (restored := self.opt.restore(self.directory, self.nest)) != self.oracle.restored:
            return f"restored step {restored}, expected {self.oracle.restored}"
        batches = allred.data.batches(
            data_of(self.plan)[0], batch_size=self.part.batch_size, epochs=self.plan.epochs, seed=self.plan.order
        )
        for number, rows in enumerate(batches):
            if number == self.part.at:
                self.opt.save(self.directory, self.nest)
                allred.barrier()
                self.opt.restore(self.directory, self.nest)
            if number == self.part.at + 2:
                break
            self.step(rows)
        return ""


def outcome(oracle: Oracle, root: pathlib.Path, fails: bool) -> tuple[str, str]:
    """Run a part on this rank. Return a difference, and what must be equal on all ranks."""
    rank = Rank(oracle, root)
    problem, text = rank.refused()
    if oracle.is_unreadable:
        return problem, text
    error: BaseException | None = None
    try:
        problem = problem or rank.run()
    except (Injected, SystemExit) as raised:
        error, rank.hooks = raised, {}
        problem = problem or rank.difference(oracle.state, "after the error")
    if (error is not None) != fails:
        problem = problem or f"error {error!r}, expected {'one' if fails else 'none'}"
    bits = nest.digest([np.nan_to_num(array_nests.wide(param)) for param in rank.params])
    return problem, f"{text} {bits} {rank.opt.global_step}"


# ---- Ranks


def play(oracle: Oracle, root: pathlib.Path, fails: bool, rank: int, size: int) -> list[tuple[str, str]]:
    """Run a part. Return the outcomes of those of its ranks that are here."""
    part = oracle.part
    if size == 1:
        outcomes: dict[int, tuple[str, str]] = {}

        def run() -> None:
            try:
                outcomes[allred.rank()] = outcome(oracle, root, fails)
            except AllredError as error:
                if part.alone in (None, allred.rank()) or not isinstance(error, RemoteRankError):
                    outcomes[allred.rank()] = f"{type(error).__name__}: {error}", ""
                raise
            if fails and part.alone is not None:  # the others raise RemoteRankError
                raise Injected

        with contextlib.suppress(Injected, AllredError):
            testing.threads(part.ranks, run, timeout_s=60)
        return list(outcomes.values()) or [("no rank has an outcome", "")]
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
        if rank < part.servers:
            ps_join.join()
            return []
        return [outcome(oracle, root, fails)]
    finally:
        allred.shutdown()


def check(plan: Scenario, directory: pathlib.Path) -> Iterator[tuple[str, str | None]]:
    """Run a scenario on this rank. Yield a difference, and what must be equal on all ranks of a part, after each."""
    rank, size = 0, 1
    if had_world := world.is_initialized():
        rank, size = allred.rank(), allred.size()
        allred.shutdown()
    kept = os.environ.get("ALLRED_PRETEND_NODES"), os.environ.get("ALLRED_WATCHER")
    os.environ["ALLRED_WATCHER"] = "0"  # the start of one takes longer than a part
    try:
        oracle = Oracle(plan)
        for number, part in enumerate(plan.parts):
            oracle.part = part
            for kind in part.damage:
                step = oracle.damage(kind)
                if step is not None and rank == 0:
                    damage(directory / part.directory / f"step-{step:08d}", kind)
            oracle.begin(number)
            fails = not oracle.is_unreadable and oracle.run()
            with np.errstate(all="ignore"):
                outcomes = play(oracle, directory, fails, rank, size)
            problem = next((problem for problem, _ in outcomes if problem), "")
            texts = {text for _, text in outcomes}
            if len(texts) > 1:
                problem = problem or f"ranks differ: {texts}"
            if rank == 0:
                problem = problem or files_differ(oracle, directory)
            yield problem and f"part {number}: {problem}", min(texts, default=None)
    finally:
        for name, value in zip(("ALLRED_PRETEND_NODES", "ALLRED_WATCHER"), kept, strict=True):
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})
    if had_world:
        allred.init()


def damage(path: pathlib.Path, kind: str) -> None:
    if kind == "delete":
        shutil.rmtree(path)
        return
    shards = [each for each in path.iterdir() if each.name != "manifest.json"]
    file = path / "manifest.json" if kind == "manifest" else max(shards, key=lambda each: each.stat().st_size)
    content = bytearray(file.read_bytes())
    if kind == "flip":
        content[len(content) // 2] ^= 4
    file.write_bytes(content if kind == "flip" else content[:-1])


def files_differ(oracle: Oracle, root: pathlib.Path) -> str:
    """Compare the checkpoints on disk with those of the oracle."""
    for name, files in oracle.disk.items():
        steps = list(list_committed(root / name))
        if steps != sorted(files):
            return f"directory {name} has steps {steps}, expected {sorted(files)}"
        found, expected = checkpoint.read_newest(root / name)[0], oracle.newest(name)
        if (found and found[1].step) != (expected and expected.state.step):
            return (
                f"directory {name}: the newest one is {found and found[0]}, expected {expected and expected.state.step}"
            )
    return ""
