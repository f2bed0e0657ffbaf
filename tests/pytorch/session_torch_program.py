"""Sessions with torch; test_torch_session.py runs it on 2 ranks: session_torch_program.py DIRECTORY.

A training of 12 steps is compared with one that ends after 5 steps and is resumed with new objects.
"""

import os
import pathlib
import sys

import numpy as np
import pytest
import torch
from optimizer_case_runner import case, named, run_cases
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import allred
import allred.torch as hvd
from allred.errors import CheckpointError, InputError

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


class Counter(nn.Linear):
    """Has extra state of objects and tensors, and none that is a buffer."""

    def __init__(self, start):
        super().__init__(2, 1)
        self.seen, self.largest = {"rows": start, "names": ["a"] * start}, torch.full((2,), float(start))

    def get_extra_state(self):
        return {"seen": self.seen, "largest": self.largest}

    def set_extra_state(self, state):
        self.seen, self.largest = state["seen"], state["largest"]


class Scale(nn.Module):
    """Its extra state is a tensor; a hook adds a copy of a tensor, and one removes it before the others are loaded."""

    def __init__(self, start):
        super().__init__()
        self.factor, self.offset = torch.tensor(float(start)), torch.full((3,), start)
        self._register_state_dict_hook(
            lambda module, state, prefix, _: state.update({f"{prefix}moved": module.offset + 1})
        )
        self._register_load_state_dict_pre_hook(self.load_offset)

    def forward(self, x):
        return self.factor * x

    def load_offset(self, state, prefix, *_):
        if f"{prefix}moved" in state:
            self.offset = state.pop(f"{prefix}moved") - 1

    def get_extra_state(self):
        return self.factor.clone()

    def set_extra_state(self, state):
        self.factor = state.clone()


class Averaging(torch.optim.SGD):
    """Has state that belongs to no parameter: in `state`, and in what its `state_dict` adds."""

    def __init__(self, params, start):
        super().__init__(params, lr=0.1)
        self.state["calls"] = {"number": start, "rates": [0.1] * start, "weights": torch.full((2,), float(start))}
        self.mean = {"loss": float(start), "kind": "mean"}

    def state_dict(self):
        return {**super().state_dict(), "mean": dict(self.mean)}

    def load_state_dict(self, state):
        self.mean = state["mean"]
        super().load_state_dict({key: value for key, value in state.items() if key != "mean"})


def with_other_state(start):
    """A model and an optimizer with state that is neither parameter nor buffer."""
    model = nn.Sequential(Counter(start), nn.BatchNorm1d(1), Scale(start))
    return model, allred.distributed(Averaging(model.parameters(), start))


def check_other_state(model, opt, start):
    assert model[0].seen == {"rows": start, "names": ["a"] * start}
    assert model[0].largest.tolist() == [start, start]
    assert model[2].factor.item() == start
    assert model[2].offset.tolist() == [start] * 3
    calls = opt.state["calls"]
    assert (calls["number"], calls["rates"], calls["weights"].tolist()) == (start, [0.1] * start, [start, start])
    assert opt.mean == {"loss": start, "kind": "mean"}


def track(directory, model, opt, **more):
    with allred.Session(directory, log_steps=None) as session:
        return session.track(params=model, optimizer=opt, **more)


@case
def all_that_state_dict_returns_is_broadcast():
    model, opt = with_other_state(3 + allred.rank())
    opt.allred.broadcast(model)
    check_other_state(model, opt, 3)
    model, opt = with_other_state(3 + allred.rank())
    opt.allred.broadcast(model, root=1)
    check_other_state(model, opt, 4)
    for how in ("session", "restore", "session without directory"):
        model, opt = with_other_state(3 + allred.rank())
        if how == "restore":
            assert opt.allred.restore(ROOT / "other state, none", model) is None
        else:
            track(ROOT / "other state, no steps" if how == "session" else None, model, opt)
        check_other_state(model, opt, 3)


