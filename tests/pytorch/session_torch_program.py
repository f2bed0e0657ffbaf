"""Sessions with torch; test_torch_session.py runs it on 2 ranks: session_torch_program.py DIRECTORY.

A training of 12 steps is compared with one that ends after 5 steps and is resumed with new objects.
"""

import pathlib
import sys

import numpy as np
import torch
from optimizer_case_runner import case, named, run_cases
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import allred

torch.set_num_threads(1)
allred.init(banner=False)
ROOT, STEPS = pathlib.Path(sys.argv.pop()), 12


class Net(nn.Module):
    """Has buffers, and dropout, which draws from torch's generator."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, x):
        return self.layers(x)


def train(directory, max_steps, seed=0, workers=0, optimizer=torch.optim.AdamW):
    """Train up to a step. Return the model, the numbers of the rows of this rank, and what was restored."""
    torch.manual_seed(seed)
    model = Net()
    opt = allred.distributed(optimizer(named(model), lr=0.01))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, STEPS)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(45, 8, generator=generator)
    data = TensorDataset(x, x[:, :3].argmax(dim=1), torch.arange(45))
    sampler = allred.data.DistributedBatchSampler(data, batch_size=10, epochs=3)
    seeds = torch.Generator()  # else an iteration with workers draws a number from the generator that dropout uses
    loader = DataLoader(data, batch_sampler=sampler, num_workers=workers, generator=seeds)
    rows = []
    torch.manual_seed(100 * seed + allred.rank())
    with allred.Session(directory, save_steps=2 if directory else None, max_steps=max_steps, log_steps=None) as session:
        restored = session.track(params=model, optimizer=opt, data=loader, schedule=schedule)
        for xs, ys, numbers in session.steps(loader):
            opt.zero_grad()
            loss = functional.cross_entropy(model(xs), ys)
            loss.backward()
            opt.step()
            schedule.step()
            session.log(loss=loss.detach().item(), examples=len(xs))
            rows += numbers.tolist()
    return model, rows, restored, opt


def check_resumed(workers, optimizer):
    where = ROOT / f"{workers}-{optimizer.__name__}"
    model, rows, _, opt = train(where / "whole", STEPS, workers=workers, optimizer=optimizer)
    _, first, restored, _ = train(where / "parts", 5, workers=workers, optimizer=optimizer)
    assert restored is None
    again, second, restored, resumed = train(where / "parts", STEPS, seed=9, workers=workers, optimizer=optimizer)
    assert restored == 5
    assert first + second == rows
    for (name, one), two in zip(model.state_dict().items(), again.state_dict().values(), strict=True):
        if "running" in name and allred.rank() != 0:  # buffers are those of the chief
            continue
        assert torch.equal(one, two), name
    assert opt.param_groups[0]["lr"] == resumed.param_groups[0]["lr"]
    assert resumed.allred.global_step == STEPS


@case
def resumed_training_is_bit_identical():
    check_resumed(0, torch.optim.AdamW)


@case
def prefetched_batches_are_not_lost_at_resume():
    check_resumed(2, torch.optim.SGD)


@case
def no_tensor_is_pickled():
    where = allred.broadcast_object(str(ROOT / "tensors"))
    train(where, 2)
    calls = []

    def watch(event, arguments):
        if event == "pickle.find_class":
            calls.append(arguments)

    sys.addaudithook(watch)
    train(where, 3)
    assert not [arguments for arguments in calls if arguments[0].startswith("torch")], calls


@case
def every_row_is_used_once():
    _, rows, *_ = train(None, 2)
    torch.manual_seed(0)
    sampler = allred.data.DistributedBatchSampler(45, batch_size=10, epochs=3)
    mine = [row for batch in sampler for row in batch]
    everyone = np.concatenate(allred.allgather_object(mine))
    assert sorted(everyone.tolist()) == sorted(list(range(45)) * 3)
    assert mine[: len(rows)] == rows


if __name__ == "__main__":
    run_cases()
