"""Scenarios of `allred.distributed` for numpy optimizers, and an oracle: one process, with the optimizer unwrapped.

A scenario is a tree of parameters, options, and actions: steps with gradients of each rank (some of them faulty),
broadcasts, checkpoints, states, changes by the program, and rounds of `Join`. After each action a rank compares
parameters, state and counters with the oracle, and yields what must be equal on all ranks: bits of parameters, texts of
errors.
"""

import copy
import dataclasses
import math
import pathlib
import random
from collections.abc import Iterator
from typing import Any

import array_nests
import ml_dtypes
import numpy as np

import allred
from allred import nest, optim, world
from allred.errors import AllredError, DriftError, InputError, MismatchError, NonFiniteError

FAULTS = ["shape", "extra", "negative samples", "some samples", "dtype", "complex", "integer"]
FAULTS += ["nan", "inf", "nan", "inf"]
_NOT_OF_FUNCTIONS = (
    "shape",
    "extra",
    "complex",
    "integer",
    "negative samples",
    "some samples",
)  # they know no parameters and no samples
OPTIMIZERS = {
    "SGD": lambda: optim.SGD(lr=0.5),
    "momentum": lambda: optim.SGD(lr=0.5, momentum=0.75, weight_decay=0.125),
    "Adam": lambda: optim.Adam(lr=0.25, eps=0.5),
    "AdamW": lambda: optim.AdamW(lr=0.25, eps=0.5),
    "RMSProp": lambda: optim.RMSProp(lr=0.25, eps=0.5, momentum=0.5, centered=True),
    "Adagrad": lambda: optim.Adagrad(lr=0.5, eps=0.5),
    "own": lambda: Descent(0.5),
}


class Descent:
    """An optimizer of the program, without a state."""

    def __init__(self, lr: float) -> None:
        self.lr = lr

    def step(self, params: Any, grads: Any) -> None:
        for (_, param), (_, grad) in zip(nest.leaves(params), nest.leaves(grads), strict=True):
            if grad is not None:
                param[...] = param - self.lr * np.asarray(grad, np.result_type(np.asarray(grad).dtype, np.float64))

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclasses.dataclass(frozen=True, repr=False)
class Gradients(array_nests.Plan):
    """The gradients of one micro-step of one rank."""

    seed: int
    samples: int | None = None
    missing: frozenset[int] = frozenset()
    leaves: tuple[array_nests.Leaf, ...] | None = None  # layouts and ties, if not those of contiguous arrays
    form: str = "arrays"  # or "numbers" where 0-d, or "read-only"
    early: tuple[int, ...] = ()  # passed to opt.reduce() before
    fault: str = ""
    place: int = 0  # the leaf of the fault
    own: int | None = None  # the leaf whose gradient is the parameter itself, in its memory

    @property
    def given_samples(self) -> int | None:
        if self.fault == "negative samples":
            return -1
        return (5 if self.samples is None else None) if self.fault == "some samples" else self.samples


@dataclasses.dataclass(frozen=True, repr=False)
class Action(array_nests.Plan):
    """kind: a method of `Oracle` and `Rank`. gradients: by micro-step and rank. number: what the kind needs."""

    kind: str
    gradients: tuple[tuple[Gradients, ...], ...] = ()
    number: int = 0


@dataclasses.dataclass(frozen=True, repr=False)
class Scenario(array_nests.Plan):
    size: int
    tree: array_nests.Tree
    seed: int
    optimizer: str
    options: dict[str, Any]
    scaled: bool
    wide: bool  # float64 gradients of float32 parameters, complex128 of complex64
    function: bool  # a gradient function with a plain optimizer
    early: bool  # gradients are passed to opt.reduce() in some steps
    shares: bool
    check_steps: int  # 0: gradients are sent early in the second step already
    members: tuple[int, ...]
    actions: tuple[Action, ...]


# ---- Scenarios


