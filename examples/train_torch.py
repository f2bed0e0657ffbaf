"""The program of the start page with PyTorch: linear regression.

    mpirun -np 4 python examples/train_torch.py

The last line is:

    found [[1. 2. 3. 4.]]
"""

import torch

import allred

allred.init()
x = torch.randn(1000, 4, generator=torch.Generator().manual_seed(0))
y = x @ torch.tensor([[1.0], [2.0], [3.0], [4.0]])
model = torch.nn.Linear(4, 1, bias=False)
opt = allred.distributed(torch.optim.SGD(model.named_parameters(), lr=0.05))
opt.allred.broadcast(model)  # all ranks start from the parameters of rank 0
sampler = allred.data.DistributedBatchSampler(x, batch_size=100, epochs=20)
for rows in sampler:
    opt.zero_grad()
    (model(x[rows]) - y[rows]).square().mean().backward()  # averages
    opt.step()
if allred.rank() == 0:
    print("found", model.weight.detach().numpy().round(2))
