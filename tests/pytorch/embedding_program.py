"""Modules on embedding tables against torch's own on one process, under mpirun. Prints the largest differences."""

import tempfile

import torch

import allred
import allred.torch
from allred.ps import context

ROWS, DIM = 50, 8


def made():
    bags = allred.torch.EmbeddingBag("bags", DIM, mode="mean", optimizer=allred.optim.Adagrad(0.1), init=0.25)
    rows = allred.torch.Embedding("rows", DIM, ROWS, optimizer=allred.optim.SGD(0.1), init=0.5)
    torch.manual_seed(1)
    model = torch.nn.ModuleList([bags, rows, torch.nn.Linear(2 * DIM, 1)])
    assert len(list(model.parameters())) == 2
    opt = allred.distributed(torch.optim.SGD(model.parameters(), lr=0.1), tables=[bags.table, rows.table])
    opt.allred.broadcast(model)
    return model, opt


def batch(rank, step):
    generator = torch.Generator().manual_seed(100 * rank + step)
    ids = torch.randint(0, ROWS, (6, 4), generator=generator), torch.randint(0, ROWS, (6,), generator=generator)
    return *ids, torch.randn(6, 1, generator=generator)


def loss_of(model, ids, more_ids, y):
    bags, rows, linear = model
    return ((linear(torch.cat([bags(ids), rows(more_ids)], 1)) - y) ** 2).mean()


def weights(model):
    with torch.no_grad():
        bags, rows = model[0](torch.arange(ROWS).reshape(ROWS, 1)), model[1](torch.arange(ROWS))
    return torch.cat([bags.ravel(), rows.ravel(), *(p.detach().ravel() for p in model[2].parameters())])


def main():
    allred.init()
    rank, size = allred.rank(), allred.size()
    model, opt = made()
    expected = torch.nn.ModuleList(
        [torch.nn.EmbeddingBag(ROWS, DIM, mode="mean"), torch.nn.Embedding(ROWS, DIM), torch.nn.Linear(2 * DIM, 1)]
    )
    for module, value in zip(expected, (0.25, 0.5), strict=False):
        torch.nn.init.constant_(module.weight, value)
    expected[2].load_state_dict(model[2].state_dict())
    alone = [torch.optim.Adagrad(expected[0].parameters(), 0.1), torch.optim.SGD(expected[1:].parameters(), lr=0.1)]
    directory = allred.broadcast_object(tempfile.mkdtemp())
    for step in range(8):
        if step == 4:
            opt.allred.save(directory, model)
            allred.barrier()
        if context.is_active():  # a backward pass that is not used; mode sync updates rows at its end
            loss_of(model, *batch(rank, step + 100)).backward()
        found = loss_of(model, *batch(rank, step))
        opt.zero_grad()
        found.backward()
        opt.step()
        for each in alone:
            each.zero_grad()
        (sum(loss_of(expected, *batch(other, step)) for other in range(size)) / size).backward()
        for each in alone:
            each.step()
    model.eval()
    allred.barrier()
    found = weights(model)
    difference = (found - weights(expected)).abs().max()
    allred.barrier()
    assert opt.allred.restore(directory, model) == 4
    model.train()
    for step in range(4, 8):
        opt.zero_grad()
        loss_of(model, *batch(rank, step)).backward()
        opt.step()
    model.eval()
    allred.barrier()
    again = (weights(model) - found).abs().max()
    if rank == 0:
        print(f"{float(difference):.2g} {float(again):.2g}")


if __name__ == "__main__":
    main()
