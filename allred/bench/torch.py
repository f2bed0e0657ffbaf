"""`bench torch`: training steps of torch on the CPU, against DistributedDataParallel (DDP) over gloo.

A step is zero_grad, forward, backward and SGD. All variants run in the same processes, interleaved:

    ddp gloo, ddp allred        DDP over torch's backend gloo, the baseline, and over the backend allred
    hooked late, hooked early   allred.distributed(torch_optimizer): gradients are sent in one group at the end of the
                                backward pass, or in buckets during it; `auto` says which way allred would choose
    ddp in place, hooked in place
                                with ALLRED_TORCH_ARENA=1: `ddp allred` and `hooked late` with buckets and gradients in
                                memory that all ranks map, which the other variants do not use
    local                       the step without communication: the limit

Lines: `mlp`, six Linear with ReLU, at several batch sizes; `resnet`, a ResNet-20 on images of 32 pixels; `grouped`, the
mean of the gradients of a model as tensors: one grouped_allreduce_ of allred against an all_reduce of gloo and a
division for each tensor.

A speedup is the ratio of two samples of the same round; the median and the lower quartile of the ratios are shown. Set
OMP_NUM_THREADS=1. All variants of a model must have the same parameters after the first steps, on all ranks.
"""

import argparse
import contextlib
import copy
import functools
import gc
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import allred
from allred import arena, world
from allred.bench import measure, output, verify
from allred.comm import functions
from allred.torch.tensors import as_array
from allred.wording import count

LAYERS = 6
CLASSES = 10
_VERIFIED_STEPS = 4
_FIRST_STEPS = 4  # the first ones, also after a change, are never sent early
_TOLERANCE = 1e-3  # of the largest change of a parameter
Record = dict[str, Any]
Data = tuple[Any, Any]  # inputs and classes of a batch
MeasureLines = Callable[[argparse.Namespace, Any, Any], Iterator[Record]]  # options, comm, the group of gloo


def run(options: argparse.Namespace, comm: Any, conditions: Record, measure_lines: MeasureLines | None = None) -> None:
    """Measure; rank 0 prints. Calls allred.shutdown(). measure_lines: yields the records of another benchmark."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1").split(",")[0]))
    dist.init_process_group("allred")
    gloo = dist.new_group(backend="gloo")
    labels = {"ranks": comm.Get_size(), "backend": functions.current().name, "torch": torch.__version__}
    labels["threads_of_torch"] = torch.get_num_threads()
    writer = output.ResultWriter(options.json, enabled=comm.Get_rank() == 0)
    writer.text(f"torch {labels['torch']}: {count(labels['ranks'], 'rank')}, backend {labels['backend']}")
    writer.text("\n".join(output.condition_lines(conditions)))
    for result in (measure_lines or _measure)(options, comm, gloo):
        writer.result({"bench": "torch", **result, **labels, **conditions}, _row(result))
        gc.collect()  # a hooked optimizer is part of a cycle of references; several of them send nothing early
    dist.destroy_process_group()
    comm.Free()
    allred.shutdown()


def _measure(options: argparse.Namespace, comm: Any, gloo: Any) -> Iterator[Record]:
    generator, width, seconds = torch.Generator().manual_seed(comm.Get_rank()), options.width, options.seconds

    def data(*shape: int) -> Data:
        return torch.randn(*shape, generator=generator), torch.randint(CLASSES, shape[:1], generator=generator)

    variants = _variants(functools.partial(mlp, width), gloo)
    for batch in options.batches:
        yield {"set": "mlp", "batch": batch, **_measure_model(variants, data(batch, width), seconds, comm)}
    del variants
    gc.collect()
    batch = options.batches[len(options.batches) // 2]
    images = data(batch, 3, 32, 32)
    yield {"set": "resnet", "batch": batch, **_measure_model(_variants(_resnet, gloo), images, seconds, comm)}
    yield {"set": "grouped", **_measure_grouped(options.tensors, seconds, comm, gloo)}


def compare(times: dict[str, measure.CallTimes], baseline: str) -> Record:
    """Return the medians, and the speedups over the baseline: the median and the lower quartile."""
    ratios = {name: times[baseline].seconds / each.seconds for name, each in times.items() if name != baseline}
    return {
        "against": baseline,
        "p50_us": {name: output.rounded(each.us(50)) for name, each in times.items()},
        "speedup": {name: output.rounded(float(np.median(each))) for name, each in ratios.items()},
        "speedup_q25": {name: output.rounded(float(np.percentile(each, 25))) for name, each in ratios.items()},
        "samples": len(times[baseline].seconds),
    }


def _row(result: Record) -> str:
    """Describe a record in one line."""
    label = " ".join(str(result[key]) for key in ("set", "batch", "tensors") if key in result)
    words = [f"{name} {output.number(us / 1e3)} ms" for name, us in result.get("p50_us", {}).items()]
    for name, speedup in result.get("speedup", {}).items():
        words.append(f"{name} {speedup:.2f}x (lower quartile {result['speedup_q25'][name]:.2f})")
    words += [
        f"{key[:-3]} {output.number(result[key])} us" for key in result if key.endswith("_us") and key != "p50_us"
    ]
    words += [f"{key} {result[key]}" for key in ("share", "share_q25", "auto") if key in result]
    return f"{label:>16}  {', '.join(words)}"


# Models.


def mlp(width: int) -> nn.Module:
    layers = [part for _ in range(LAYERS - 1) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, max(width, CLASSES)))


class _Block(nn.Module):
    """A basic block of a ResNet."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        first, second = nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.body = nn.Sequential(first, nn.BatchNorm2d(out), nn.ReLU(), second, nn.BatchNorm2d(out))
        smaller = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        self.shortcut = nn.Identity() if channels == out else smaller

    def forward(self, x: Any) -> Any:
        return torch.relu(self.body(x) + self.shortcut(x))


