"""benchmarks/bench.py horovod: allred.torch, the drop-in for horovod.torch, in the same processes, interleaved.

mlp       a training step with allred.distributed(torch_optimizer), the baseline, and with DistributedOptimizer of
          allred.torch, and of Horovod if it is installed
averages  the means of 1000 tensors of 64 bytes: an all_reduce of torch's backend gloo and a division for each, the
          baseline; and with each interface: allreduce_ for each tensor; allreduce_async_ for each, then synchronize;
          one grouped_allreduce_
"""

import argparse
import copy
import dataclasses
import functools
import gc
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

import allred
import allred.torch as allred_torch
from allred.bench import measure, verify
from allred.bench import torch as bench

TENSORS = 1000
_FIRST_STEPS = 3
_TOLERANCE = 1e-4  # of the largest parameter
Record = dict[str, Any]
Calls = dict[str, Callable[[], object]]


def interfaces() -> dict[str, Any]:
    """Return the modules with Horovod's interface, by name: that of allred, and Horovod if it is installed."""
    found = {"allred.torch": allred_torch}
    if importlib.util.find_spec("horovod") is not None:
        horovod = importlib.import_module("horovod.torch")
        if horovod.init is not allred_torch.init:  # it is not that of allred.compat.horovod
            found["horovod"] = horovod
    for each in found.values():
        each.init()
    return found


def measure_steps(
    modules: dict[str, Any], make: Callable[[], Any], data: tuple[Any, Any], seconds: float, comm: Any
) -> dict[str, measure.CallTimes]:
    """Time a training step with each interface. Every interface is timed with every copy of the model, because its
    place in memory changes times by several percent."""
    torch.manual_seed(0)
    models = [make()]
    models += [copy.deepcopy(models[0]) for _ in modules]
    found: dict[str, measure.CallTimes] = {}
    start = copy.deepcopy(models[0].state_dict())
    for turn in range(len(models)):
        for model in models:  # after many steps the parameters differ by rounding
            model.load_state_dict(start)
        calls = _step_calls(modules, [*models[turn:], *models[:turn]], data)
        _verify(models, comm)
        for name, times in measure.interleave(calls, comm, seconds / len(models)).items():
            before = found[name].seconds if name in found else np.empty(0)
            found[name] = dataclasses.replace(times, seconds=np.concatenate([before, times.seconds]))
        del calls
        gc.collect()  # the hooks of the optimizers
    return found


def _verify(models: list[Any], comm: Any) -> None:
    """Compare the parameters of the models, which have made the same steps, on all ranks."""
    vectors = [torch.cat([each.detach().reshape(-1) for each in model.parameters()]) for model in models]
    off = max(float((each - vectors[0]).abs().max()) for each in vectors)
    problem = f"the parameters differ by {off:g}" if off > _TOLERANCE * float(vectors[0].abs().max()) else ""
    verify.raise_if_any("torch: steps with each interface", problem, comm)


def _step_calls(modules: dict[str, Any], models: list[Any], data: tuple[Any, Any]) -> Calls:
    """Return a training step for each interface."""

    def step(model: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(data[0]), data[1]).backward()
        optimizer.step()

    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    wrapped = [allred.distributed(optimizers[0], nonfinite="ignore")]
    wrapped += [
        module.DistributedOptimizer(each) for module, each in zip(modules.values(), optimizers[1:], strict=True)
    ]
    names = ["allred.distributed", *(f"{name} DistributedOptimizer" for name in modules)]
    calls: Calls = {
        name: functools.partial(step, model, optimizer)
        for name, model, optimizer in zip(names, models, wrapped, strict=True)
    }
    for _ in range(_FIRST_STEPS):
        for call in calls.values():
            call()
    return calls


def average_calls(modules: dict[str, Any], tensors: list[Any], gloo: Any) -> Calls:
    """Return the calls that replace tensors by their mean over the ranks."""

    def each(module: Any) -> None:
        for tensor in tensors:
            module.allreduce_(tensor)

    def each_async(module: Any) -> None:
        for handle in [module.allreduce_async_(tensor) for tensor in tensors]:
            module.synchronize(handle)

    calls: Calls = {"gloo per tensor": functools.partial(bench.average_by_gloo, tensors, gloo)}
    for name, module in modules.items():
        calls[f"{name} per tensor"] = functools.partial(each, module)
        calls[f"{name} async"] = functools.partial(each_async, module)
        calls[f"{name} grouped"] = functools.partial(module.grouped_allreduce_, tensors)
    return calls


def run(options: argparse.Namespace, comm: Any, conditions: Record) -> None:
    """Measure; rank 0 prints. Calls allred.shutdown()."""
    bench.run(options, comm, conditions, _measure)


def _measure(options: argparse.Namespace, comm: Any, gloo: Any) -> Iterator[Record]:
    modules = interfaces()
    generator = torch.Generator().manual_seed(comm.Get_rank())
    for batch in options.batches:
        x = torch.randn(batch, options.width, generator=generator)
        data = x, torch.randint(bench.CLASSES, (batch,), generator=generator)
        times = measure_steps(modules, functools.partial(bench.mlp, options.width), data, options.seconds, comm)
        yield {"set": "mlp", "batch": batch, **bench.compare(times, "allred.distributed")}
    tensors = [torch.zeros(16) for _ in range(TENSORS)]
    times = bench.measure_averages(average_calls(modules, tensors, gloo), tensors, options.seconds, comm)
    yield {"set": "averages", "tensors": TENSORS, **bench.compare(times, "gloo per tensor")}
