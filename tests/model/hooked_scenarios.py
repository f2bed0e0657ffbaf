"""The scenarios of hooked.py, and the torch optimizer of a scenario."""

import dataclasses
import math
import random
from typing import Any

import array_nests
import torch
from torch_modules import KINDS, Loss, Net

import allred

OPTIMIZERS: dict[str, Any] = {
    "SGD": (torch.optim.SGD, {"weight_decay": 0.125}),
    "momentum": (torch.optim.SGD, {"momentum": 0.75}),
    "nesterov": (torch.optim.SGD, {"momentum": 0.5, "nesterov": True}),
    "Adam": (torch.optim.Adam, {"eps": 0.5}),
    "AdamW": (torch.optim.AdamW, {"eps": 0.5, "amsgrad": True}),
    "RMSprop": (torch.optim.RMSprop, {"eps": 0.5, "momentum": 0.5}),
    "Adagrad": (torch.optim.Adagrad, {"eps": 0.5}),
    "LBFGS": (torch.optim.LBFGS, {"max_iter": 3}),
}
_FUSED = ("SGD", "momentum", "nesterov", "Adam", "AdamW", "Adagrad")


@dataclasses.dataclass(frozen=True, repr=False)
class Pass(array_nests.Plan):
    """A backward pass of one rank. how: "sync", "local" (in no_sync()) or "none" (it makes no pass)."""

    loss: Loss
    how: str = "sync"
    samples: int | None = None


@dataclasses.dataclass(frozen=True, repr=False)
class Action(array_nests.Plan):
    """kind: a method of `Oracle` and `Rank`. passes: by pass and rank. number: what the kind needs."""

    kind: str
    passes: tuple[tuple[Pass, ...], ...] = ()
    number: int = 0
    zero_first: str = ""  # zero_grad before: "none" or "zeros"
    factor: float = 1.0  # the program multiplies the gradients before step()
    new_grads: bool = False  # by assigning new tensors
    unscale: bool = False  # by torch's GradScaler
    clip: float | None = None  # torch's clip_grad_norm_
    steps: bool = True  # whether step() is called
    closure: bool = False
    frozen_by: int = -1  # the rank that freezes parameter 0 alone


@dataclasses.dataclass(frozen=True, repr=False)
class Scenario(array_nests.Plan):
    size: int
    members: tuple[int, ...]
    kinds: tuple[str, ...]  # of the parts of the model
    dtype: str
    seed: int
    optimizer: str
    variant: str  # "", "foreach", "fused"
    groups: int
    named: str  # "": no names; "module"; "equal": all have one name
    tensor_lr: bool
    schedule: bool
    options: dict[str, Any]
    scaler: str  # "", "torch", "allred"
    overlap: str
    check_steps: int
    compiled: bool  # the layers, by torch.compile
    actions: tuple[Action, ...]


def torch_optimizer(plan: Scenario, net: Net) -> torch.optim.Optimizer:
    kind, options = OPTIMIZERS[plan.optimizer]
    options = options | ({plan.variant: True} if plan.variant else {})
    options |= {"foreach": False} if plan.tensor_lr and not plan.variant else {}
    if "sparse" in plan.kinds:
        options = {key: value for key, value in options.items() if key not in ("weight_decay", "nesterov")}
    given: list[Any] = list(net.named_parameters())
    given = {"": [each for _, each in given], "equal": [("w", each) for _, each in given]}.get(plan.named, given)
    cut = len(given) // 2 if plan.groups == 2 else 0
    rates = [torch.tensor(0.1) if plan.tensor_lr else 0.1 for _ in range(2)]
    groups = [
        {"params": part, "lr": rate} for part, rate in zip([given[:cut], given[cut:]], rates, strict=True) if part
    ]
    return kind(groups, **options)