def scenario(rng: random.Random, size: int) -> Scenario:
    members = tuple(range(size))
    if size > 1 and rng.random() < 0.15:
        members = tuple(sorted(rng.sample(range(size), rng.randint(1, size))))
    function = rng.random() < 0.12
    dtypes = [["f4"], ["f8"], ["f4", "f8"], ["f4", "f2"], ["bf16", "f4"], ["c8"], list(array_nests.DTYPES)]
    tree = array_nests.tree(rng, rng.choice(dtypes), ties=rng.random() < 0.25)
    options = {} if function else _options(rng)
    if rng.random() < 0.2:
        options["compression"] = rng.choice([allred.Compression.fp16, allred.Compression.bf16])
    if rng.random() < 0.3:
        options["bucket_bytes"] = rng.choice([16, 64, 4096])
    wide, options["op"] = rng.random() < 0.1, rng.choice([allred.Average, allred.Average, allred.Sum])
    plan = Scenario(
        size=size,
        tree=tree,
        seed=rng.randrange(2**16),
        optimizer=rng.choice(list(OPTIMIZERS)),
        options=options,
        scaled=not function and options.get("nonfinite") in (None, "skip") and rng.random() < 0.15,
        wide=wide,
        function=function,
        early=rng.random() < 0.3 and "accumulate" not in options and not function and not wide,
        shares=bool(options.get("sharded")) and rng.random() < 0.5,
        check_steps=rng.choice([100, 0]),
        members=members,
        actions=(),
    )
    kinds = ["step"] * 10 + ["broadcast", "state", "save", "restore", "lr"]
    kinds += [] if plan.shares else ["change", "rebind", *["drift"] * bool(plan.check_steps)]
    kinds += ["broadcast"] * 3 if len(members) < size else []
    kinds += ["abandon"] if "accumulate" in options else []
    kinds += ["join"] if len(members) == size and not function else []
    kinds = ["step", "step", "step", "change"] if function else kinds
    if len(set(tree.names)) < len(tree.names):
        kinds = ["step"]
    actions: list[Action] = []
    kinds += ["step"] * 20 * plan.early  # an error, and most of the other actions, end the agreed order
    for _ in range(rng.randint(4, 9) if plan.early else rng.randint(1, 7)):
        action = _action(rng, plan, rng.choice(kinds))
        actions += [Action("broadcast"), action] if action.kind == "join" else [action]  # join() knows its parameters
    return dataclasses.replace(plan, actions=tuple(actions))


def _options(rng: random.Random) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if rng.random() < 0.3:
        options["accumulate"] = rng.randint(2, 3)
    if rng.random() < 0.4:
        options["nonfinite"] = rng.choice(["raise", "skip", "ignore"])
    if rng.random() < 0.2:
        options["clip_norm"] = rng.choice([0.5, 1.0, 100.0, math.inf])
    if rng.random() < 0.25:
        options["sharded"] = True
    return options


