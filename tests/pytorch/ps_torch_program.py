"""Mode ps with a torch optimizer; test_torch_ps.py starts it with one or two servers.

ps_torch_program.py serial OPTIMIZER     one worker: the parameters have the bits of one process
ps_torch_program.py workers OPTIMIZER    several workers learn; with policy sync as one process with all batches
"""

import copy
import sys
import warnings

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import allred

torch.set_num_threads(1)
warnings.simplefilter("error")

MAKE = {
    "sgd": lambda model: torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.01),
    "groups": lambda model: torch.optim.AdamW(
        [{"params": model[0].parameters(), "lr": 0.02}, {"params": model[2].parameters(), "betas": (0.8, 0.9)}], lr=0.01
    ),
    "halves": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
}
how, kind = sys.argv[1:3]
DTYPE = torch.bfloat16 if kind == "halves" else torch.float32


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 300), nn.Tanh(), nn.Linear(300, 3)).to(DTYPE)


def batch(step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(16, 20, generator=generator)
    return x.to(DTYPE), (x[:, :3]).argmax(dim=1)


def train(model, optimizer, schedule, data):
    optimizer.zero_grad()
    loss = functional.cross_entropy(model(data[0]).float(), data[1])
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    return float(loss.detach())


allred.init(banner=False)
model = net()
opt = allred.distributed(MAKE[kind](model))
assert allred.rank() < allred.size()  # a server does not get here
other = copy.deepcopy(model)
plain = MAKE[kind](other)
schedule, schedule_of_plain = (torch.optim.lr_scheduler.StepLR(each, 3, 0.5) for each in (opt, plain))
opt.allred.broadcast()
losses = []
for step in range(10):
    losses.append(train(model, opt, schedule, batch(step, allred.rank())))
    if how == "serial":
        assert losses[-1] == train(other, plain, schedule_of_plain, batch(step, 0))
opt.allred.finish()
allred.barrier()
opt.allred.pull()
if how == "serial":
    for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two), name
    state, expected = opt.allred.state_dict(), plain.state_dict()
    assert state["global_step"] == 10
    assert len(state["slots"]) == len(expected["state"])
    if kind == "adam":
        for number, slots in expected["state"].items():
            name = f"0.{number}"
            np.testing.assert_array_equal(state["slots"][name]["exp_avg"], slots["exp_avg"].numpy(), strict=True)
            assert state["slots"][name]["step:scalar"] == 10
everyone = allred.allgather_object(allred.digest([p.detach().float().numpy() for p in model.parameters()]))
if allred.rank() == 0:
    updates = opt.allred.statistics().updates
    print(f"equal: {len(set(everyone)) == 1}; loss {losses[0]:.3f} -> {losses[-1]:.3f}; {updates} updates")
