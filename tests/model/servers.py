"""Scenarios of mode ps: workers and servers of each policy; each scenario has a world of its own.

After each action the workers synchronize at a barrier and pull, so the parameters are those of an oracle in one
process. Policies async and bounded apply gradients in any order: the oracle needs SGD without momentum there, unless
there is one worker.
"""

import copy
import dataclasses
import pathlib
import random
from collections.abc import Iterator
from typing import Any

import array_nests
import numpy as np
import optimizers

import allred
from allred import nest
from allred.errors import AllredError, InputError

CREATES_WORLDS = True  # rank_program.py does not call init()
PLACEMENTS = ["bytes", "round_robin", "greedy"]


@dataclasses.dataclass(frozen=True, repr=False)
class Action(array_nests.Plan):
    """kind: "step" (gradients: by micro-step and worker), "save", "restore", "broadcast", "state", "lr", or "change": a
    change of a parameter by the program, after which a step is refused."""

    kind: str
    gradients: tuple[tuple[optimizers.Gradients, ...], ...] = ()
    number: int = 0


@dataclasses.dataclass(frozen=True, repr=False)
class Scenario(array_nests.Plan):
    servers: int
    workers: int
    tree: array_nests.Tree
    seed: int
    optimizer: str
    policy: str
    options: dict[str, Any]
    actions: tuple[Action, ...]
    wide: bool = False  # for optimizers.gradient_dtype


def scenario(rng: random.Random, size: int) -> Scenario | None:
    if size == 1:
        return None
    servers = rng.randint(1, size - 1)
    workers, policy = size - servers, rng.choice(["async", "bounded", "sync"])
    tree = array_nests.tree(rng, rng.choice([["f4"], ["f8", "f4"], ["c8", "f4"], list(array_nests.DTYPES)]), ties=False)
    while not tree.leaves or len(set(tree.names)) < len(tree.names):
        tree = array_nests.tree(rng, ["f4", "f8"], ties=False)
    options: dict[str, Any] = {"placement": rng.choice(PLACEMENTS)}
    if rng.random() < 0.3:
        options["accumulate"] = 2
    if rng.random() < 0.3:
        options["nonfinite"] = rng.choice(["skip", "raise"])
    any_order = policy != "sync" and workers > 1
    if policy != "sync" and rng.random() < 0.3:
        options["use_locking"] = False
    optimizer = "SGD" if any_order else rng.choice(["SGD", "momentum", "Adam", "Adagrad"])
    plan = Scenario(servers, workers, tree, rng.randrange(2**16), optimizer, policy, options, ())
    kinds = ["step"] * 8 + ["save", "restore", "broadcast", "state", "change"]
    kinds += [] if any_order else ["lr"]  # it goes to the servers with the next step of worker 0
    actions = tuple(_action(rng, plan, rng.choice(kinds)) for _ in range(rng.randint(1, 6)))
    return dataclasses.replace(plan, actions=actions)


def _action(rng: random.Random, plan: Scenario, kind: str) -> Action:
    if kind != "step":
        return Action(kind, number=rng.randrange(100))
    indices, leaves = range(len(plan.tree.leaves)), plan.tree.leaves
    grads = []
    for _ in range(plan.options.get("accumulate", 1)):
        micro = []
        for _ in range(plan.workers):
            layouts = tuple(dataclasses.replace(leaf, layout=rng.choice(array_nests.LAYOUTS[:5])) for leaf in leaves)
            micro.append(
                optimizers.Gradients(
                    seed=rng.randrange(2**16),
                    missing=frozenset(i for i in indices if rng.random() < 0.1),
                    leaves=layouts if rng.random() < 0.2 else None,
                    form=rng.choice(["arrays", "arrays", "arrays", "numbers", "read-only"]),
                )
            )
        grads.append(micro)
    if (plan.policy == "async" or (plan.policy == "bounded" and plan.workers == 1)) and rng.random() < 0.2:
        worker = rng.randrange(plan.workers)
        grads[0][worker] = dataclasses.replace(grads[0][worker], fault="nan", place=rng.randrange(len(indices)))
    return Action(kind, tuple(map(tuple, grads)))


class Oracle:
    """Applies the gradients of all workers, one after another or their mean."""

    def __init__(self, plan: Scenario) -> None:
        self.plan, self.optimizer = plan, optimizers.OPTIMIZERS[plan.optimizer]()
        self.params = array_nests.arrays(plan.tree.leaves, optimizers.start_values(plan))
        self.step_count = 0
        self.saved: Any = None

    def step(self, action: Action) -> list[bool]:
        """Return for each worker whether its gradient was refused: it is not finite."""
        plan, means = self.plan, []
        for worker in range(plan.workers):
            micro_steps = [optimizers.gradient_values(plan, micro[worker], 1.0) for micro in action.gradients]
            means.append([_mean(grads) for grads in zip(*micro_steps, strict=True)])
        refused = [any(g is not None and not np.isfinite(g).all() for g in grads) for grads in means]
        used = [grads for grads, bad in zip(means, refused, strict=True) if not bad]
        if plan.policy == "sync":
            used = [[_mean([_zeros_if_none(g, others) for g in others]) for others in zip(*used, strict=True)]]
        for grads in used:
            cast = [
                None if grad is None else np.asarray(grad).astype(optimizers.gradient_dtype(plan, index))
                for index, grad in enumerate(grads)
            ]
            self.optimizer.step(plan.tree.fill(self.params), plan.tree.fill(cast))
            self.step_count += 1
        return refused

    def save(self) -> None:
        self.saved = copy.deepcopy((self.params, self.optimizer, self.step_count))

    def restore(self) -> None:
        if self.saved is not None:
            lr = self.optimizer.lr
            params, self.optimizer, self.step_count = copy.deepcopy(self.saved)
            self.optimizer.lr = lr
            for param, value in zip(self.params, params, strict=True):
                param[...] = value