@case
def all_that_state_dict_returns_is_synchronized_by_elastic_states():
    model, opt = with_other_state(3 + allred.rank())
    hvd.elastic.TorchState(model).sync()
    opt.allred.broadcast()
    check_other_state(model, opt, 3)


@case
def all_that_state_dict_returns_is_saved_and_restored():
    for how in ("session", "save"):
        where = ROOT / f"other state, {how}"
        model, opt = with_other_state(5 + allred.rank())
        with allred.Session(where if how == "session" else None, log_steps=None) as session:
            session.track(params=model, optimizer=opt)
            assert not session.should_stop()
            opt.zero_grad()
            opt.allred.samples = 2  # cases before have iterated over uneven batches
            model(torch.ones(2, 2)).sum().backward()
            opt.step()
        if how == "save":
            opt.allred.save(where, model)
        allred.barrier()
        for again in ("session", "restore"):
            model, opt = with_other_state(8 + allred.rank())
            step = track(where, model, opt) if again == "session" else opt.allred.restore(where, model)
            assert step == 1
            check_other_state(model, opt, 5)


@case
def state_that_cannot_be_pickled_is_named():
    model, opt = with_other_state(3)
    model[0].seen = {"function": lambda: 0}
    with pytest.raises(InputError, match=r"0\._extra_state.* of the module's state_dict\(\) cannot be pickled"):
        opt.allred.broadcast(model)
    model, opt = with_other_state(3)
    opt.mean["function"] = lambda: 0
    printed = warnings_of(lambda: [opt.allred.broadcast(), opt.allred.state_dict()])
    if allred.rank() == 0:
        assert printed.count("Averaging: its state 'mean' is neither saved nor broadcast") == 1, printed


def warnings_of(function):
    """The lines that a function prints on stderr."""
    read, write = os.pipe()
    before = os.dup(2)
    os.dup2(write, 2)
    try:
        function()
    finally:
        os.dup2(before, 2)
        os.close(write)
    with open(read) as file:
        return file.read()


@case
def a_checkpoint_without_the_module_is_refused_before_anything_is_restored():
    where = ROOT / "without the module"
    model, opt = Net(), None
    opt = allred.distributed(torch.optim.SGD(model.parameters(), lr=0.5))
    opt.allred.save(where)
    allred.barrier()
    for restore in (lambda model, opt: opt.allred.restore(where, model), lambda model, opt: track(where, model, opt)):
        model = Net()
        opt = allred.distributed(torch.optim.SGD(model.parameters(), lr=0.1))
        before = [parameter.clone() for parameter in model.parameters()]
        with pytest.raises(CheckpointError, match="has no state of the module, because it was saved without"):
            restore(model, opt)
        assert all(map(torch.equal, before, model.parameters()))
        assert opt.param_groups[0]["lr"] == 0.1


class Sampler(torch.utils.data.RandomSampler):
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


@case
def state_that_is_not_restored_is_named():
    """What a checkpoint lacks, and the state of a loader's sampler."""
    where, sampler = ROOT / "lacking", Sampler(range(8))
    model, opt = with_other_state(3)
    track(where, model, opt)
    opt.allred.save(where, model)
    allred.barrier()
    schedule = torch.optim.lr_scheduler.StepLR(opt, 2)
    data = allred.data.batches((np.zeros(8),), batch_size=8)
    printed = warnings_of(lambda: track(where, model, opt, data=data, schedule=schedule))
    assert ("without the state of the data, 'schedule': training begins" in printed) == (allred.rank() == 0), printed

    def run(**more):
        with allred.Session(where, log_steps=None) as session:
            session.track(params=model, optimizer=opt, **more)
            next(session.steps(DataLoader(range(8), sampler=sampler)))

    printed = warnings_of(run)
    assert ("state of the loader's Sampler is not saved" in printed) == (allred.rank() == 0), printed
    assert "Sampler" not in warnings_of(lambda: run(sampler=sampler))


if __name__ == "__main__":
    run_cases()
