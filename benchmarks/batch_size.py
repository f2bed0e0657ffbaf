"""The table of docs/batch-size.md, means over 5 seeds: mpirun -np 2 python benchmarks/batch_size.py"""

import pathlib
import sys

import numpy as np
from sklearn.datasets import load_digits

import allred

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples"))
from digits_sync import logits, loss_and_grads, new_parameters

SEEDS, WARM_UP = 5, allred.optim.linear_warmup(0.8, warmup_steps=8)
TRAININGS = [  # global batch, learning rate, epochs
    (25, 0.05, 10), (100, 0.05, 10), (100, 0.1, 10), (100, 0.2, 10),
    (400, 0.05, 10), (400, 0.2, 10), (400, 0.8, 10), (400, WARM_UP, 10), (400, 0.2, 40),
]  # fmt: skip


def train(batch_size, lr, epochs, seed):
    """Return the training loss after the last step, the test accuracy and the number of steps."""
    train, test = np.split(np.random.default_rng(seed).permutation(len(x)), [1437])
    params = new_parameters()
    opt = allred.distributed(allred.optim.SGD(lr=lr, momentum=0.9))
    for xs, ys in allred.data.batches(x[train], y[train], batch_size=batch_size, epochs=epochs, seed=seed):
        opt.step(params, loss_and_grads(params, xs, ys)[1])
    loss, _ = loss_and_grads(params, x[train], y[train])
    return loss, (logits(params, x[test])[1].argmax(axis=1) == y[test]).mean(), opt.global_step


allred.init(banner=False)
x, y = load_digits(return_X_y=True)
x = (x / 16).astype(np.float32)
for batch, lr, epochs in TRAININGS:
    loss, accuracy, steps = np.mean([train(batch, lr, epochs, seed) for seed in range(SEEDS)], axis=0)
    if allred.rank() == 0:
        rate = "0.8, warm-up" if lr is WARM_UP else lr
        print(f"batch {batch}, learning rate {rate}: {steps:.0f} steps, loss {loss:.3f}, accuracy {accuracy:.3f}")