def _mean(grads: Any) -> Any:
    present = [
        np.asarray(grad, np.result_type(np.asarray(grad).dtype, np.float64)) for grad in grads if grad is not None
    ]
    return sum(present[1:], present[0]) / len(grads) if present else None


def _zeros_if_none(grad: Any, others: Any) -> Any:
    like = next((other for other in others if other is not None), None)
    return np.zeros_like(like) if grad is None and like is not None else grad


def check(plan: Scenario | None, directory: pathlib.Path) -> Iterator[tuple[str, Any]]:
    if plan is None:
        return
    server = allred.Server({"ps": plan.servers, "worker": plan.workers})
    if allred.job_name() == "ps":
        server.join()
        allred.shutdown()
        yield from [("", None)] * (1 + len(plan.actions))
        return
    # The servers report when the last worker has left, so the reports are made at the end.
    reports = list(_work(plan, directory))
    allred.shutdown()
    yield from reports


def _work(plan: Scenario, directory: pathlib.Path) -> Iterator[tuple[str, Any]]:
    policy = {"async": allred.ps.Async(), "bounded": allred.ps.Bounded(staleness=1), "sync": allred.ps.Sync()}
    oracle = Oracle(plan)
    opt = allred.distributed(optimizers.OPTIMIZERS[plan.optimizer](), consistency=policy[plan.policy], **plan.options)
    params = array_nests.arrays(plan.tree.leaves, optimizers.start_values(plan))
    opt.broadcast(plan.tree.fill(params))
    found = _difference(opt, params, oracle)
    allred.barrier()  # no worker makes a step before all have asked for the state
    yield found
    for number, action in enumerate(plan.actions):
        problem = ""
        if action.kind == "step":
            refused = oracle.step(action)[allred.rank()]
            problem = _step(plan, opt, params, action, refused)
        elif action.kind == "save":
            oracle.save()
            allred.barrier()
            if allred.rank() == 0:
                opt.save(directory, plan.tree.fill(params))
        elif action.kind == "restore":
            oracle.restore()
            allred.barrier()
            opt.restore(directory, plan.tree.fill(params))
        elif action.kind == "broadcast":
            allred.barrier()
            opt.broadcast(plan.tree.fill(params))
        elif action.kind == "state":
            allred.barrier()
            if allred.rank() == 0:
                opt.load_state_dict(opt.state_dict())
        elif action.kind == "change":
            allred.barrier()
            problem = _change(plan, opt, params, action)
        else:
            oracle.optimizer.lr = opt.optimizer.lr = 0.5 / (1 + action.number % 4)
        allred.barrier()
        opt.pull(plan.tree.fill(params))
        found, shared = _difference(opt, params, oracle)
        allred.barrier()
        problem = problem or found
        yield problem and f"action {number} ({action.kind}): {problem}", shared


def _step(plan: Scenario, opt: Any, params: list[Any], action: Action, refused: bool) -> str:
    raises = refused and plan.options.get("nonfinite", "raise") == "raise"
    try:
        for micro in action.gradients:
            grads = optimizers.gradient_values(plan, micro[allred.rank()], 1.0)
            opt.step(plan.tree.fill(params), plan.tree.fill(grads))
    except AllredError as error:
        return "" if raises else f"{type(error).__name__}: {error}"
    return "expected NonFiniteError, got no error" if raises else ""


def _change(plan: Scenario, opt: Any, params: list[Any], action: Action) -> str:
    """Change one element on each worker. Return the problem if the next step is not refused."""
    param = params[action.number % len(params)]
    if not param.size or sum(each.size for each in params) > 1024:  # what a step compares
        return ""
    at = np.unravel_index(action.number % param.size, param.shape)
    before = param[at].copy()
    param[at] = 0 if before else 1j if param.dtype.kind == "c" else 1
    try:
        for _ in range(plan.options.get("accumulate", 1)):
            opt.step(plan.tree.fill(params), plan.tree.fill([np.ones(param.shape) for param in params]))
    except InputError as error:
        return "" if "has changed parameter" in str(error) else f"InputError: {error}"
    return f"no error after a change from {before} to {param[at]}"


def _difference(opt: Any, params: list[Any], oracle: Oracle) -> tuple[str, str]:
    shared = allred.digest([array_nests.wide(param) for param in params])
    got: dict[str, Any] = {f"leaf {index}": param for index, param in enumerate(params)} | {"step": opt.global_step}
    want: dict[str, Any] = {f"leaf {index}": param for index, param in enumerate(oracle.params)}
    state = dict(nest.leaves(oracle.optimizer.state_dict()))
    want |= {"step": oracle.step_count} | state
    # The servers also have slots of parameters without a gradient so far.
    got |= {name: value for name, value in nest.leaves(opt.state_dict()) if name in state}
    return array_nests.first_difference(got, want, array_nests.tolerances(oracle.plan.tree, state)), shared
