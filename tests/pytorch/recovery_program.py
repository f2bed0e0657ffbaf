"""The program of test_recovery.py: a torch model in a job of `allred run --elastic`.

DIRECTORY: where each process writes result-PID at its end. KILL: "rank,step": this rank of the first world is killed
in the backward pass or in the update of this step, according to WHERE. SESSION: use a session. EPOCHS. WORKERS: use
torch's DataLoader with this number of workers. DDP: average the gradients by DistributedDataParallel, with these
arguments (JSON); "hook": with a communication hook, and an all_reduce of the program after each step. HALVES: the
number of steps after which the scheduler halves the learning rate.
"""

import contextlib
import json
import os
import signal

import numpy as np
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import allred

ROWS, BATCH = 120, 12


def data():
    rng = np.random.default_rng(3)
    x = rng.standard_normal((ROWS, 6)).astype("f4")
    return x, np.tanh(x @ rng.standard_normal((6, 2)).astype("f4"))


def new_model():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))


def new_optimizer(model):
    return torch.optim.Adam(model.named_parameters(), lr=0.02)


def serial(epochs, halves=7):
    """Train alone. Returns the parameters."""
    (x, y), model = data(), new_model()
    optimizer = new_optimizer(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, halves, 0.5)
    for epoch in range(epochs):
        order = np.random.default_rng([0, epoch]).permutation(ROWS)
        for begin in range(0, ROWS, BATCH):
            rows = order[begin : begin + BATCH]
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(torch.from_numpy(x[rows])), torch.from_numpy(y[rows])).backward()
            optimizer.step()
            scheduler.step()
    return [parameter.detach().numpy() for parameter in model.parameters()]


def main():
    allred.init(banner=False)
    model = new_model()
    for parameter in model.parameters():
        parameter.data += allred.rank()  # the broadcast makes them equal
    optimizer, module = allred.distributed(new_optimizer(model)), model
    if "DDP" in os.environ:
        torch.distributed.init_process_group("allred")
        options = {"bucket_cap_mb": 0.0002, **json.loads(os.environ["DDP"])}
        hook = options.pop("hook", False)
        module = torch.nn.parallel.DistributedDataParallel(model, **options)
        if hook:
            module.register_comm_hook(None, allreduce_hook)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, int(os.environ.get("HALVES", 7)), 0.5)
    rank, step = map(int, os.environ.get("KILL", "-1,-1").split(","))
    where = os.environ.get("WHERE", "backward")
    batches, epochs = data(), int(os.environ["EPOCHS"])
    if "WORKERS" in os.environ:
        tracked = sampler = allred.data.DistributedBatchSampler(ROWS, batch_size=BATCH, epochs=epochs)
        dataset = torch.utils.data.TensorDataset(*map(torch.from_numpy, batches))
        workers = int(os.environ["WORKERS"])
        batches = torch.utils.data.DataLoader(dataset, batch_sampler=sampler, num_workers=workers)
    else:
        tracked = batches = allred.data.batches(*batches, batch_size=BATCH, epochs=epochs)
    lost = 0

    def dies_at(place):
        first_world = allred.world.current().generation == 1
        return place == where and first_world and allred.rank() == rank and optimizer.allred.global_step + 1 == step

    def die(*_):
        if dies_at("backward"):
            os.kill(os.getpid(), signal.SIGKILL)

    next(iter(model.parameters())).register_hook(die)  # the last gradient of a backward pass
    with contextlib.ExitStack() as stack:
        loop = batches
        if "SESSION" in os.environ:
            session = allred.Session(os.environ["SESSION"], save_steps=5, log_steps=None)
            stack.enter_context(session)
            session.track(params=module, optimizer=optimizer, data=tracked, scheduler=scheduler)
            loop = session.steps(batches)
        else:
            optimizer.allred.broadcast(module)
            loop = sampler.follow(batches) if "WORKERS" in os.environ else batches
        for x, y in loop:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(module(torch.as_tensor(x)), torch.as_tensor(y)).backward()
            if dies_at("update"):
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            lost += optimizer.allred.interrupted
            if "hook" in os.environ.get("DDP", ""):
                with contextlib.suppress(allred.RanksChanged):
                    torch.distributed.all_reduce(ones := torch.ones(1))
                    assert ones == torch.distributed.get_world_size()
            if "SESSION" in os.environ or not optimizer.allred.interrupted:
                scheduler.step()
    result = {
        "rank": allred.rank(), "size": allred.size(), "step": optimizer.allred.global_step, "lost": lost,
        "group": [torch.distributed.get_rank(), torch.distributed.get_world_size()] if "DDP" in os.environ else None,
        "scheduler": scheduler.state_dict()["_step_count"], "rate": optimizer.param_groups[0]["lr"],
        "parameters": [parameter.tolist() for parameter in model.parameters()],
    }  # fmt: skip
    with open(f"{os.environ['DIRECTORY']}/result-{os.getpid()}", "w") as file:
        json.dump(result, file)


if __name__ == "__main__":
    main()
