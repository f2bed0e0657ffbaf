"""Cases of mode local with torch; test_local.py runs it.

Expected values come from one process: each rank also trains the models of all ranks.
"""

import copy
import tempfile

import pytest
import torch
import torch.distributed as dist
from optimizer_case_runner import case, named, run_cases
from torch import nn
from torch.nn import functional

import allred
import allred.torch as hvd
from allred.errors import InputError

torch.set_num_threads(1)
allred.init(banner=False)
RANK, SIZE = allred.rank(), allred.size()


def batch(step, rank):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(16, 40, generator=generator)
    return x, (x[:, :5].sum(1) > 0).long() + (x[:, 5] > 1).long()


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(40, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 3))


def train(model, optimizer, rank, steps):
    for step in steps:
        optimizer.zero_grad()
        x, y = batch(step, rank)
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def simulated(make, every, rounds):
    """Return the model after some rounds, with outer SGD(0.7, momentum=0.5)."""
    base, velocity = net(), None
    models = [copy.deepcopy(base) for _ in range(SIZE)]
    optimizers = [make(model.parameters()) for model in models]
    for number in range(rounds):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            train(model, optimizer, rank, range(number * every, (number + 1) * every))
        changes = [
            torch.stack([before.data - each.data for each in after]).mean(0)
            for before, *after in zip(base.parameters(), *(m.parameters() for m in models), strict=True)
        ]
        velocity = changes if velocity is None else [0.5 * v + c for v, c in zip(velocity, changes, strict=True)]
        for parameter, v in zip(base.parameters(), velocity, strict=True):
            parameter.data -= 0.7 * v
        for buffer, *others in zip(base.buffers(), *(m.buffers() for m in models), strict=True):
            if buffer.is_floating_point():
                buffer.copy_(torch.stack(others).mean(0))
        for model in models:
            for mine, new in zip(model.parameters(), base.parameters(), strict=True):
                mine.data.copy_(new.data)
            for mine, new in zip(model.buffers(), base.buffers(), strict=True):
                if mine.is_floating_point():
                    mine.copy_(new)
    return base


def check(model, right):
    for (name, got), each in zip(model.state_dict().items(), right.state_dict().values(), strict=True):
        if got.is_floating_point():
            torch.testing.assert_close(got, each, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


OUTER = allred.optim.SGD(0.7, momentum=0.5)


@case
def hooked_optimizers_with_buffers():
    for make in (
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), lambda p: torch.optim.AdamW(p, lr=0.01),
    ):  # fmt: skip
        model = net(RANK)
        optimizer = make(named(model))
        allred.distributed(optimizer, every=5, outer=OUTER)
        if RANK == 0:
            model.load_state_dict(net().state_dict())
        optimizer.allred.broadcast(model)
        train(model, optimizer, RANK, range(15))
        check(model, simulated(make, 5, 3))
        assert (
            len(set(allred.allgather_object(allred.digest({n: p.numpy() for n, p in model.state_dict().items()})))) == 1
        )


@case
def optimizers_of_horovod_accumulation_and_closures():
    hvd.init()
    model = net()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    train(model, optimizer, RANK, range(40))
    optimizer.allred.round()
    assert (
        len(set(allred.allgather_object(allred.digest({n: p.detach().numpy() for n, p in model.named_parameters()}))))
        == 1
    )
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, line_search_fn="strong_wolfe")
    allred.distributed(optimizer, every=2)
    optimizer.allred.broadcast(model)

    def closure():
        optimizer.zero_grad()
        x, y = batch(0, RANK)
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    losses = [float(optimizer.step(closure)) for _ in range(6)]
    assert min(losses) < 0.9 * losses[0], losses
    assert optimizer.allred.global_step == 6
    assert "rounds: 3 exchanges" in optimizer.allred.summary()
    optimizer.allred.round()
    assert (
        len(set(allred.allgather_object(allred.digest({n: p.detach().numpy() for n, p in model.named_parameters()}))))
        == 1
    )


@case
def a_session():
    directory = allred.broadcast_object(tempfile.mkdtemp() if RANK == 0 else None)

    def run(steps):
        model = net(RANK)
        optimizer = torch.optim.AdamW(named(model), lr=0.01)
        allred.distributed(optimizer, every=4)
        with allred.Session(directory, max_steps=steps) as session:
            begin = session.track(params=model, optimizer=optimizer)
            while not session.should_stop():
                train(model, optimizer, RANK, [session.step])
        digest = allred.digest({name: value.numpy() for name, value in model.state_dict().items()})
        assert len(set(allred.allgather_object(digest))) == 1
        return begin

    assert run(10) is None
    assert run(20) == 10


@case
def a_step_that_a_scaler_of_torch_leaves_out_on_one_rank_counts_on_all():
    for to_none in (True, False):
        model = net()
        optimizer = torch.optim.Adam(named(model), lr=0.01)
        allred.distributed(optimizer, every=4, nonfinite="ignore")
        optimizer.allred.broadcast(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(20):
            optimizer.zero_grad(set_to_none=to_none)
            x, y = batch(step, RANK)
            loss = functional.cross_entropy(model(x), y) * (float("inf") if (RANK, step) in ((1, 3), (1, 6)) else 1)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        optimizer.allred.round()
        assert optimizer.allred.global_step == 20
        assert "rounds: 5 exchanges" in optimizer.allred.summary()
        digest = allred.digest({name: value.numpy() for name, value in model.state_dict().items()})
        assert len(set(allred.allgather_object(digest))) == 1


@case
def what_is_refused():
    table = nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    allred.distributed(optimizer, every=2)
    with pytest.raises(InputError, match="sparse gradients are not available in mode local"):
        table(torch.tensor([1])).sum().backward()
    with pytest.raises(InputError, match="cannot be used in mode local"):
        allred.join()


@case
def a_module_in_ddp_is_refused():
    dist.init_process_group("allred")
    ddp = nn.parallel.DistributedDataParallel(net())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    allred.distributed(optimizer, every=4)
    with pytest.raises(InputError, match="in mode local, and in mode ps with every, pass the module inside of it"):
        optimizer.allred.broadcast(ddp)
    dist.destroy_process_group()


if __name__ == "__main__":
    run_cases()
