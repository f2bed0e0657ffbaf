"""The program of the start page with numpy: linear regression.

    mpirun -np 4 python examples/train.py

The last line is:

    found [1. 2. 3. 4.]
"""

import numpy as np

import allred

allred.init()
x = np.random.default_rng(0).normal(size=(1000, 4))
y = x @ [1, 2, 3, 4]

params = {"w": np.zeros(4)}
opt = allred.distributed(allred.optim.SGD(lr=0.05))
opt.broadcast(params)  # all ranks start from the parameters of rank 0
for xs, ys in allred.data.batches(x, y, batch_size=100, epochs=20, seed=0):
    error = xs @ params["w"] - ys  # batch_size counts all ranks
    opt.step(params, {"w": 2 * xs.T @ error / len(xs)})
if allred.rank() == 0:
    print("found", params["w"].round(2))
