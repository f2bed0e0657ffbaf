"""A program with hvd.elastic. Under `allred run` it continues from its last commit after a rank was killed.

    python examples/horovod_elastic.py                                      one rank
    allred run -np 2 --restarts 1 examples/horovod_elastic.py               two ranks
    allred run -np 2 --restarts 1 examples/horovod_elastic.py 5             the last rank is killed in epoch 5

The last line is:

    test accuracy: 0.9...
"""

import os
import signal
import sys

import torch  # pip install torch; the CPU build: docs/install.md

try:
    from sklearn.datasets import load_digits
except ImportError:
    raise SystemExit("this example needs scikit-learn: pip install scikit-learn") from None
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import allred.torch as hvd

EPOCHS, BATCH = 20, 50


def main(kill_in_epoch=-1):
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    digits = load_digits()
    x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    order = torch.randperm(len(x))
    train, test = order[:1437], order[1437:]

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    data = TensorDataset(x[train], y[train])
    sampler = hvd.elastic.ElasticSampler(data)

    @hvd.elastic.run
    def fit(state):
        if hvd.rank() == 0:
            print(f"{hvd.size()} ranks, from epoch {state.epoch}", flush=True)
        while state.epoch < EPOCHS:
            for number, (images, labels) in enumerate(DataLoader(data, BATCH, sampler=sampler)):
                optimizer.zero_grad()
                cross_entropy(model(images), labels).backward()
                optimizer.step()
                sampler.record_batch(number, len(images))
                if number % 5 == 4:
                    state.commit()
                if state.epoch == kill_in_epoch and hvd.rank() == hvd.size() - 1 and os.getenv("ALLRED_STARTS") == "1":
                    os.kill(os.getpid(), signal.SIGKILL)
            state.epoch += 1
            sampler.set_epoch(state.epoch)
            state.commit()

    fit(hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0))

    if hvd.rank() == 0:
        with torch.no_grad():
            accuracy = (model(x[test]).argmax(dim=1) == y[test]).float().mean()
        print(f"test accuracy: {accuracy:.3f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
