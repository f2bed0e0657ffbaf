"""A training in the style of Horovod's elastic examples; test_elastic.py runs it with `allred run`.

The parameter `seen` counts how often each sample was used, so that a lost update is a lost count.

    start 1   2 ranks. epoch 0: an operation fails on all ranks, which continue from the commit. epoch 1: rank 1 dies
    start 2   2 ranks. epoch 2: compared with a training without failures. epoch 3: resize to 3 ranks
    start 3   3 ranks. epoch 4: SIGTERM to `allred run`
    start 1   1 rank, of another job: the end
"""

import os
import pathlib
import signal
import sys
import time

import torch
from torch import nn

import allred.torch as hvd
from allred import world

torch.set_num_threads(1)
ROWS, BATCH, EPOCHS = 60, 2, 6


class Training:
    """The objects of a training; all have the same start."""

    def __init__(self):
        torch.manual_seed(hvd.rank())  # the ranks start from the parameters of rank 0
        self.x = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(7))
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
        self.model.register_parameter("seen", nn.Parameter(torch.zeros(ROWS)))
        named = [(name, each) for name, each in self.model.named_parameters() if name != "seen"]
        adam = torch.optim.Adam([each for _, each in named], lr=0.01)
        counter = torch.optim.SGD([self.model.seen], lr=1.0)
        self.adam = hvd.DistributedOptimizer(adam, named)
        self.counter = hvd.DistributedOptimizer(counter, [("seen", self.model.seen)], op=hvd.Sum)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.adam, 5, 0.9)
        self.sampler = hvd.elastic.ElasticSampler(range(ROWS), seed=3)
        self.state = hvd.elastic.TorchState(
            self.model, self.adam, counter=self.counter, schedule=self.schedule, sampler=self.sampler, epoch=0, batch=0,
            losses=[],
        )  # fmt: skip
        self.resets = []
        self.state.register_reset_callbacks([lambda: self.resets.append((hvd.size(), self.state.epoch))])

    def loop(self, state, epochs, failures=None):
        while state.epoch < epochs:
            loader = torch.utils.data.DataLoader(range(ROWS), batch_size=BATCH, sampler=self.sampler)
            for number, rows in enumerate(loader):
                if failures is not None:
                    failures.before_batch(self)
                self.adam.zero_grad()
                self.counter.zero_grad()
                loss = (self.model(self.x[rows])[:, 0] - self.x[rows].sum(dim=1)).square().mean()
                (loss - self.model.seen[rows].sum()).backward()
                if failures is not None:
                    failures.before_step(self)
                self.adam.step()
                self.counter.step()
                self.schedule.step()
                self.sampler.record_batch(number, len(rows))
                state.losses.append(loss.item())
                state.batch += 1
                if state.batch % 4 == 0:
                    state.commit()
                else:
                    state.check_host_updates()
            state.epoch += 1
            state.batch = 0
            self.sampler.set_epoch(state.epoch)

    def result(self):
        """All that a commit has to restore, as bytes."""
        tensors = [*self.model.state_dict().values()]
        for each in self.adam.state_dict()["state"].values():
            tensors += each.values()
        parts = [bytes(tensor.contiguous().view(torch.uint8).numpy()) for tensor in map(torch.atleast_1d, tensors)]
        return parts, self.state.losses, self.schedule.get_last_lr(), self.sampler.state_dict()


class Failures:
    """What happens to the training. directory: has the file `pid` with the process id of `allred run`."""

    def __init__(self, directory):
        self.directory, self.starts, self.has_failed = directory, world.config().starts, False

    def place(self, state):
        return self.starts, hvd.size(), state.epoch, state.batch

    def before_batch(self, training):
        state, rank, place = training.state, hvd.rank(), self.place(training.state)
        if place == (1, 2, 1, 7) and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        elif place == (2, 2, 3, 0):
            reference = Training()
            reference.state.sync()
            reference.loop(reference.state, 3)
            if rank == 0:
                print("equal", reference.result() == training.result(), len(state.losses), flush=True)
        elif place == (2, 2, 3, 8) and rank == 0:
            assert os.system(f"{sys.executable} -m allred resize tested 3") == 0
            self.wait_for_stop(state)
        elif place == (3, 3, 4, 5) and rank == 0:
            os.kill(int((self.directory / "pid").read_text()), signal.SIGTERM)
            self.wait_for_stop(state)

    def before_step(self, training):
        if self.place(training.state) == (1, 2, 0, 6) and not self.has_failed:
            self.has_failed = True
            training.model.seen.data += 100
            training.state.losses.append("not committed")
            hvd.allreduce(torch.ones(1 + hvd.rank()), name="shapes")

    def wait_for_stop(self, state):
        while not state.elastic_job.signals.reason:
            time.sleep(0.02)


def main(directory):
    hvd.init()
    training = Training()

    @hvd.elastic.run
    def train(state, failures):
        if hvd.rank() == 0:
            place = f"start {failures.starts}: {hvd.size()} ranks, epoch {state.epoch}, batch {state.batch}"
            print(f"{place}, resets {training.resets}", flush=True)
        training.loop(state, EPOCHS, failures)
        return "trained"

    result = train(training.state, Failures(pathlib.Path(directory)))
    if hvd.rank() == 0:
        print(result, training.model.seen.unique().tolist(), flush=True)


main(*sys.argv[1:])
