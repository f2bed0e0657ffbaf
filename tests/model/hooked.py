"""Scenarios of hooked torch optimizers: passes and steps, states, changes by the program. hooked_oracle.py has the
expected results: the torch optimizer without hooks, on gradients combined in double precision.

After each action a rank compares parameters, state and counters with the oracle, and yields what must be equal on all
ranks: bits of parameters and state, texts of errors.
"""

import collections
import contextlib
import copy
import dataclasses
import pathlib
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import torch
from hooked_oracle import Oracle, OutOfPhase, Refused, Unsupported
from hooked_scenarios import Action, Pass, Scenario, change, freeze, set_lr, torch_optimizer
from hooked_scenarios import scenario as scenario
from torch_modules import Loss, Net, wide

import allred
from allred import nest, world
from allred.errors import AllredError

torch.set_num_threads(1)

ENDED_EARLY = collections.Counter[str]()  # scenarios by the reason for which they ended before their last action


class Rank:
    """The scenario on this rank, with allred."""

    def __init__(self, plan: Scenario, directory: pathlib.Path) -> None:
        self.plan, self.directory = plan, directory
        self.number = plan.members.index(allred.rank())
        config = world.current().config
        world.current().config = dataclasses.replace(config, overlap=plan.overlap, check_steps=plan.check_steps)
        self.net = Net(plan.kinds, plan.dtype, plan.seed)
        self.params = list(self.net.parameters())
        for part in self.net.parts if plan.compiled else ():
            if hasattr(part, "one"):
                part.one.compile(backend="aot_eager")
        self.scaler = allred.GradScaler(8.0) if plan.scaler == "allred" else None
        self.torch_scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if plan.scaler == "torch" else None
        self.set = None if plan.members == tuple(range(plan.size)) else allred.ProcessSet(plan.members)
        self.opt = torch_optimizer(plan, self.net)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.opt, 0.5) if plan.schedule else None
        self.distribute()

    def distribute(self) -> None:
        options = self.plan.options | ({} if self.set is None else {"process_set": self.set})
        allred.distributed(self.opt, **options | ({"scaler": self.scaler} if self.scaler else {}))

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.opt.zero_grad(set_to_none=set_to_none)

    def synchronized(self, action: Action) -> contextlib.AbstractContextManager[None]:
        """Around what a step does after its backward passes."""
        return contextlib.nullcontext()

    @property
    def counters(self) -> dict[str, Any]:
        own = self.opt.allred
        return {"global_step": own.global_step, "skipped": own.skipped, "grad_norm": own.grad_norm}

    def scale(self, loss: torch.Tensor) -> Any:
        scaler = self.scaler or self.torch_scaler
        return loss if scaler is None else scaler.scale(loss)

    def backward(self, one: Pass) -> torch.Tensor:
        if self.opt.allred is not None:  # hvd with one rank
            self.opt.allred.samples = one.samples
        loss = self.net.loss(one.loss)
        if loss.requires_grad and one.how != "none":
            with self.opt.allred.no_sync() if one.how == "local" else contextlib.nullcontext():
                self.scale(loss).backward()
        return loss

    def step(self, action: Action) -> None:
        frozen = action.frozen_by == self.number and self.params[0].requires_grad
        if action.zero_first:
            self.zero_grad(set_to_none=action.zero_first == "none")
        if frozen:
            self.params[0].requires_grad_(False)
        try:
            self._passes_and_step(action)
        finally:
            if frozen:
                self.params[0].requires_grad_(True)

    def _passes_and_step(self, action: Action) -> None:
        passes = [each[self.number] for each in action.passes]
        if action.closure:
            self.opt.step(lambda: self.closure(passes[0]))
            return
        for one in passes:
            self.backward(one)
        with self.synchronized(action):
            self._change_and_step(action, passes[-1].samples if passes else None)

    def _change_and_step(self, action: Action, samples: int | None) -> None:
        if action.unscale:
            self.torch_scaler.unscale_(self.opt)
        for parameter in self.params:
            if action.factor != 1 and parameter.grad is not None:
                grad = parameter.grad
                parameter.grad = grad * action.factor if action.new_grads else grad.mul_(action.factor)
        if action.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.params, action.clip)
        if action.steps and self.opt.allred is not None:
            self.opt.allred.samples = samples
        if action.steps and self.torch_scaler is not None:
            self.torch_scaler.step(self.opt)
            self.torch_scaler.update()
        elif action.steps:
            self.opt.step()

    def closure(self, one: Pass) -> torch.Tensor:
        self.opt.zero_grad()
        return self.backward(one).detach()

    def step_until_error(self, action: Action) -> None:
        """Steps until an error: the ranks are out of phase. Only some of them have an error so far."""
        every = tuple(range(len(self.plan.kinds)))
        for number in range(8):
            self.backward(Pass(Loss(number, every), samples=action.passes[0][self.number].samples))
            self.opt.step()

    def recover(self, root: int) -> None:
        self.opt.allred.broadcast(None, root=self.plan.members[root])
        self.zero_grad()

    def broadcast(self, action: Action) -> None:
        root = self.plan.members[action.number % len(self.plan.members)]
        self.spoil(root)
        self.opt.allred.broadcast(self.net if action.number % 2 else None, root)

    def spoil(self, root: int) -> None:
        """Change parameters and learning rates on the other ranks."""
        if allred.rank() != root:
            with torch.no_grad():
                for parameter in self.params:
                    parameter.fill_(99)
            self.spoil_state()
            for group in self.opt.param_groups:
                group["lr"] = group["lr"].mul_(2) if isinstance(group["lr"], torch.Tensor) else group["lr"] * 2

    def spoil_state(self) -> None:
        """Change the state of torch, which a broadcast has to replace."""
        with torch.no_grad():
            for state in self.opt.state.values():
                for value in state.values():
                    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                        value.add_(9)

    def state(self, action: Action) -> None:
        which = self.opt.allred if action.number % 2 else self.opt
        which.load_state_dict(copy.deepcopy(which.state_dict()))

    def save(self, action: Action) -> None:
        self.opt.allred.save(self.directory, self.net if self.plan.seed % 2 else None)
        allred.barrier(process_set=self.set)

    def restore(self, action: Action) -> None:
        self.opt.allred.restore(self.directory, self.net if self.plan.seed % 2 else None)

    def change(self, action: Action) -> None:
        change(self.params, action.number)

    def freeze(self, action: Action) -> None:
        freeze(self.params, action.number)

    def zero(self, action: Action) -> None:
        self.zero_grad(set_to_none=bool(action.number % 2))

    def copies(self, action: Action) -> None:
        for copied in (copy.copy, copy.deepcopy, pickle.dumps):
            try:
                copied(self.opt)
            except TypeError:
                continue
            raise AssertionError(f"{copied} has copied the optimizer")

    def lr(self, action: Action) -> None:
        set_lr(self.opt, self.scheduler, action.number)

    def drift(self, action: Action) -> None:
        odd, parameter = action.number % len(self.plan.members), self.params[action.number % len(self.params)]
        before, drifts = parameter.detach().clone(), len(self.plan.members) > 1 and parameter.requires_grad
        if self.number == odd and drifts:
            with torch.no_grad():
                parameter.add_(1)
        try:
            self.step(action)
        finally:
            if self.number == odd and drifts and parameter.numel():
                with torch.no_grad():
                    parameter.copy_(before)

    def join(self, action: Action) -> None:
        with allred.Join():
            for _ in range((self.number + action.number) % 4):
                self.step(action)
        self.zero_grad()


