"""The training of hvd.py: hvd.DistributedOptimizer in the scenarios of hooked.py, with its oracle and comparisons.

What differs from allred.distributed: `synchronize` and the checks of `zero_grad`; reductions of the program; gradients
that all ranks lack are zeros in a step; joined ranks count in averages; gradients that are not finite are passed on.
"""

import contextlib
import dataclasses
import pathlib
import random
from collections.abc import Iterator
from typing import Any

import hooked
import hooked_scenarios
import torch
from hooked_oracle import Oracle, RankState, Refused
from hooked_scenarios import Action, Pass, Scenario
from torch_modules import wide

import allred.torch as hvd
from allred.errors import MismatchError

EXTREME = ("Min", "Max", "Product")


class Halves:
    """A compressor of the program, without loss for the small differences that the model allows."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor.double() / 2, tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return (tensor * 2).to(ctx)


def scenario(rng: random.Random, size: int) -> Scenario:
    """A scenario of hooked.py without what Horovod's interface lacks."""
    plan = hooked_scenarios.scenario(rng, size)
    is_plain = plan.optimizer == "LBFGS" or plan.scaler == "torch"
    options: dict[str, Any] = {key: value for key, value in plan.options.items() if key == "accumulate"}
    how = rng.choice(["", "", "", "Sum", "fp16", "own", "predivide", "Min", "Max", "Product", "dense"])
    how = how if not is_plain or how in ("", "predivide") else ""
    how = "" if how in (*EXTREME, "own") and "sparse" in plan.kinds else how
    options |= {"how": how, "nonfinite": "ignore"}
    options["op"] = getattr(hvd, how) if how in ("Sum", *EXTREME) else hvd.Average
    options |= {"compression": how} if how == "fp16" else {}
    kinds = tuple("linear" if kind == "complex" and how not in ("", "Sum") else kind for kind in plan.kinds)
    plan = dataclasses.replace(
        plan,
        kinds=kinds,
        named="module" if plan.named == "equal" else plan.named,
        scaler=plan.scaler if plan.scaler == "torch" else "",
        options=options,
    )
    actions = [_action(plan, action) for action in plan.actions if size > 1 or action.kind not in ("save", "restore")]
    return dataclasses.replace(plan, actions=tuple(actions))


def _action(plan: Scenario, action: Action) -> Action:
    """Without samples and no_sync(). number % 2: whether a step calls synchronize()."""
    passes = tuple(tuple(_pass(one) for one in row) for row in action.passes)
    return dataclasses.replace(action, passes=passes, unscale=action.unscale and bool(action.number % 2))


def _pass(one: Pass) -> Pass:
    return dataclasses.replace(one, how="none" if one.how == "local" else one.how, samples=None)


def synchronizes(plan: Scenario, action: Action) -> bool:
    """Whether a step calls synchronize(), and step() in skip_synchronize()."""
    return action.steps and not action.closure and (bool(action.number % 2) or plan.scaler == "torch")


def uses_horovod(plan: Scenario, action: Action) -> bool:
    """Whether the functions of Horovod broadcast, which are for all ranks. join() needs those of allred: number 0."""
    return len(plan.members) == plan.size and plan.optimizer != "LBFGS" and bool(action.number)


