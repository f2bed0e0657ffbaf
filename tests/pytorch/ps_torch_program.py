"""Mode ps with a torch optimizer, with a server that runs this script: one worker is bit-identical to one process.

test_torch_ps.py starts it on 2 ranks: ps_torch_program.py OPTIMIZER
"""

import copy
import sys
import warnings

import numpy as np
import torch
from optimizer_case_runner import named
from torch import nn
from torch.nn import functional

import allred
from allred.errors import InputError

torch.set_num_threads(1)
warnings.simplefilter("error")

MAKE = {
    "sgd": lambda model: torch.optim.SGD(named(model), lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.01),
    "groups": lambda model: torch.optim.AdamW(
        [{"params": model[0].parameters(), "lr": 0.02}, {"params": model[2].parameters(), "betas": (0.8, 0.9)}], lr=0.01
    ),
    "halves": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
}
(kind,) = sys.argv[1:]
DTYPE = torch.bfloat16 if kind == "halves" else torch.float32


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 300), nn.Tanh(), nn.Linear(300, 3)).to(DTYPE)


def batch(step):
    generator = torch.Generator().manual_seed(100 * step)
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
# It changes betas and momentum, and adds entries to the groups, which the servers have without them.
schedule, schedule_of_plain = (torch.optim.lr_scheduler.OneCycleLR(each, 0.05, 10) for each in (opt, plain))
opt.allred.broadcast()
try:
    opt.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
except InputError as error:
    assert "add all groups before allred.distributed(optimizer)" in str(error)  # noqa: PT017
else:
    raise AssertionError("a server lacks this group")
losses = []
for step in range(10):
    losses.append(train(model, opt, schedule, batch(step)))
    assert losses[-1] == train(other, plain, schedule_of_plain, batch(step))
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
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; {opt.allred.statistics().updates} updates")
