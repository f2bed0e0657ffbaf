"""Cases of compression between hosts with torch; test_compression.py runs it on pretended nodes.

Expected values come from one process: each rank also trains a copy of the model on the batches of all ranks.
"""

import copy
import dataclasses

import pytest
import torch
import torch.distributed as dist
from optimizer_case_runner import case, named, run_cases
from torch import nn
from torch.nn import functional

import allred
import allred.torch as hvd
from allred import world
from allred.comm.functions import current
from allred.errors import InputError

torch.set_num_threads(1)
allred.init(banner=False)
RANK, SIZE, STEPS = allred.rank(), allred.size(), 30
QUANTIZED = [allred.Compression.int8, allred.Compression.int4]


def batch(step, rank):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(16, 40, generator=generator)
    return x, (x[:, :5].sum(1) > 0).long() + (x[:, 5] > 1).long()


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(40, 200), nn.LayerNorm(200), nn.Tanh(), nn.Linear(200, 50), nn.ReLU(), nn.Linear(50, 3)
    )


def losses(model, optimizer, ranks, zero=True):
    """Train; return the loss of each step over the batches of these ranks."""
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = sum(functional.cross_entropy(model(x), y) for x, y in (batch(step, rank) for rank in ranks)) / len(ranks)
        loss.backward()
        optimizer.step()
        found.append(float(allred.allreduce(float(loss.detach()))) if len(ranks) == 1 else float(loss.detach()))
    return found


def expected():
    model = net()
    return losses(model, torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5), range(SIZE))


def check(model, found, tolerance):
    right = expected()
    assert right[-1] < 0.6 * right[0], right
    gap = max(abs(a - b) for a, b in zip(found, right, strict=True))
    assert gap < tolerance, (gap, found, right)
    assert gap > 0  # it was compressed
    digest = allred.digest({name: p.detach().numpy() for name, p in model.named_parameters()})
    assert len(set(allred.allgather_object(digest))) == 1


@case
def hooked_optimizers():
    for compression, tolerance in ((*QUANTIZED[:1], 0.01), (*QUANTIZED[1:], 0.1), (allred.Compression.fp16, 0.01)):
        for overlap in ("never", "always"):
            here = world.current()
            here.config = dataclasses.replace(here.config, overlap=overlap)
            model = net()
            optimizer = torch.optim.SGD(named(model), lr=0.2, momentum=0.5)
            allred.distributed(optimizer, compression=compression)
            check(model, losses(model, optimizer, [RANK]), tolerance)
            last = optimizer.allred.summary().splitlines()[-1]
            ratio = {"int8": "0.2", "int4": "0.1", "fp16": "0.5"}[compression.name]
            assert f"a step as {compression.name}, {ratio}" in optimizer.allred.summary(), last


@case
def hooks_of_ddp():
    dist.init_process_group("allred")
    for hook, tolerance in ((hvd.int8_hook, 0.01), (hvd.int4_hook, 0.1)):
        for state in (None, dist.group.WORLD):
            ddp = nn.parallel.DistributedDataParallel(net(), bucket_cap_mb=0.02)
            ddp.register_comm_hook(state, hook)
            optimizer, before = torch.optim.SGD(ddp.parameters(), lr=0.2, momentum=0.5), current().sent_bytes
            check(ddp, losses(ddp, optimizer, [RANK]), tolerance)
            sent, whole = current().sent_bytes - before, 4 * sum(p.numel() for p in ddp.parameters()) * STEPS
            assert sent < whole / (2.5 if hook is hvd.int8_hook else 3.5), (sent, whole)
    dist.destroy_process_group()


@case
def a_hook_needs_the_backend_allred():
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    ddp = nn.parallel.DistributedDataParallel(net())
    ddp.register_comm_hook(None, hvd.int8_hook)
    words = "has the backend 'gloo'; use torch.distributed.init_process_group\\('allred'\\)"
    with pytest.raises((InputError, RuntimeError), match=words):
        ddp(torch.ones(2, 40)).sum().backward()
    dist.destroy_process_group()


@case
def compressors_of_horovod():
    hvd.init()
    for compression, tolerance in ((hvd.Compression.int8, 0.01), (hvd.Compression.int4, 0.1)):
        for factor in (1.0, 2.0):
            model = net()
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5), model.named_parameters(),
                compression=compression, gradient_predivide_factor=factor,
            )  # fmt: skip
            check(model, losses(model, optimizer, [RANK]), tolerance)
        x = torch.full((300, 300), float(RANK))
        x[0, 0] = 100
        before = current().sent_bytes
        for found in (
            hvd.allreduce(x, compression=compression), hvd.grouped_allreduce([x], compression=compression)[0],
            hvd.allreduce(copy.deepcopy(x).requires_grad_(), compression=compression).detach(),
        ):  # fmt: skip
            assert abs(float(found[100, 100]) - (SIZE - 1) / 2) < 0.1
            assert found.dtype == x.dtype
        assert current().sent_bytes - before < 3 * x.nbytes / 3.5


if __name__ == "__main__":
    run_cases()
