"""`bench torch --against horovod`: allred.torch, the drop-in for horovod.torch, in the same processes, interleaved.

mlp       a training step with allred.distributed(torch_optimizer), the baseline, and with DistributedOptimizer of
          allred.torch, and of Horovod if it is installed
averages  the means of 1000 tensors of 64 bytes: an all_reduce of torch's backend gloo and a division for each, the
          baseline; and with each interface: allreduce_ for each tensor; allreduce_async_ for each, then synchronize;
          one grouped_allreduce_
"""

import copy
import dataclasses
import functools
import gc
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import allred
import allred.torch as allred_torch
from allred.bench import measure, verify

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
    for turn in range(len(models)):
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


def average_by_gloo(tensors: list[Any], gloo: Any) -> None:
    """Replace each tensor by its mean over the ranks."""
    for tensor in tensors:
        dist.all_reduce(tensor, group=gloo)
        tensor.div_(dist.get_world_size(gloo))


def average_calls(modules: dict[str, Any], tensors: list[Any], gloo: Any) -> Calls:
    """Return the calls that replace tensors by their mean over the ranks."""

    def each(module: Any) -> None:
        for tensor in tensors:
            module.allreduce_(tensor)

    def each_async(module: Any) -> None:
        for handle in [module.allreduce_async_(tensor) for tensor in tensors]:
            module.synchronize(handle)

    calls: Calls = {"gloo per tensor": functools.partial(average_by_gloo, tensors, gloo)}
    for name, module in modules.items():
        calls[f"{name} per tensor"] = functools.partial(each, module)
        calls[f"{name} async"] = functools.partial(each_async, module)
        calls[f"{name} grouped"] = functools.partial(module.grouped_allreduce_, tensors)
    return calls


def measure_averages(calls: Calls, tensors: list[Any], seconds: float, comm: Any) -> dict[str, measure.CallTimes]:
    """Check that each call replaces the tensors by their mean over the ranks, and time them."""
    size = comm.Get_size()
    for title, call in calls.items():
        for index, tensor in enumerate(tensors):
            tensor.fill_(index + comm.Get_rank())
        call()
        wrong = [i for i, tensor in enumerate(tensors) if not bool((tensor == i + (size - 1) / 2).all())]
        verify.raise_if_any(f"torch: averages by {title}", f"tensors {wrong[:5]}" if wrong else "", comm)
    for tensor in tensors:
        tensor.zero_()
    return measure.interleave(calls, comm, seconds)


def measure_all(
    batches: list[int],
    make: Callable[[], Any],
    data: Callable[[int], tuple[Any, Any]],
    seconds: float,
    comm: Any,
    gloo: Any,
) -> Iterator[tuple[Record, dict[str, measure.CallTimes], str]]:
    """Yield the labels of each line, its times, and the name of its baseline."""
    modules = interfaces()
    for batch in batches:
        times = measure_steps(modules, make, data(batch), seconds, comm)
        yield {"set": "mlp", "batch": batch}, times, "allred.distributed"
    tensors = [torch.zeros(16) for _ in range(TENSORS)]
    calls = average_calls(modules, tensors, gloo)
    yield {"set": "averages", "tensors": TENSORS}, measure_averages(calls, tensors, seconds, comm), "gloo per tensor"