def scenario(rng: random.Random, size: int) -> Scenario:
    members = tuple(range(size))
    if size > 1 and rng.random() < 0.15:
        members = tuple(sorted(rng.sample(range(size), rng.randint(1, size))))
    optimizer = rng.choice(list(OPTIMIZERS))
    is_lbfgs = optimizer == "LBFGS"
    dtype = "float64" if is_lbfgs else rng.choice(["float32"] * 4 + ["float64"] * 2 + ["bfloat16"])
    variant = rng.choice(["", "", "foreach", "fused"])
    allowed = {"foreach": not is_lbfgs, "fused": optimizer in _FUSED and dtype != "bfloat16"}
    variant = variant if allowed.get(variant, True) else ""
    kinds = list(KINDS)
    kinds += ["sparse", "sparse"] if optimizer in ("SGD", "momentum", "Adagrad") and not variant else []
    kinds += ["complex"] if optimizer in ("SGD", "momentum", "Adam") and variant != "fused" else []
    if is_lbfgs:  # it makes views of gradients as vectors
        kinds = ["linear", "tied", "embedding", "scalar", "norm", "checkpoint"]
    chosen = tuple(rng.choice(kinds) for _ in range(rng.randint(1, 4)))
    scaler = rng.choice(["", "", "", "", "torch", "allred"]) if not is_lbfgs and dtype != "bfloat16" else ""
    if variant == "fused" and optimizer in ("momentum", "nesterov") and scaler == "torch":
        scaler = ""  # a first update that is skipped leaves the buffers of torch without values
    scaler = "" if "complex" in chosen or ("sparse" in chosen and scaler) else scaler
    options: dict[str, Any] = {}
    if rng.random() < 0.25 and not is_lbfgs:
        options["accumulate"] = rng.randint(2, 3)
    if scaler == "torch":
        options["nonfinite"] = "ignore"
    elif rng.random() < 0.4 and not is_lbfgs:
        options["nonfinite"] = rng.choice(["raise", "skip", "ignore"] if not scaler else ["skip"])
    if rng.random() < 0.2:
        options["clip_norm"] = rng.choice([0.5, 1.0, 100.0, math.inf])
    if rng.random() < 0.15 and not is_lbfgs:
        options["compression"] = allred.Compression.fp16  # rounding to bf16 is amplified by some of these networks
    if rng.random() < 0.2:
        options["op"] = allred.Sum
    tensor_lr = rng.random() < 0.15 and variant != "foreach" and not is_lbfgs
    plan = Scenario(
        size=size,
        members=members,
        kinds=chosen,
        dtype=dtype,
        seed=rng.randrange(2**16),
        optimizer=optimizer,
        variant=variant,
        groups=1 if is_lbfgs else rng.randint(1, 2),
        named=rng.choice(["", "module", "equal"]),
        tensor_lr=tensor_lr,
        schedule=rng.random() < 0.2 and not tensor_lr,
        options=options,
        scaler=scaler,
        overlap=rng.choice(["never", "always"]),
        check_steps=rng.choice([100, 0]),
        compiled=rng.random() < 0.02 and dtype != "bfloat16" and not is_lbfgs,  # it rounds elsewhere
        actions=(),
    )
    kinds = ["step"] * 12 + [
        "broadcast",
        "state",
        "save",
        "restore",
        "change",
        "freeze",
        "zero",
        "copies",
        "lr",
    ]
    kinds += ["drift"] * bool(plan.check_steps)
    if members == tuple(range(size)) and not is_lbfgs and scaler != "torch":
        kinds += ["join"]
    if (
        "sparse" in chosen or is_lbfgs or scaler == "torch"
    ):  # torch divides gradients by the scale before step() may reduce them
        kinds.remove("freeze")
    actions: list[Action] = []
    if "sparse" in chosen:  # the ranks agree in the first step
        every = tuple(range(len(chosen)))
        actions = [Action("step", (tuple(Pass(Loss(rank, every)) for rank in members),), zero_first="none")]
    for _ in range(rng.randint(1, 4 if dtype == "bfloat16" else 8)):  # each step amplifies the error of rounding
        action = _action(rng, plan, rng.choice(kinds))
        if action.kind == "join":  # no unfinished step: its error would leave ranks that have joined waiting
            actions += [Action("zero"), Action("state"), Action("broadcast")]
        actions += [action]
    return dataclasses.replace(plan, actions=tuple(actions))


