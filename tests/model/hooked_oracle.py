"""The expected results of hooked.py: all ranks in one process, with the torch optimizer without hooks.

`Oracle` follows docs/torch-optimizer.md: a pass outside of no_sync() ends with a reduction, and so does a step of a
rank whose gradients are not reduced. A reduction is collective: `Oracle` runs each rank as a
generator up to its next reduction, then combines the gradients of all ranks in double precision.
"""

import copy
import math
from collections.abc import Iterator
from typing import Any

import torch
from hooked_scenarios import Action, Pass, Scenario, change, freeze, set_lr, torch_optimizer
from torch_modules import Net, local_gradients, wide

import allred
from allred.errors import AllredError, DriftError, InputError, MismatchError, NonFiniteError


class Refused(Exception):  # noqa: N818  (an outcome)
    """All ranks raise one of these errors, and nothing changes."""

    def __init__(self, *kinds: type[AllredError]) -> None:
        self.kinds = kinds


class OutOfPhase(Refused):
    """Some ranks reduce once more than others. root: one of them, which does not update."""

    def __init__(self, root: int) -> None:
        super().__init__(AllredError)
        self.root = root


class Unsupported(Exception):  # noqa: N818
    """The scenario ends here: `Oracle` does not know the result."""


class RankState:
    """What a rank has between its actions. grads: by parameter, in double precision, or None."""

    def __init__(self, count: int) -> None:
        self.grads: list[Any] = [None] * count
        self.marks = [""] * count  # "reduced", "mixed": with op=Sum or a scaler of allred
        self.norm: float | None = None  # with clip_norm, of the last step
        self.restart()

    def restart(self) -> None:
        self.reduced, self.micro = False, []

    def zero(self, to_none: bool) -> None:
        for index, grad in enumerate(self.grads):
            self.grads[index] = None if to_none or grad is None else torch.zeros_like(grad)
        self.marks = [""] * len(self.grads)


