"""The trainings of soak.py: `soak_program.py KIND DIRECTORY STEPS`. Each parameter is the number of times that a sample
was used, so that a lost or a repeated update gives a wrong result.

KIND plain: a loop in mode sync or ps; each rank uses its own samples in each step. KIND local: the same in mode local.
KIND session: a session with checkpoints, each sample once in each epoch. KIND torch: a hooked optimizer of torch. KIND
ddp: the DDP of torch.

Each rank writes its process id into DIRECTORY/pid-START-WORLD_RANK. After its last step each worker writes
DIRECTORY/completed-WORLD_RANK, in a session with the step, and at the end its parameters into
DIRECTORY/result-WORLD_RANK.
"""

import faulthandler
import os
import pathlib
import sys
import time

import numpy as np

import allred

ROWS, EPOCHS, PAUSE_S, STACKS_S = 97, 40, 0.005, 75


def samples_of(rank, step):
    return np.random.default_rng((rank, step)).integers(0, ROWS, 8)


def write_pid(directory, start=1):
    path = directory / f"new-{allred.world_rank()}"
    path.write_text(str(os.getpid()))
    path.rename(directory / f"pid-{start}-{allred.world_rank()}")


def write_completed(directory, step=""):
    (directory / f"completed-{allred.world_rank()}").write_text(str(step))


def write_result(directory, seen):
    path = directory / f"new-result-{allred.world_rank()}"
    np.savetxt(path, seen)
    path.rename(directory / f"result-{allred.world_rank()}")


def plain(directory, steps):
    allred.init(banner=False)
    write_pid(directory)
    params, is_sync = {"seen": np.zeros(ROWS)}, allred.world_size() == allred.size()
    opt = allred.distributed(allred.optim.SGD(lr=1.0), **({"op": allred.Sum} if is_sync else {}))
    opt.broadcast(params)
    for step in range(steps):
        time.sleep(PAUSE_S)
        counts = np.bincount(samples_of(allred.rank(), step), minlength=ROWS)
        opt.step(params, {"seen": -counts.astype(float)})
    write_completed(directory)
    if not is_sync:
        opt.finish()
        allred.barrier()
        opt.pull(params)
    write_result(directory, params["seen"])


def local(directory, steps):
    allred.init(banner=False)
    write_pid(directory)
    params = {"seen": np.zeros(ROWS)}
    opt = allred.distributed(allred.optim.SGD(lr=1.0), every=10, outer=allred.optim.SGD(lr=1.0))
    opt.broadcast(params)
    for step in range(steps):
        time.sleep(PAUSE_S)
        opt.step(params, {"seen": -np.bincount(samples_of(allred.rank(), step), minlength=ROWS).astype(float)})
    write_completed(directory)
    write_result(directory, params["seen"])


def session(directory, steps):
    allred.init(banner=False)
    params = {"seen": np.zeros(ROWS)}
    opt = allred.distributed(allred.optim.SGD(lr=1.0), op=allred.Sum)
    batches = allred.data.batches(np.arange(ROWS), batch_size=7, epochs=EPOCHS, seed=1)
    with allred.Session(checkpoint_dir=directory / "checkpoints", save_steps=5, log_steps=None) as session:
        session.track(params=params, optimizer=opt, data=batches)
        write_pid(directory, session.starts)
        for numbers in session.steps(batches):
            time.sleep(PAUSE_S)
            opt.step(params, {"seen": -np.bincount(numbers, minlength=ROWS).astype(float)})
        write_completed(directory, session.step)
    if session.asked == "end of data":
        write_result(directory, params["seen"])


def torch(directory, steps):
    import torch

    allred.init(banner=False)
    write_pid(directory)
    seen = torch.nn.Parameter(torch.zeros(ROWS, dtype=torch.float64))
    opt = allred.distributed(torch.optim.SGD([seen], lr=1.0), op=allred.Sum)
    for step in range(steps):
        time.sleep(PAUSE_S)
        counts = torch.bincount(torch.from_numpy(samples_of(allred.rank(), step)), minlength=ROWS)
        opt.zero_grad()
        (-(seen * counts).sum()).backward()
        opt.step()
    write_completed(directory)
    write_result(directory, seen.detach().numpy())


def ddp(directory, steps):
    import torch

    torch.distributed.init_process_group("allred")
    write_pid(directory)
    model = torch.nn.Linear(ROWS, 1, bias=False, dtype=torch.float64)
    torch.nn.init.zeros_(model.weight)
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    opt = torch.optim.SGD(model.parameters(), lr=1.0)
    for step in range(steps):
        time.sleep(PAUSE_S)
        counts = torch.bincount(torch.from_numpy(samples_of(allred.rank(), step)), minlength=ROWS)
        opt.zero_grad()
        (-parallel(counts.double())).sum().backward()
        opt.step()
    write_completed(directory)
    write_result(directory, model.weight.detach().numpy()[0])
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    faulthandler.dump_traceback_later(STACKS_S)  # of a training that does not end
    train = {"plain": plain, "local": local, "session": session, "torch": torch, "ddp": ddp}[sys.argv[1]]
    train(pathlib.Path(sys.argv[2]), int(sys.argv[3]))
