"""Training with a hooked optimizer and with DDP over gloo: bit-identical on two ranks. test_hooked.py starts it."""

import copy
import tempfile

import torch
from torch import nn
from torch.nn import functional

import allred

torch.set_num_threads(1)
allred.init(banner=False)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 3))
other = copy.deepcopy(model)
opt, plain = (torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, other))
allred.distributed(opt)
file = allred.broadcast_object(tempfile.mktemp())
torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=allred.rank(), world_size=allred.size())
wrapped = nn.parallel.DistributedDataParallel(other)
for step in range(5):
    generator = torch.Generator().manual_seed(1000 * step + allred.rank())
    x, y = torch.randn(4, 6, generator=generator), torch.randint(0, 3, (4,), generator=generator)
    for net, optimizer in ((model, opt), (wrapped, plain)):
        optimizer.zero_grad()
        functional.cross_entropy(net(x), y).backward()
        optimizer.step()
torch.distributed.destroy_process_group()
equal = all(torch.equal(one, two) for one, two in zip(model.parameters(), other.parameters(), strict=True))
everyone = allred.allgather_object(equal)
if allred.rank() == 0:
    print("equal:", everyone)