def _action(rng: random.Random, plan: Scenario, kind: str) -> Action:
    if kind not in ("step", "join", "drift", "abandon"):
        return Action(kind, number=rng.randrange(2**10))
    micro_steps, ranks = plan.options.get("accumulate", 1), len(plan.members)
    counts = rng.choice(["unknown", "unknown", "equal", "uneven"])
    counts = "unknown" if plan.function or kind != "step" else counts
    missing = rng.random() < 0.3 and kind == "step"
    early = plan.early and rng.random() < 0.7
    grads = [[_gradients(rng, plan, counts, missing, early) for _ in range(ranks)] for _ in range(micro_steps)]
    if kind != "step":  # ranks that have joined do not learn of an error; a difference is the only problem of a drift
        grads = [[Gradients(each.seed) for each in micro] for micro in grads]
    if rng.random() < 0.3 and kind == "step":
        micro, rank, faults = rng.randrange(micro_steps), rng.randrange(ranks), FAULTS
        filled = [index for index, leaf in enumerate(plan.tree.leaves) if math.prod(leaf.shape)]
        place = rng.choice(filled or [0])
        faults = [fault for fault in FAULTS if not (plan.function and fault in _NOT_OF_FUNCTIONS)]
        if plan.early and ranks == 1:  # the agreed order has dtypes too
            faults = [fault for fault in faults if fault not in ("dtype", "complex", "integer")]
        if ranks == 1 and filled and plan.tree.leaves[place].dtype == "f8":  # no error, but clipped in float32
            faults = [fault for fault in faults if fault != "dtype"]
        missing_here = grads[micro][rank].missing - ({place} if rng.random() < 0.8 else set())
        grads[micro][rank] = dataclasses.replace(
            grads[micro][rank], fault=rng.choice(faults), place=place, missing=missing_here
        )
        if counts == "uneven" and grads[micro][rank].fault in ("nan", "inf") and rng.random() < 0.7:
            for each in grads:  # a rank without samples, whose gradients are not used
                each[rank] = dataclasses.replace(each[rank], samples=0)
        plain = micro_steps == 1 and counts == "unknown" and not plan.scaled and "compression" not in plan.options
        if rng.random() < 0.15 and plain and plan.options["op"] is allred.Sum:  # finite gradients, whose sum may not be
            grads = [[Gradients(each.seed, fault="large", place=place) for each in grads[0]]]
    return Action(kind, tuple(map(tuple, grads)), rng.randrange(2**10))


def _gradients(rng: random.Random, plan: Scenario, counts: str, missing: bool, early: bool) -> Gradients:
    leaves, indices = plan.tree.leaves, range(len(plan.tree.leaves))
    layouts = None
    if rng.random() < 0.2 and len(indices) < 10:
        plain = [dataclasses.replace(leaf, layout=rng.choice(array_nests.LAYOUTS[:5]), tie=None) for leaf in leaves]
        layouts = tuple(plain)
        same = [i for i in indices[1:] if leaves[i].shape == leaves[0].shape and leaves[i].dtype == leaves[0].dtype]
        if same and rng.random() < 0.5:
            how = rng.choice(["same", "overlap"]) if len(leaves[0].shape) == 1 else "same"
            layouts = (*plain[: same[0]], dataclasses.replace(plain[same[0]], tie=(how, 0)), *plain[same[0] + 1 :])
    lacks = frozenset(i for i in indices if missing and not plan.function and rng.random() < 0.3)
    names = [i for i in indices if i not in lacks]
    return Gradients(
        seed=rng.randrange(2**16),
        samples={"unknown": None, "equal": 4, "uneven": rng.choice([0, 1, 3, 8])}[counts],
        missing=lacks,
        leaves=layouts,
        form=rng.choice(["arrays"] * 6 + ["read-only"] + ["numbers"] * (not plan.function)) if not early else "arrays",
        early=tuple(rng.sample(names, rng.randint(0, len(names)))) if early else (),
        own=rng.choice(names) if names and not plan.function and rng.random() < 0.05 else None,
    )


# ---- The arrays of a scenario


def start_values(plan: Scenario) -> list[np.ndarray]:
    rng = np.random.default_rng(plan.seed)
    return [array_nests.draw(rng, leaf.shape, array_nests.DTYPES[leaf.dtype]) for leaf in plan.tree.leaves]


def gradient_dtype(plan: Scenario, index: int) -> np.dtype[Any]:
    dtype = array_nests.DTYPES[plan.tree.leaves[index].dtype]
    return {"f4": np.dtype("f8"), "c8": np.dtype("c16")}.get(dtype.str[1:], dtype) if plan.wide else dtype


