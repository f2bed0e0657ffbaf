"""The files that steady calls visit: `mpirun -np 2 python call_paths_program.py`. Exits with an error if they are more
than they may be, and prints their paths."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

import allred

sys.path.insert(0, str(Path(__file__).parents[1]))
from call_path import files_of, path_of

MOST = {"hooked step": 16, "dist.all_reduce": 6, "dist.all_reduce, asynchronous": 9}
REPEATS = 30  # if a rank waits for another for a millisecond, the path is longer


def hooked_step():
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    opt = allred.distributed(torch.optim.SGD(model.named_parameters(), lr=0.01))
    opt.allred.broadcast(model)
    x = torch.randn(4, 8)

    def step():
        opt.zero_grad()
        model(x).square().mean().backward()
        opt.step()

    return step


dist.init_process_group("allred")
tensor = torch.ones(100)
calls = {
    "hooked step": hooked_step(),
    "dist.all_reduce": lambda: dist.all_reduce(tensor),
    "dist.all_reduce, asynchronous": lambda: dist.all_reduce(tensor, async_op=True).wait(),
}
for name, call in calls.items():
    for _ in range(10):
        call()
    shortest = min((path_of(call) for _ in range(REPEATS)), key=len)
    files = files_of(shortest)
    assert 0 < len(files) <= MOST[name], "\n".join([f"{name}: {len(files)} files, {sorted(files)}", *shortest])
    if dist.get_rank() == 0:
        print(f"{name}: {len(files)} files")
dist.destroy_process_group()
print("all paths are short")
