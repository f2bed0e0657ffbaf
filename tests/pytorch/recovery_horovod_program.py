"""The program of test_recovery.py for hvd.elastic: the parameter `seen` counts how often each sample was used.

DIRECTORY: where each process writes result-PID. KILL: this rank of the first world is killed in batch 5 of epoch 1.
"""

import json
import os
import signal

import torch

import allred.torch as hvd
from allred import world

ROWS, BATCH, EPOCHS = 60, 2, 3

hvd.init()
torch.manual_seed(hvd.rank())  # the ranks start from the parameters of rank 0
torch.set_num_threads(1)
model = torch.nn.Linear(3, 1)
model.register_parameter("seen", torch.nn.Parameter(torch.zeros(ROWS)))
named = [(name, each) for name, each in model.named_parameters() if name != "seen"]
adam = hvd.DistributedOptimizer(torch.optim.Adam([each for _, each in named], lr=0.01), named)
counter = hvd.DistributedOptimizer(torch.optim.SGD([model.seen], lr=1.0), [("seen", model.seen)], op=hvd.Sum)
sampler = hvd.elastic.ElasticSampler(range(ROWS), seed=3)
x = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(7))
starts = 0


@hvd.elastic.run
def train(state):
    global starts
    starts += 1
    while state.epoch < EPOCHS:
        loader = torch.utils.data.DataLoader(range(ROWS), batch_size=BATCH, sampler=sampler)
        for number, rows in enumerate(loader):
            is_killed = os.environ["KILL"] == str(hvd.rank()) and world.current().generation == 1
            if is_killed and (state.epoch, number) == (1, 5):
                os.kill(os.getpid(), signal.SIGKILL)
            adam.zero_grad()
            counter.zero_grad()
            (model(x[rows]).square().mean() - model.seen[rows].sum()).backward()
            adam.step()
            counter.step()
            sampler.record_batch(number, len(rows))
            if number % 3 == 2:
                state.commit()
        state.epoch += 1
        sampler.set_epoch(state.epoch)


train(hvd.elastic.TorchState(model, adam, counter=counter, sampler=sampler, epoch=0))
result = {
    "rank": hvd.rank(), "seen": model.seen.tolist(), "starts": starts, "weight": model.weight.tolist(),
}  # fmt: skip
with open(f"{os.environ['DIRECTORY']}/result-{os.getpid()}", "w") as file:
    json.dump(result, file)