def gradient_values(plan: Scenario, given: Gradients, scale: float, params: Any = None) -> list[Any]:
    """Return the gradients by leaf: arrays, numbers or None. params: for `Gradients.own`."""
    rng = np.random.default_rng(given.seed)
    values = []
    for index, leaf in enumerate(plan.tree.leaves):
        dtype = gradient_dtype(plan, index)
        value = np.asarray(array_nests.draw(rng, leaf.shape, dtype) * dtype.type(scale))
        if index == given.place and given.fault in ("nan", "inf", "large") and value.size:
            number = 0.75 * float(ml_dtypes.finfo(dtype).max) if given.fault == "large" else float(given.fault)
            parts = [value.real, value.imag] if dtype.kind == "c" else [value]
            parts[given.seed % len(parts)].reshape(-1)[-1:] = number
        values.append(value)
    leaves = given.leaves or tuple(dataclasses.replace(leaf, layout="C", tie=None) for leaf in plan.tree.leaves)
    grads: list[Any] = array_nests.arrays(leaves, values)
    for index, leaf in enumerate(plan.tree.leaves):
        if given.fault and index == given.place:
            grads[index] = _with_fault(grads[index], given.fault)
        elif given.form == "numbers" and not leaf.shape:
            grads[index] = complex(grads[index]) if grads[index].dtype.kind == "c" else float(grads[index])
        elif given.form == "read-only":
            grads[index].flags.writeable = False
    is_own = given.own is not None and params is not None and (not given.fault or given.place != given.own)
    if is_own and params[given.own].dtype == gradient_dtype(plan, given.own):
        grads[given.own] = params[given.own]
    return [None if index in given.missing else grad for index, grad in enumerate(grads)]


def _with_fault(grad: np.ndarray, fault: str) -> Any:
    if fault == "shape":
        return np.ones((*grad.shape, 2), grad.dtype)
    if fault == "complex":
        return grad.astype("c16")
    if fault == "dtype":
        grad = grad.real if grad.dtype.kind == "c" else grad
        return grad.astype("f8" if grad.dtype != np.dtype("f8") else "f4")
    return np.ones(grad.shape, int) if fault == "integer" else grad


# ---- The oracle


class Refused(Exception):  # noqa: N818  (an outcome)
    """All ranks raise one of these errors, and nothing changes."""

    def __init__(self, *kinds: type[AllredError]) -> None:
        self.kinds = kinds