class HorovodOracle(Oracle):
    def __init__(self, plan: Scenario) -> None:
        super().__init__(plan)
        self.how = plan.options["how"]
        self.is_reduced = plan.size > 1
        self.once, self.in_closure = self.is_reduced and plan.options["op"] is not hvd.Average, False

    def run(self, action: Action, rank: RankState, passes: list[Pass]) -> Iterator[int | None]:
        if not synchronizes(self.plan, action):
            yield from super().run(action, rank, passes)
            return
        yield from super().run(dataclasses.replace(action, factor=1.0, clip=None, unscale=False), rank, passes)
        self.fill(rank)
        self.change_gradients(rank, action)

    def fill(self, rank: RankState) -> None:
        """A gradient that all ranks lack becomes zeros."""
        for index, parameter in enumerate(self.params):
            if self.is_reduced and parameter.requires_grad and rank.grads[index] is None:
                rank.grads[index] = torch.zeros_like(wide(parameter))

    def reduce(self, ranks: list[RankState], samples: list[Any]) -> None:
        given, marks = [list(rank.grads) for rank in ranks], [self.marks(rank) for rank in ranks]
        kept = [self.once and any(each) for each in zip(*marks, strict=True)]
        super().reduce(ranks, samples)
        for index, grads in enumerate(zip(*given, strict=True)):
            if kept[index]:
                continue
            found = ranks[0].grads[index]
            if self.how in EXTREME and found is not None:
                stacked = torch.stack([torch.zeros_like(found) if grad is None else grad for grad in grads])
                found = {"Min": stacked.amin, "Max": stacked.amax, "Product": stacked.prod}[self.how](0)
            elif found is not None and self.how != "Sum":  # some ranks may have joined
                found = found * (len(ranks) / len(self.ranks))
            for rank in ranks:
                rank.grads[index] = found

    def apply(self, ranks: list[RankState]) -> None:
        if not self.in_closure:
            for rank in ranks:
                self.fill(rank)
        super().apply(ranks)

    def step(self, action: Action, members: list[int] | None = None) -> None:
        self.in_closure = action.closure
        super().step(action, members)

    def drift(self, action: Action) -> None:
        try:
            super().drift(action)
        except Refused:
            raise Refused(MismatchError) from None

    def forget(self) -> None:
        super().forget()
        for rank in self.ranks:
            rank.restart()

    def broadcast(self, action: Action) -> None:
        if uses_horovod(self.plan, action):
            self.forget()

    def state(self, action: Action) -> None:
        self.zero_all(True)
        self.forget()

    def restore(self, action: Action) -> None:
        self.state(action)
        super().restore(action)


class HorovodRank(hooked.Rank):
    """The scenario on this rank, with DistributedOptimizer."""

    def __init__(self, plan: Scenario, directory: pathlib.Path, process_set: Any) -> None:
        self.process_set = process_set
        super().__init__(plan, directory)

    def distribute(self) -> None:
        plan, how = self.plan, self.plan.options["how"]
        options: dict[str, Any] = {"op": plan.options["op"], "process_set": self.process_set}
        options |= {"backward_passes_per_step": plan.options.get("accumulate", 1)}
        options |= {"fp16": {"compression": hvd.Compression.fp16}, "own": {"compression": Halves}}.get(how, {})
        options |= {"predivide": {"gradient_predivide_factor": 4.0}, "dense": {"sparse_as_dense": True}}.get(how, {})
        options |= {"groups": 2} if plan.seed % 3 == 0 else {}
        options |= {"named_parameters": self.net.named_parameters()} if plan.named else {}
        hvd.DistributedOptimizer(self.opt, **options)

    @contextlib.contextmanager
    def synchronized(self, action: Action) -> Iterator[None]:
        if not synchronizes(self.plan, action):
            yield
            return
        self.opt.synchronize()
        with self.opt.skip_synchronize():
            yield

    def broadcast(self, action: Action) -> None:
        if self.opt.allred is None:
            return
        if not uses_horovod(self.plan, action):
            super().broadcast(action)
            return
        self.spoil(root := action.number % self.plan.size)
        forms = self.net.state_dict(), list(self.net.named_parameters()), list(self.net.parameters())
        hvd.broadcast_parameters(forms[action.number % 3], root_rank=root)
        hvd.broadcast_optimizer_state(self.opt, root_rank=root)

    def state(self, action: Action) -> None:
        self.zero_grad()
        super().state(action if self.opt.allred is not None else dataclasses.replace(action, number=0))

    def restore(self, action: Action) -> None:
        self.zero_grad()
        super().restore(action)

    def join(self, action: Action) -> None:
        for _ in range((self.number + action.number) % 4):
            self.step(action)
        hvd.join()
        self.zero_grad()

    @property
    def counters(self) -> dict[str, Any]:
        return {} if self.opt.allred is None else super().counters


def check(
    plan: Scenario, directory: pathlib.Path, sets: dict[tuple[int, ...], Any]
) -> Iterator[tuple[str, str | None]]:
    def rank(*arguments: Any) -> HorovodRank:
        return HorovodRank(*arguments, sets[plan.members])

    return hooked.check(plan, directory, HorovodOracle, rank)