def check(
    plan: Scenario, directory: pathlib.Path, make_oracle: type[Oracle] = Oracle, make_rank: Callable[..., Rank] = Rank
) -> Iterator[tuple[str, str | None]]:
    if allred.rank() not in plan.members:
        yield from [("", None)] * (1 + len(plan.actions))
        return
    oracle, rank = make_oracle(plan), make_rank(plan, directory)
    yield "", ""
    for number, action in enumerate(plan.actions):
        try:
            problem, text = _act(oracle, rank, action)
        except Unsupported as reason:
            ENDED_EARLY[str(reason)] += 1
            yield from [("", "")] * (len(plan.actions) - number)
            return
        values = [_numbers(each) for each in (*rank.params, *_states(rank.opt).values())]
        digest = nest.digest([value.nan_to_num().contiguous().numpy() for value in values])
        yield problem and f"action {number} ({action.kind}): {problem}", f"{text} {digest}"


def _act(oracle: Oracle, rank: Rank, action: Action) -> tuple[str, str]:
    """Return a difference, and the text of an error."""
    expected: tuple[type[AllredError], ...] = ()
    root, text, raised, before = None, "", None, _copies(rank)
    try:
        oracle.act(action)
    except OutOfPhase as found:
        root, expected = found.root, found.kinds
    except Refused as refused:
        expected = refused.kinds
    try:
        getattr(rank, action.kind)(action)
        if root is not None:
            rank.step_until_error(action)
    except AllredError as error:
        raised, text = error, f"{type(error).__name__}: {error}"
    if bool(expected) != bool(raised) or (raised and not isinstance(raised, expected)):
        wanted = " or ".join(kind.__name__ for kind in expected) or "no error"
        return f"expected {wanted}, got {text or 'no error'}", text
    if root is not None:
        rank.recover(root)
        if oracle.ended:  # some ranks may have skipped a step
            return "", text
    elif raised is not None:
        rank.zero_grad()
        if rank.torch_scaler is not None:
            rank.torch_scaler = torch.amp.GradScaler("cpu", init_scale=rank.torch_scaler.get_scale())
        after = _copies(rank)
        changed = [name for name, old in before.items() if not torch.equal(after[name].nan_to_num(), old.nan_to_num())]
        if changed:
            return f"a refused action has changed {changed}", text
    return _difference(oracle, rank), text


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    tensor = wide(tensor)
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _states(opt: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return the tensors and numbers of the state, by parameter and name. LBFGS: none; it keeps many."""
    found = {}
    for index, state in opt.state_dict()["state"].items():
        for key, value in state.items():
            if isinstance(value, (torch.Tensor, int, float)) and not isinstance(opt, torch.optim.LBFGS):
                found[f"{index} {key}"] = torch.as_tensor(value)
    for number, group in enumerate(opt.param_groups):
        found[f"group {number} lr"] = torch.as_tensor(group["lr"], dtype=torch.float64)
    return found


def _copies(rank: Rank) -> dict[str, torch.Tensor]:
    values = {f"parameter {index}": parameter for index, parameter in enumerate(rank.params)} | _states(rank.opt)
    return {name: _numbers(value).clone() for name, value in values.items()}


def _largest(tensors: list[Any]) -> float:
    """Return the largest finite magnitude, at least 1."""
    return max([1.0, *(float(wide(each).abs().nan_to_num(0, 0, 0).max()) for each in tensors if each.numel())])


def _difference(oracle: Oracle, rank: Rank) -> str:
    plan = oracle.plan
    rough = "compression" in plan.options
    tolerance = 8e-2 if rough else {"bfloat16": 0.2, "float32": 5e-5, "float64": 1e-9}[plan.dtype]
    tolerance = 1e-6 if plan.optimizer == "LBFGS" else tolerance  # it divides by small differences
    largest = _largest(oracle.params) if plan.dtype == "bfloat16" or plan.optimizer == "LBFGS" else 1.0
    pairs: dict[str, tuple[Any, Any]] = {
        f"parameter {index}": pair for index, pair in enumerate(zip(rank.params, oracle.params, strict=True))
    }
    ours, theirs = _states(rank.opt), _states(oracle.opt)
    if ours.keys() != theirs.keys():
        return f"the state has {sorted(ours)}, expected {sorted(theirs)}"
    pairs |= {f"state {name}": (value, theirs[name]) for name, value in ours.items()}
    expected = {"global_step": oracle.steps, "skipped": oracle.skipped, "grad_norm": oracle.ranks[rank.number].norm}
    for name, value in rank.counters.items():
        if (value is None) != (expected[name] is None):
            return f"{name} is {value}, expected {expected[name]}"
        pairs[name] = value or 0, expected[name] or 0
    if plan.scaler:
        scaler = rank.scaler or rank.torch_scaler
        pairs["scale"] = scaler.get_scale(), oracle.scale
    for name, (got, want) in pairs.items():
        got, want = _numbers(torch.as_tensor(got)), _numbers(torch.as_tensor(want))
        size = max(largest, _largest([want]))  # numbers may cancel each other, and later steps amplify their errors
        if not torch.allclose(got, want, tolerance, tolerance * size, equal_nan=True):
            return f"{name} is {got.tolist()}, expected {want.tolist()}"
    for index, parameter in enumerate(rank.params):
        grad = parameter.grad
        if grad is not None and not grad.is_sparse and grad.numel() and grad.stride() != parameter.stride():
            return f"the gradient of parameter {index} has the strides {grad.stride()}, not {parameter.stride()}"
    return ""