class Oracle:
    """The same scenario in one process."""

    def __init__(self, plan: Scenario) -> None:
        self.plan = plan
        self.optimizer = OPTIMIZERS[plan.optimizer]()
        self.params = array_nests.arrays(plan.tree.leaves, start_values(plan))
        self.scale = 8.0 if plan.scaled else 1.0
        self.step_count = self.skipped = 0
        self.norms: list[float | None] = [None] * len(plan.members)  # in the last step of each rank, before clipping
        self.saved: Any = None

    @property
    def nest(self) -> Any:
        return self.plan.tree.fill(self.params)

    def step(self, action: Action) -> None:
        if len(set(self.plan.tree.names)) < len(self.plan.tree.names):
            raise Refused(InputError)
        self.reduce_and_apply(action.gradients, list(range(len(self.plan.members))))

    def reduce_and_apply(self, gradients: tuple[tuple[Gradients, ...], ...], ranks: list[int]) -> None:
        """Apply the gradients of these ranks. Raises Refused."""
        plan = self.plan
        copies = array_nests.arrays(plan.tree.leaves, [np.array(param) for param in self.params])
        by_rank = [[gradient_values(plan, micro[rank], self.scale, copies) for micro in gradients] for rank in ranks]
        given = [[micro[rank] for micro in gradients] for rank in ranks]
        self._refuse(by_rank, given, copies)
        counts = [sum(g.given_samples or 0 for g in each) for each in given]
        counted = given[0][0].given_samples is not None
        if counted and not sum(counts):
            raise Refused(InputError)
        used = [not counted or bool(count) for count in counts]
        local = [self._local_mean(grads, each) for grads, each in zip(by_rank, given, strict=True)]
        policy = "skip" if plan.scaled else plan.options.get("nonfinite", "raise")
        there = [grad for grads, use in zip(local, used, strict=True) if use for grad in grads if grad is not None]
        if policy != "ignore" and not all(np.isfinite(grad).all() for grad in there):
            return self._nonfinite(policy)
        mean = self._overflow(self._reduce(local, counts if counted else [1] * len(ranks), used))
        if policy != "ignore" and not all(grad is None or np.isfinite(grad).all() for grad in mean):
            return self._nonfinite(policy)
        mean = [None if grad is None else grad / self.scale for grad in mean]
        if (limit := plan.options.get("clip_norm")) is not None:
            norm = float(np.sqrt(sum(float(np.square(grad).sum()) for grad in mean if grad is not None)))
            for rank in ranks:
                self.norms[rank] = norm
            factor = limit / norm if limit < norm < np.inf else 1
            mean = [None if grad is None else grad * factor for grad in mean]
        self._apply(mean)

    def _nonfinite(self, policy: str) -> None:
        if policy == "raise":
            raise Refused(NonFiniteError)
        self.skipped += 1
        self.scale *= 0.5 if self.plan.scaled else 1

    def _overflow(self, mean: list[Any]) -> list[Any]:
        """Return the gradients with infinity where their dtype cannot hold the value."""
        held: list[Any] = []
        for index, grad in enumerate(mean):
            if grad is None:
                held.append(None)
                continue
            there = array_nests.wide(array_nests.narrow(grad, gradient_dtype(self.plan, index)))
            held.append(np.where(np.isfinite(there), grad, there))
        return held

    def _refuse(self, by_rank: list[list[list[Any]]], given: list[list[Gradients]], params: list[Any]) -> None:
        """Raise Refused with all problems; ranks may report any of them. params: as for `gradient_values`."""
        plan, faults, problems = self.plan, {g.fault for each in given for g in each}, set[type[AllredError]]()
        if self._is_present(given, ("shape", "extra")) or "negative samples" in faults:
            problems.add(InputError)
        kinds = [[self._kinds(grads) for grads in each] for each in by_rank]
        expected = [array_nests.DTYPES[leaf.dtype].kind for leaf in plan.tree.leaves]
        if any(k.kind == "c" != e for each in kinds for kind in each for k, e in zip(kind, expected, strict=True)):
            problems.add(InputError)  # a complex gradient of a real parameter
        if len({g.given_samples is None for each in given for g in each}) > 1:
            problems.add(InputError)
        if any(kind != each[0] for each in kinds for kind in each):
            problems.add(InputError)  # micro-steps of a rank differ
        floats_only = len(given[0]) > 1 or plan.scaled or "clip_norm" in plan.options or plan.optimizer != "own"
        averaged = plan.options["op"] is allred.Average and any(
            map(math.prod, (leaf.shape for leaf in plan.tree.leaves))
        )
        if any(np.dtype(int) in each[0] for each in kinds) and (floats_only or averaged):
            problems.add(InputError)
        if any(each[0] != kinds[0][0] for each in kinds):
            problems |= {MismatchError, InputError}  # InputError if opt.reduce() has agreed on dtypes
        for each, grads in zip(given, by_rank, strict=True):
            for one in each[0].early:
                others = [a for i, a in enumerate(grads[0]) if i != one and isinstance(a, np.ndarray)]
                others += [param for i, param in enumerate(params) if i != one]  # a gradient may be a tied parameter
                if any(np.shares_memory(grads[0][one], other) for other in others):
                    problems.add(InputError)
        if problems:
            raise Refused(*problems)

    def _is_present(self, given: list[list[Gradients]], faults: tuple[str, ...]) -> bool:
        """Whether a gradient with such a fault is not None."""
        return any(
            g.fault == "extra" or (g.fault in faults and g.place not in g.missing and self.plan.tree.leaves)
            for each in given for g in each
        )  # fmt: skip

    def _kinds(self, grads: list[Any]) -> list[np.dtype[Any]]:
        """Return the dtypes. None and numbers have the dtype of the parameter."""
        leaves = self.plan.tree.leaves
        return [
            grad.dtype if isinstance(grad, np.ndarray) else array_nests.DTYPES[leaf.dtype]
            for grad, leaf in zip(grads, leaves, strict=True)
        ]

    def _local_mean(self, micro_steps: list[list[Any]], given: list[Gradients]) -> list[Any]:
        """Return the mean of a rank, as `array_nests.wide`; None for a gradient that it lacks."""
        weights = [1 if g.given_samples is None else g.given_samples for g in given]
        means = []
        wide = [self._wide(grads) for grads in micro_steps]
        for grads in zip(*wide, strict=True):
            kept = [
                grad * weight
                for grad, weight in zip(grads, weights, strict=True)
                if grad is not None and (weight or len(given) == 1)
            ]
            if len(given) == 1:
                means.append(grads[0])
            else:
                means.append(sum(kept[1:], kept[0]) / max(sum(weights), 1) if kept else None)
        return means

    def _wide(self, grads: list[Any]) -> list[Any]:
        found = []
        for leaf, grad in zip(self.plan.tree.leaves, grads, strict=True):
            found.append(
                None if grad is None else array_nests.wide(grad, np.dtype("c16") if leaf.dtype == "c8" else None)
            )
        return found

    def _reduce(self, local: list[list[Any]], counts: list[int], used: list[bool]) -> list[Any]:
        is_sum = self.plan.options["op"] is allred.Sum
        weights = [float(use) if is_sum else count for count, use in zip(counts, used, strict=True)]
        reduced = []
        for grads in zip(*local, strict=True):
            present = [
                grad * weight for grad, weight in zip(grads, weights, strict=True) if grad is not None and weight
            ]
            some = next((grad for grad in grads if grad is not None), None)
            total = sum(present[1:], present[0]) if present else some
            if some is not None and not present:
                total = np.zeros_like(some)
            reduced.append(None if some is None else np.asarray(total) / (1 if is_sum else sum(weights)))
        return reduced

    def _apply(self, mean: list[Any]) -> None:
        grads = []
        for index, grad in enumerate(mean):
            dtype = gradient_dtype(self.plan, index)
            dtype = np.dtype("f4") if self.plan.scaled and dtype.itemsize == 2 else dtype  # unscaled in float32
            grads.append(None if grad is None else array_nests.narrow(grad, dtype))
        self.optimizer.step(self.nest, self.plan.tree.fill(grads))
        self.step_count += 1

    # The other actions.

    def broadcast(self, action: Action) -> None: ...
    def abandon(self, action: Action) -> None: ...
    def state(self, action: Action) -> None: ...
    def rebind(self, action: Action) -> None: ...

    def change(self, action: Action) -> None:
        if self.params:
            param = self.params[action.number % len(self.params)]
            param[...] = param * param.dtype.type(0.5)

    def save(self, action: Action) -> None:
        self.saved = copy.deepcopy((self.params, self.optimizer, self.step_count, self.scale))

    def restore(self, action: Action) -> None:
        if self.saved is not None:
            lr = self.optimizer.lr  # a setting, not a state
            params, self.optimizer, self.step_count, self.scale = copy.deepcopy(self.saved)
            self.optimizer.lr = lr
            for param, value in zip(self.params, params, strict=True):
                param[...] = value

    def lr(self, action: Action) -> None:
        self.optimizer.lr = 0.5 / (1 + action.number % 4)

    def drift(self, action: Action) -> None:
        if len(self.plan.members) > 1 and can_drift(self.params):
            raise Refused(DriftError)
        self.step(action)

    def join(self, action: Action) -> None:
        for step in range(3):
            active = [rank for rank in range(self.plan.size) if step < (rank + action.number) % 4]
            if active:
                self.reduce_and_apply(action.gradients, active)