class Oracle:
    def __init__(self, plan: Scenario) -> None:
        self.plan = plan
        self.net = Net(plan.kinds, plan.dtype, plan.seed)
        self.params = list(self.net.parameters())
        self.opt = torch_optimizer(plan, self.net)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.opt, 0.5) if plan.schedule else None
        self.torch_scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if plan.scaler == "torch" else None
        self.own_scale = 8.0 if plan.scaler == "allred" else 1.0
        self.steps = self.skipped = 0
        self.ended = self.diverges = False
        self.is_skipped = self.gradients_are_undefined = False
        self.once = plan.options.get("op") is allred.Sum or plan.scaler == "allred"  # gradients are reduced once
        self.ranks = [RankState(len(self.params)) for _ in plan.members]
        self.saved: Any = None

    @property
    def scale(self) -> float:
        return self.own_scale if self.torch_scaler is None else self.torch_scaler.get_scale()

    def act(self, action: Action) -> None:
        if self.ended:
            raise Unsupported("after an error whose effect on a rank is not known")
        if self.diverges:
            raise Unsupported("LBFGS diverges, which amplifies the errors of rounding")
        try:
            getattr(self, action.kind)(action)
        except Refused:  # the program calls zero_grad() then
            self.zero_all(True)
            for rank in self.ranks:
                rank.restart()
            self.is_skipped = False
            if self.torch_scaler is not None:
                self.torch_scaler = torch.amp.GradScaler("cpu", init_scale=self.scale)
                self.ended |= self.plan.variant == "fused"  # torch leaves its scale in the optimizer
            raise

    # A step.

    def step(self, action: Action, members: list[int] | None = None) -> None:
        members = list(range(len(self.ranks))) if members is None else members
        ranks = [self.ranks[member] for member in members]
        if action.zero_first:
            self.zero_all(action.zero_first == "none")
        if action.frozen_by >= 0 and self.params[0].requires_grad and any(action.passes):
            raise Refused(MismatchError, InputError)
        if action.closure and self.plan.optimizer == "LBFGS":
            self.opt.step(lambda: self.closure(action.passes[0]))
            self.steps += 1
            self.diverges = any(each.numel() and each.detach().abs().max() > 100 for each in self.params)
            return
        runs = [self.run(action, self.ranks[member], [row[member] for row in action.passes]) for member in members]
        while True:
            requests = [next(run, "end") for run in runs]
            if all(request == "end" for request in requests):
                break
            if any(request == "end" for request in requests):
                if not any(each.requires_grad and each.numel() for each in self.params):
                    raise Unsupported("ranks out of phase whose parameters have no elements: nothing differs")
                # Then some ranks skip a step before the error. Gradients of a skipped step may still be there.
                faults = any(one.loss.fault for row in action.passes for one in row)
                self.ended = faults or self.gradients_are_undefined
                raise OutOfPhase(next(m for m, request in zip(members, requests, strict=True) if request != "end"))
            self.reduce(ranks, requests)
        if action.steps:
            self.apply(ranks)

    def run(self, action: Action, rank: RankState, passes: list[Pass]) -> Iterator[int | None]:
        """The passes of a rank up to its update. Yields its samples at each reduction."""
        if action.closure:
            self.gradients_are_undefined = False
            rank.zero(True)
        for one in passes:
            yield from self.one_pass(rank, one)
        self.change_gradients(rank, action)
        if action.steps and not (rank.reduced and not rank.micro and any(grad is not None for grad in rank.grads)):
            samples = passes[-1].samples if passes else None
            if rank.micro:
                samples = total(rank.micro)
            yield samples

    def change_gradients(self, rank: RankState, action: Action) -> None:
        """What the program does with them before step()."""
        scale = self.torch_scaler.get_scale() if action.unscale else 1.0
        for index, grad in enumerate(rank.grads):
            if grad is not None:
                rank.grads[index] = grad * (action.factor / scale)
                if action.factor != 1 and action.new_grads:
                    rank.marks[index] = ""
        if action.clip is not None:
            clip(rank.grads, action.clip)
        self.unscaled = action.unscale

    def one_pass(self, rank: RankState, one: Pass) -> Iterator[int | None]:
        if one.how == "none":
            return
        _, found = local_gradients(self.net, self.params, one.loss, self.scale)
        if all(grad is None for grad in found):
            return
        for index, grad in enumerate(found):
            if grad is not None:
                old = rank.grads[index]
                self.marks(rank)
                rank.marks[index] = "mixed" if rank.marks[index] else ""
                rank.grads[index] = grad if old is None else old + grad
        if one.how == "local":
            rank.reduced = False
            return
        count = self.plan.options.get("accumulate", 1)
        if count > 1:
            rank.micro.append(one.samples)
            if len(rank.micro) < count:
                return
        yield total(rank.micro) if rank.micro else one.samples

    def reduce(self, ranks: list[RankState], samples: list[Any]) -> None:
        marks = [self.marks(rank) for rank in ranks]
        counted = [count is not None for count in samples]
        if any(count is not None and count < 0 for count in samples) or len(set(counted)) > 1:
            raise Refused(InputError)
        if counted[0] and not sum(samples):
            raise Refused(InputError)
        if self.once and any("mixed" in each for each in marks):
            raise Refused(InputError)
        is_sum = self.plan.options.get("op") is allred.Sum
        weights = [1.0 if count is None or (is_sum and count) else float(count) for count in samples]
        given = [any(rank.grads[index] is not None for rank in ranks) for index in range(len(self.params))]
        trained = [index for index, parameter in enumerate(self.params) if parameter.requires_grad or given[index]]
        for index in trained:
            if not self.params[index].requires_grad and any(rank.grads[index] is None for rank in ranks):
                raise Refused(MismatchError)
        trained = [index for index in trained if not any(self.once and each[index] for each in marks)]
        used = [rank.grads[index] for rank, w in zip(ranks, weights, strict=True) if w for index in trained]
        policy = self.plan.options.get("nonfinite", "skip" if self.plan.scaler == "allred" else "raise")
        if policy != "ignore" and not all(grad is None or grad.isfinite().all() for grad in used):
            if policy == "raise":
                raise Refused(NonFiniteError)
            self.skipped += not self.is_skipped
            self.own_scale *= 0.5 if self.plan.scaler == "allred" and not self.is_skipped else 1
            self.is_skipped = self.gradients_are_undefined = True
        elif self.gradients_are_undefined:
            raise Unsupported("some gradients of a skipped step are reduced, others are not")
        else:
            self.is_skipped = False
            for index in trained:
                mean = combine([rank.grads[index] for rank in ranks], weights, is_sum)
                for rank in ranks:
                    rank.grads[index] = None if mean is None else mean / self.own_scale
                    rank.marks[index] = "reduced"
        for rank in ranks:
            rank.reduced, rank.micro = True, []

    def marks(self, rank: RankState) -> list[str]:
        """The marks; a gradient of zeros, or none, has no mark."""
        pairs = zip(rank.marks, rank.grads, strict=True)
        rank.marks = [mark if grad is not None and grad.count_nonzero() else "" for mark, grad in pairs]
        return rank.marks

    def apply(self, ranks: list[RankState]) -> None:
        skipped, self.is_skipped = self.is_skipped, False
        for rank in self.ranks:
            rank.restart()
        if skipped:
            return
        grads = ranks[0].grads
        for rank in ranks[1:]:
            for one, two in zip(grads, rank.grads, strict=True):
                if (one is None) != (two is None) or not (
                    one is None or torch.equal(one.nan_to_num(), two.nan_to_num())
                ):
                    raise Refused(InputError)
        if (limit := self.plan.options.get("clip_norm")) is not None:
            factor = 1.0 if self.torch_scaler is None or self.unscaled else self.torch_scaler.get_scale()
            norm = clip(grads, limit * factor, finite_only=True) / factor
            if math.isfinite(norm) or self.torch_scaler is None or self.plan.variant == "fused":  # torch calls step()
                for rank in ranks:
                    rank.norm = norm
        self.assign(grads)
        try:
            self.update(grads)
        except TypeError as error:
            if self.plan.variant == "fused" and self.plan.optimizer in ("momentum", "nesterov"):
                raise Unsupported("torch refuses a fused update with momentum of some parameters only") from error
            raise
        for rank in ranks:  # some updates of torch change gradients
            rank.grads = [None if parameter.grad is None else wide(parameter.grad) for parameter in self.params]

    def update(self, grads: list[Any]) -> None:
        if self.torch_scaler is None:
            self.opt.step()
            self.steps += 1
            return
        self.torch_scaler.scale(torch.ones(()))
        if self.unscaled:
            self.assign([grad if grad is None else grad * self.torch_scaler.get_scale() for grad in grads])
            self.torch_scaler.unscale_(self.opt)
            finite = all(grad is None or grad.isfinite().all() for grad in grads)
            self.assign(grads)
        else:
            finite = all(grad is None or grad.isfinite().all() for grad in grads)
        self.torch_scaler.step(self.opt)
        self.torch_scaler.update()
        self.steps += finite or self.plan.variant == "fused"  # torch calls step() of fused optimizers, which skip it

    def assign(self, grads: list[Any]) -> None:
        for parameter, grad in zip(self.params, grads, strict=True):
            parameter.grad = None if grad is None else torch.empty_like(parameter.detach()).copy_(grad)

    def closure(self, passes: tuple[Pass, ...]) -> torch.Tensor:
        for rank in self.ranks:
            rank.zero(True)
        found = [local_gradients(self.net, self.params, one.loss, 1.0) for one in passes]
        for rank, (_, grads) in zip(self.ranks, found, strict=True):
            rank.grads = grads
        samples = [one.samples for one in passes]
        self.reduce(self.ranks, samples)
        grads = self.ranks[0].grads
        if (limit := self.plan.options.get("clip_norm")) is not None:
            norm = clip(grads, limit, finite_only=True)
            for rank in self.ranks:
                rank.norm = norm
        self.assign(grads)
        counts = [1 if count is None else count for count in samples]
        mean = sum(loss * count for (loss, _), count in zip(found, counts, strict=True) if count) / sum(counts)
        return torch.tensor(mean, dtype=torch.float64)

    # The other actions.

    def broadcast(self, action: Action) -> None: ...
    def copies(self, action: Action) -> None: ...

    def state(self, action: Action) -> None:
        self.forget()

    def forget(self) -> None:
        """Gradients of an incomplete step of several passes are dropped."""
        for rank in self.ranks:
            if rank.micro:
                rank.zero(True)
                rank.restart()
                self.is_skipped = False

    def save(self, action: Action) -> None:
        values = [parameter.detach().clone() for parameter in self.params]
        self.saved = values, copy.deepcopy(self.opt.state_dict()), self.steps, self.own_scale

    def restore(self, action: Action) -> None:
        self.forget()
        if self.saved is None:
            return
        values, state, self.steps, self.own_scale = self.saved
        with torch.no_grad():
            for parameter, value in zip(self.params, values, strict=True):
                parameter.copy_(value)
        self.opt.load_state_dict(copy.deepcopy(state))

    def change(self, action: Action) -> None:
        change(self.params, action.number)

    def freeze(self, action: Action) -> None:
        freeze(self.params, action.number)

    def zero(self, action: Action) -> None:
        self.zero_all(bool(action.number % 2))

    def zero_all(self, to_none: bool) -> None:
        self.gradients_are_undefined = False
        for rank in self.ranks:
            rank.zero(to_none)

    def lr(self, action: Action) -> None:
        set_lr(self.opt, self.scheduler, action.number)

    def drift(self, action: Action) -> None:
        changed = self.params[action.number % len(self.params)]
        if not all(each.isfinite().all() for each in self.params):
            raise Unsupported("drift of parameters that are not finite")
        if len(self.ranks) > 1 and changed.numel() and changed.requires_grad:
            raise Refused(DriftError)
        self.step(action)

    def join(self, action: Action) -> None:
        for number in range(3):
            active = [rank for rank in range(len(self.ranks)) if number < (rank + action.number) % 4]
            if active:
                self.step(action, active)
        self.zero_all(True)


def total(counts: list[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def combine(grads: list[Any], weights: list[float], is_sum: bool) -> Any:
    if all(grad is None for grad in grads):
        return None
    parts = [grad * weight for grad, weight in zip(grads, weights, strict=True) if grad is not None and weight]
    some = next(grad for grad in grads if grad is not None)
    return sum(parts, torch.zeros_like(some)) / (1 if is_sum else sum(weights))


def clip(grads: list[Any], limit: float, finite_only: bool = False) -> float:
    """Scale gradients in place. Return the norm before."""
    norm = (
        torch.stack([grad.abs().square().sum() for grad in grads if grad is not None] or [torch.zeros(())]).sum().sqrt()
    )
    if finite_only and (not norm.isfinite() or norm <= limit):
        return float(norm)
    factor = (limit / (norm + (0 if finite_only else 1e-6))).clamp(max=1.0)
    grads[:] = [None if grad is None else grad * factor for grad in grads]
    return float(norm)
