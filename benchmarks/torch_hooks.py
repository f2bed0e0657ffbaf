"""benchmarks/bench.py hooks: hooked optimizers of torch without a model.

host     a step with 161 tensors of 64 bytes: with hooks and without
sleep    a backward pass that sleeps, so that its core is free. The columns and the share are those of overlap.py:
         after: gradients are sent at the end of the pass; early: during it
"""

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

import allred
from allred.bench import measure, output, verify
from allred.bench import torch as bench

HOST_TENSORS = 161
_FIRST_STEPS = 4  # the first ones are never sent early


class _NoStep(torch.optim.Optimizer):
    """An optimizer that leaves the parameters unchanged."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.0})

    def step(self, closure: Any = None) -> None:
        pass


class _Gradients(torch.autograd.Function):
    """A function of parameters of one shape; its backward pass makes a gradient for each."""

    @staticmethod
    def forward(ctx: Any, *parameters: Any) -> Any:
        ctx.like, ctx.count, ctx.value = parameters[0], len(parameters), 1.0 + allred.rank()
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, outer: Any) -> Any:
        return tuple(torch.full_like(ctx.like, ctx.value) for _ in range(ctx.count))


def run(options: argparse.Namespace, comm: Any, conditions: dict[str, Any]) -> None:
    """Measure; rank 0 prints. Calls allred.shutdown()."""
    bench.run(options, comm, conditions, _measure)


def _measure(options: argparse.Namespace, comm: Any, gloo: Any) -> Iterator[dict[str, Any]]:
    yield {"set": "host", **measure_host(options.seconds, comm)}
    yield {"set": "sleep", **measure_sleep([(options.width, options.width)] * bench.LAYERS, options.seconds, comm)}


def measure_host(seconds: float, comm: Any) -> dict[str, Any]:
    """Time a step of many small tensors with and without hooks."""
    groups = [[nn.Parameter(torch.zeros(16)) for _ in range(HOST_TENSORS)] for _ in range(2)]
    local, hooked = map(_NoStep, groups)
    allred.distributed(hooked, name="host")

    def step(parameters: list[nn.Parameter], optimizer: Any) -> None:
        optimizer.zero_grad()
        _Gradients.apply(*parameters).backward()
        optimizer.step()

    calls = {"local": lambda: step(groups[0], local), "hooked": lambda: step(groups[1], hooked)}
    times = measure.interleave(calls, comm, seconds)
    added_us = times["hooked"].us(50) - times["local"].us(50)
    return {
        "tensors": HOST_TENSORS,
        **{f"{name}_us": output.rounded(each.us(50)) for name, each in times.items()},
        "added_us": output.rounded(added_us),
        "samples": len(times["hooked"].seconds),
    }


class _Layer(torch.autograd.Function):
    """A layer whose backward pass sleeps; the gradient of its weight is `grad`, without a copy."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, grad: Any, sleep: Callable[[], None]) -> Any:
        ctx.grad, ctx.sleep = grad, sleep
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, outer: Any) -> Any:
        ctx.sleep()
        return outer, ctx.grad.view_as(ctx.grad), None, None


class _SleepingModel:
    """A model whose backward pass sleeps. A sleep that took too long shortens the following ones."""

    def __init__(self, shapes: list[tuple[int, ...]], rank: int) -> None:
        self.weights = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
        self.grads, self.rank = [torch.empty(shape) for shape in shapes], rank
        self.layer_s = self.end = 0.0

    def fill_gradients(self) -> None:
        for grad in self.grads:
            grad.fill_(self.rank)

    def sleep(self) -> None:
        self.end += self.layer_s
        if (left := self.end - time.perf_counter()) > 0:
            time.sleep(left)

    def step(self, weights: list[nn.Parameter], optimizer: Any, backward_s: float, early: bool = False) -> None:
        if hasattr(optimizer, "allred"):
            bench.set_overlap(optimizer, early, lambda: self.step(weights, optimizer, 0.0, early))
        optimizer.zero_grad()
        x = torch.zeros(())
        for weight, grad in zip(weights, self.grads, strict=True):
            x = _Layer.apply(x, weight, grad, self.sleep)
        self.layer_s, self.end = backward_s / len(weights), time.perf_counter()
        x.backward()
        optimizer.step()


def measure_sleep(shapes: list[tuple[int, ...]], seconds: float, comm: Any) -> dict[str, Any]:
    """Time steps whose backward pass sleeps for as long as the communication of its gradients takes alone."""
    size, model = comm.Get_size(), _SleepingModel(shapes, comm.Get_rank())
    plain = [nn.Parameter(weight.detach()) for weight in model.weights]
    hooked, local = allred.distributed(_NoStep(model.weights), name="sleep"), _NoStep(plain)
    for _ in range(_FIRST_STEPS):
        model.fill_gradients()
        model.step(model.weights, hooked, 0.0, early=True)
    wrong = [i for i, grad in enumerate(model.grads) if not bool((grad == (size - 1) / 2).all())]
    verify.raise_if_any("torch: gradients sent early", f"weights {wrong}" if wrong else "", comm)
    alone = measure.interleave({"": lambda: model.step(model.weights, hooked, 0.0)}, comm, seconds / 2)[""]
    backward_s = float(np.median(alone.seconds))
    calls = {
        "compute": lambda: model.step(plain, local, backward_s),
        "after": lambda: model.step(model.weights, hooked, backward_s),
        "early": lambda: model.step(model.weights, hooked, backward_s, early=True),
    }
    times = {name: each.seconds for name, each in measure.interleave(calls, comm, seconds).items()}
    medians = {name: float(np.median(each)) for name, each in times.items()}
    can_be_hidden = min(medians["compute"], backward_s)
    hidden = times["after"] - times["early"]
    return {
        **{f"{name}_us": output.rounded(value * 1e6) for name, value in medians.items()},
        "communicate_us": output.rounded(backward_s * 1e6),
        "share": output.rounded((medians["after"] - medians["early"]) / can_be_hidden),
        "share_q25": output.rounded(float(np.percentile(hidden, 25)) / can_be_hidden),
        "samples": len(hidden),
    }