def can_drift(params: list[np.ndarray]) -> bool:
    """Whether a change of a parameter on one rank is found in the next step: the model is small, without NaN."""
    values = np.concatenate([np.zeros(0), *(np.ravel(array_nests.wide(param)) for param in params)])
    return 0 < sum(param.size for param in params) <= 1024 and bool(np.isfinite(values).all())


# ---- A rank


class Rank:
    """The scenario on this rank, with allred."""

    def __init__(self, plan: Scenario, directory: pathlib.Path) -> None:
        self.plan, self.directory = plan, directory
        self.number = plan.members.index(allred.rank())
        here = world.current()
        here.config = dataclasses.replace(here.config, check_steps=plan.check_steps)
        self.params = array_nests.arrays(plan.tree.leaves, start_values(plan))
        self.scaler = allred.GradScaler(8.0) if plan.scaled else None
        everyone = plan.members == tuple(range(plan.size))
        self.set = None if everyone else allred.ProcessSet(plan.members)
        options = plan.options | ({} if everyone else {"process_set": self.set})
        options |= {"scaler": self.scaler} if self.scaler else {}
        self.plain = OPTIMIZERS[plan.optimizer]()
        self.order = random.Random(plan.seed + self.number)
        if plan.function:
            self.averaged = allred.distributed.gradients(lambda grads: (grads,), **options)
            return
        self.opt = allred.distributed(self.plain, **options)
        if plan.shares:
            shared = nest.leaves(self.opt.share(self.nest))
            for index, (_, leaf) in zip(plan.tree.order, shared, strict=True):
                self.params[index] = leaf

    @property
    def nest(self) -> Any:
        return self.plan.tree.fill(self.params, self.order)

    def step(self, action: Action) -> None:
        for micro in action.gradients:
            given = micro[self.number]
            scale = self.scaler.get_scale() if self.scaler else 1.0
            self._micro_step(given, gradient_values(self.plan, given, scale, self.params))

    def _micro_step(self, given: Gradients, grads: list[Any]) -> None:
        tree, samples = self.plan.tree, given.given_samples
        nested = tree.fill(grads, self.order)
        nested = [nested, np.zeros(2)] if given.fault == "extra" else nested
        if self.plan.function:
            (mean,) = self.averaged(nested)
            return self.plain.step(self.nest, mean)
        for index in given.early:
            self.opt.reduce(tree.names[index], grads[index], samples=samples)
        self.opt.step(self.nest, nested, samples=samples)

    def broadcast(self, action: Action) -> None:
        root = self.plan.members[action.number % len(self.plan.members)]
        if allred.rank() != root and not self.plan.shares:
            for param in self.params:
                param[...] = 99
        if allred.rank() != root:
            state = self.plain.state_dict()
            spoiled = [
                value + 9 if isinstance(value, int) else np.full_like(value, 99) for _, value in nest.leaves(state)
            ]
            self.plain.load_state_dict(nest.rebuild(state, spoiled))
            if self.scaler is not None:
                self.scaler.load_state_dict(self.scaler.state_dict() | {"scale": 3.0})
        self.opt.broadcast(self.nest, root)

    def state(self, action: Action) -> None:
        self.opt.load_state_dict(self.opt.state_dict())

    def abandon(self, action: Action) -> None:
        """Load a state in the middle of an accumulation, whose gradients are dropped."""
        given = action.gradients[0][self.number]
        self._micro_step(given, gradient_values(self.plan, given, 1.0))
        self.state(action)

    def save(self, action: Action) -> None:
        self.opt.save(self.directory, self.nest)
        allred.barrier(process_set=self.set)

    def restore(self, action: Action) -> None:
        self.opt.restore(self.directory, self.nest)

    def change(self, action: Action) -> None:
        if self.params:
            param = self.params[action.number % len(self.params)]
            param[...] = param * param.dtype.type(0.5)

    def rebind(self, action: Action) -> None:
        """Replace a parameter by a copy of another layout: another one on each rank, unless the update is sharded."""
        if self.params and not any(leaf.tie for leaf in self.plan.tree.leaves):
            number = action.number + (0 if self.plan.options.get("sharded") else self.number)
            index = action.number % len(self.params)
            self.params[index] = array_nests.laid_out(np.asarray(self.params[index]), array_nests.LAYOUTS[number % 7])

    def lr(self, action: Action) -> None:
        self.opt.optimizer.lr = 0.5 / (1 + action.number % 4)

    def drift(self, action: Action) -> None:
        kept = [np.array(param) for param in self.params]
        filled = [param for param in self.params if param.size]
        odd = action.number % len(self.plan.members)
        if self.number == odd and len(self.plan.members) > 1 and can_drift(self.params):
            odd_param = filled[action.number % len(filled)]
            odd_param.flat[0] += 1j if odd_param.dtype.kind == "c" else 1
        try:
            self.step(action)
        except DriftError:
            if self.number == odd:
                for param, value in zip(self.params, kept, strict=True):
                    param[...] = value
            raise

    def join(self, action: Action) -> None:
        with allred.Join():
            for _ in range((self.number + action.number) % 4):
                self.step(action)