def _resnet() -> nn.Module:
    """Return a ResNet-20: three stages of three blocks."""
    sizes = [(16, 16, 1), (16, 16, 1), (16, 16, 1), (16, 32, 2), (32, 32, 1), (32, 32, 1), (32, 64, 2), (64, 64, 1)]
    blocks = [_Block(*size) for size in [*sizes, (64, 64, 1)]]
    stem = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES))


class _Variant(NamedTuple):
    model: nn.Module
    optimizer: Any
    early: bool | None = None  # of a hooked optimizer: whether gradients are sent during the backward pass
    in_place: bool = False  # whether gradients may lie in the arena

    def step(self, data: Data) -> None:
        if self.early is not None:
            set_overlap(self.optimizer, self.early, lambda: self.step(data))
        with contextlib.nullcontext() if self.in_place else arena.paused():
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(data[0]), data[1]).backward()
        self.optimizer.step()


Variants = dict[str, _Variant]


def set_overlap(optimizer: Any, overlaps: bool, step: Callable[[], None]) -> None:
    """Set whether the steps of a hooked optimizer send gradients during the backward pass. If this is a change, take
    steps until they do: the first step of a turn is not measured (measure.interleave). Called on all ranks."""
    if optimizer.allred.set_overlap(overlaps):
        for _ in range(_FIRST_STEPS if overlaps else 0):
            step()


def _variants(make: Callable[[], nn.Module], gloo: Any) -> Variants:
    """Return the variants of a model, with equal parameters. The hooked ones share a model."""
    torch.manual_seed(0)
    models = [make()]
    models += [copy.deepcopy(models[0]) for _ in range(4)]
    hooked, local, *others = [_Variant(model, torch.optim.SGD(model.parameters(), lr=0.01)) for model in models]
    allred.distributed(hooked.optimizer, name="hooked")
    late = hooked._replace(early=False)
    found = {"hooked late": late, "hooked early": hooked._replace(early=True), "local": local}
    with arena.paused():
        for name, plain, group in zip(("ddp gloo", "ddp allred"), others, (gloo, None), strict=False):
            found[name] = plain._replace(model=DistributedDataParallel(plain.model, process_group=group))
    if world.config().torch_arena:
        found["ddp in place"] = others[2]._replace(model=DistributedDataParallel(others[2].model), in_place=True)
        found["hooked in place"] = late._replace(in_place=True)
    return found


def _measure_model(variants: Variants, data: Data, seconds: float, comm: Any) -> Record:
    _verify_model(variants, data, comm)
    auto = "early" if variants["hooked late"].optimizer.allred.decide_overlap() else "late"
    calls = {name: functools.partial(variant.step, data) for name, variant in variants.items()}
    nbytes = sum(parameter.nbytes for parameter in variants["local"].model.parameters())
    return {"bytes": nbytes, "auto": auto, **compare(measure.interleave(calls, comm, seconds), "ddp gloo")}


def _verify_model(variants: Variants, data: Data, comm: Any) -> None:
    """Compare the parameters of the variants after steps from the same start, on all ranks. Collective."""
    start = [parameter.detach().clone() for parameter in variants["ddp gloo"].model.parameters()]  # equal on all ranks
    changes: dict[str, Any] = {}
    for name, variant in variants.items():
        variant.step(data)  # so that the next ones are sent early, if any are
        parameters = list(variant.model.parameters())
        for parameter, value in zip(parameters, start, strict=True):
            parameter.data.copy_(value)
        for _ in range(_VERIFIED_STEPS):
            variant.step(data)
        both = zip(parameters, start, strict=True)
        changes[name] = torch.cat([(new.detach() - old).reshape(-1) for new, old in both])
    expected = torch.from_numpy(comm.bcast(changes["ddp gloo"].numpy()))  # that of rank 0
    largest = float(expected.abs().max())
    for name in variants.keys() - {"local"}:
        off = float((changes[name] - expected).abs().max())
        problem = "" if off <= _TOLERANCE * largest else f"off by {off:g}, where the largest change is {largest:g}"
        verify.raise_if_any(f"torch: the parameters of {name}", problem, comm)


# Gradients without a model.


def _measure_grouped(name: str, seconds: float, comm: Any, gloo: Any) -> Record:
    tensors = [torch.zeros(shape) for shape in verify.PS_SETS[name]()]

    def grouped() -> None:
        allred.grouped_allreduce_([as_array(tensor) for tensor in tensors])

    calls: dict[str, measure.Call] = {
        "gloo per tensor": functools.partial(average_by_gloo, tensors, gloo),
        "allred": grouped,
    }
    times = measure_averages(calls, tensors, seconds, comm)
    nbytes = sum(tensor.nbytes for tensor in tensors)
    return {"tensors": name, "bytes": nbytes, **compare(times, "gloo per tensor")}


def average_by_gloo(tensors: list[Any], gloo: Any) -> None:
    """Replace each tensor by its mean over the ranks."""
    for tensor in tensors:
        dist.all_reduce(tensor, group=gloo)
        tensor.div_(dist.get_world_size(gloo))


def measure_averages(
    calls: dict[str, measure.Call], tensors: list[Any], seconds: float, comm: Any
) -> dict[str, measure.CallTimes]:
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
