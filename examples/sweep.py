"""A sweep: each group of ranks trains with learning rates of its own.

    mpirun -np 4 python examples/sweep.py

The last line is:

    best learning rate: 0.1
"""

import numpy as np
from mpi4py import MPI

import allred

RATES = [0.1, 0.001, 1.1]

world = MPI.COMM_WORLD
groups = min(len(RATES), world.size)
group = world.Split(world.rank % groups, key=world.rank)
allred.init(group)  # rank, size and all collectives are those of the group
losses = {}
for rate in RATES[world.rank % groups :: groups]:
    x = np.random.default_rng(0).normal(size=(400, 3))
    y = x @ [1.0, 2.0, 3.0]
    w, opt = np.zeros(3), allred.distributed(allred.optim.SGD(lr=rate))
    for xs, ys in allred.data.batches(x, y, batch_size=40, epochs=2, seed=0):
        opt.step(w, 2 * xs.T @ (xs @ w - ys) / len(xs))
    losses[rate] = float(np.square(x @ w - y).mean())
found = {}
for part in world.allgather(losses):
    found |= part
if world.rank == 0:
    print("best learning rate:", min(found, key=found.get))