def check(plan: Scenario, directory: pathlib.Path) -> Iterator[tuple[str, str]]:
    """Run a scenario on this rank. Yield the first difference from the oracle, or "", and what must be equal on all
    members (None on others), after each action."""
    if allred.rank() not in plan.members:
        yield from [("", None)] * (1 + len(plan.actions))
        return
    oracle = Oracle(plan)
    try:
        rank = Rank(plan, directory)
    except AllredError as error:
        yield f"{type(error).__name__}: {error}", ""
        return
    yield "", ""
    for number, action in enumerate(plan.actions):
        with np.errstate(all="ignore"):
            problem, text = _act(oracle, rank, action)
        yield problem and f"action {number} ({action.kind}): {problem}", text


def _act(oracle: Oracle, rank: Rank, action: Action) -> tuple[str, str]:
    """Return a difference, and what must be equal on all members: bits, and the text of an error."""
    expected: tuple[type[AllredError], ...] = ()
    before = [np.array(param) for param in rank.params]
    try:
        getattr(oracle, action.kind)(action)
    except Refused as refused:  # before the oracle has changed
        expected = refused.kinds
    raised, text = None, ""
    try:
        getattr(rank, action.kind)(action)
    except AllredError as error:
        raised, text = error, f"{type(error).__name__}: {error}"
    if bool(expected) != bool(raised) or (raised and not isinstance(raised, expected)):
        wanted = " or ".join(kind.__name__ for kind in expected) or "no error"
        return f"expected {wanted}, got {text or 'no error'}", text
    if raised is not None:
        for index, (param, old) in enumerate(zip(rank.params, before, strict=True)):
            if np.asarray(param).tobytes() != old.tobytes():
                return f"a refused action has changed leaf {index}", text
    state = dict(nest.leaves((rank.plain if rank.plan.function else rank.opt).state_dict()))
    bits = array_nests.digest([*rank.params, *state.values()])
    return _difference(oracle, rank, state), f"{text} {bits}"