def _action(rng: random.Random, plan: Scenario, kind: str) -> Action:
    number, ranks, is_lbfgs = rng.randrange(2**10), len(plan.members), plan.optimizer == "LBFGS"
    if kind not in ("step", "join", "drift"):
        return Action(kind, number=number)
    every, count = tuple(range(len(plan.kinds))), plan.options.get("accumulate", 1)
    if kind != "step" or is_lbfgs:
        seeds = [[rng.randrange(2**10) for _ in range(ranks)] for _ in range(count)]
        passes = tuple(tuple(Pass(Loss(seed, every)) for seed in row) for row in seeds)
        if is_lbfgs and kind == "step":
            samples = rng.choice([None, [rng.choice([0, 1, 3, 8]) for _ in range(ranks)]])
            passes = (tuple(dataclasses.replace(p, samples=samples and samples[i]) for i, p in enumerate(passes[0])),)
        return Action(kind, passes, number, zero_first="none", closure=is_lbfgs)
    clip = rng.choice([0.5, 100.0]) if rng.random() < 0.2 and "sparse" not in plan.kinds else None  # torch refuses it
    steps = plan.scaler == "torch" or rng.random() < 0.9
    passes = _passes(rng, plan, count if plan.scaler == "torch" else rng.choice([count] * 3 + [1, 2, 3]))
    if steps and count == len(passes) == 1 and not plan.scaler and rng.random() < 0.1:
        return Action(kind, passes, number, closure=True)
    if ranks > 1 and plan.scaler != "torch" and rng.random() < 0.04:
        plain = tuple(tuple(Pass(Loss(rng.randrange(2**10), every)) for _ in range(ranks)) for _ in range(count))
        return Action(kind, plain, number, zero_first="none", frozen_by=rng.randrange(ranks))
    return Action(
        kind,
        passes,
        number,
        zero_first=rng.choice(["none", "none", "zeros", ""]) if plan.scaler != "torch" else "none",
        factor=rng.choice([0.5, 2.0]) if rng.random() < 0.15 else 1.0,
        new_grads=rng.random() < 0.5 and steps,
        unscale=plan.scaler == "torch" and rng.random() < 0.5,
        clip=clip,
        steps=steps,
    )


def _passes(rng: random.Random, plan: Scenario, count: int) -> tuple[tuple[Pass, ...], ...]:
    ranks, parts = len(plan.members), len(plan.kinds)
    uneven = rng.choice(["unknown", "unknown", "uneven", "equal"])
    odd = rng.random() < 0.25 and plan.scaler != "torch"  # passes that some ranks lack, or make in no_sync()
    passes = []
    for _ in range(count):
        how = "local" if rng.random() < 0.2 and plan.scaler != "torch" else "sync"
        row = []
        for _ in range(ranks):
            used = tuple(i for i in range(parts) if rng.random() < 0.8) or (rng.randrange(parts),)
            mine = rng.choice(["sync", "local", "none", how, how]) if odd else how
            samples = {"unknown": None, "equal": 4, "uneven": rng.choice([0, 1, 3, 8])}[uneven]
            row.append(Pass(Loss(rng.randrange(2**10), used), mine, samples))
        passes.append(row)
    if rng.random() < 0.25:
        row, rank = rng.randrange(count), rng.randrange(ranks)
        one = passes[row][rank]
        fault = rng.choice(["samples", "negative"] + ["nan", "inf", "nan"] * ("complex" not in plan.kinds))
        loss = dataclasses.replace(one.loss, fault=fault, place=rng.randrange(len(one.loss.parts)))
        change: dict[str, Any] = {"loss": loss} if fault in ("nan", "inf") else {"samples": -1}
        if fault == "samples":
            change = {"samples": 5 if one.samples is None else None}
        passes[row][rank] = dataclasses.replace(one, **change)
    return tuple(map(tuple, passes))


# Changes by the program, on all ranks and in the oracle.


def change(params: list[Any], number: int) -> None:
    with torch.no_grad():
        params[number % len(params)].mul_(0.5)


def freeze(params: list[Any], number: int) -> None:
    """Freeze a parameter, or all but one, or unfreeze all."""
    for index, parameter in enumerate(params):
        frozen = {0: index == number // 4 % len(params), 1: index != number // 4 % len(params)}.get(number % 4, False)
        parameter.requires_grad_(not frozen)


def set_lr(opt: torch.optim.Optimizer, scheduler: Any, number: int) -> None:
    if scheduler is not None:
        scheduler.step()
        return
    for group in opt.param_groups:
        rate = 0.1 / (1 + number % 3)
        group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], torch.Tensor) else rate