def _difference(oracle: Oracle, rank: Rank, state: dict[str, Any]) -> str:
    """Return the first difference from the oracle; also after an action that was refused. state: of this rank."""
    plan = oracle.plan
    tolerances = array_nests.tolerances(plan.tree, state, "compression" in plan.options)
    if "clip_norm" in plan.options:  # the norm has the error of all leaves
        tolerances = dict.fromkeys(tolerances, tolerances["all"])
    got: dict[str, Any] = {f"leaf {index}": param for index, param in enumerate(rank.params)} | state
    want: dict[str, Any] = {f"leaf {index}": param for index, param in enumerate(oracle.params)}
    want |= dict(nest.leaves(oracle.optimizer.state_dict()))
    if not plan.function:
        norm, other = rank.opt.grad_norm, oracle.norms[rank.number]
        scale = rank.scaler.get_scale() if rank.scaler else 1.0
        got |= {"step": rank.opt.global_step, "skipped": rank.opt.skipped, "scale": scale}
        want |= {"step": oracle.step_count, "skipped": oracle.skipped, "scale": oracle.scale}
        got |= {"grad_norm": norm or 0.0, "has grad_norm": norm is not None}
        want |= {"grad_norm": other or 0.0, "has grad_norm": other is not None}
        tolerances["grad_norm"] = tolerances["all"]
    return array_nests.first_difference(got, want, tolerances)
