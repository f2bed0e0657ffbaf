"""The programs of nth_failure.py: mpirun -np 2 python programs.py NAME DIRECTORY

Each rank checks its results, and prints `rank 0 done`, `rank 0 wrong: ...` or `rank 0 raised TypeOfError: text`. The
rank in NTH_RANK counts calls: from the beginning of init() in program `init`, in the others later.
"""

import ctypes
import importlib
import os
import pkgutil
import sys

import numpy as np

import allred
from allred import launcher_variables, startup

SHAPES = {"weight": (100, 100), "bias": (10,), "scale": ()}  # the first one is reduced in the arena
STEPS = 3


# Packages of allred whose modules are imported before calls are counted: imports would be most of the calls.
PACKAGES = (
    "checkpoint",
    "cluster",
    "comm",
    "data",
    "embeddings",
    "modes",
    "ps",
    "runtime",
    "session",
    "timeline",
    "watch",
)


class WrongResult(Exception):  # noqa: N818
    """A result differs from the expected one."""


def begin(rank=None):
    """Count calls from here on, in the chosen rank. rank: this one; default: the launcher's variables say it."""
    for name in PACKAGES:
        if name in ("modes", "ps") and "mpi4py.MPI" not in sys.modules:
            continue  # they import MPI, and init() has not started it
        package = importlib.import_module(f"allred.{name}")
        for module in pkgutil.walk_packages(package.__path__, f"allred.{name}."):
            if not module.name.endswith((".process", ".mpi", "_mpi", ".mpi_bootstrap", ".mpi_messages")):
                importlib.import_module(module.name)
    for name in ("init", "allreduce", "allgather_object", "shutdown"):
        getattr(allred, name)
    rank = launcher_variables.rank(os.environ) if rank is None else rank
    if os.environ.get("NTH_RANK") == str(rank) and "failing" in os.environ.get("LD_PRELOAD", ""):
        ctypes.CDLL(None).failing_calls_begin()


def expect(what, expected, got):
    if not np.array_equal(expected, got):
        raise WrongResult(f"{what}: expected {expected}, got {got}")


def new_parameters(value=0.0):
    return {name: np.full(shape, value, np.float32) for name, shape in SHAPES.items()}


def expect_parameters(what, value, params):
    for name, param in params.items():
        expect(f"{what}, {name}", np.full(SHAPES[name], value, np.float32), param)


def collectives():
    total = sum(rank + 1 for rank in range(allred.size()))
    for shape in ((4,), (300, 100)):
        mine = np.full(shape, allred.rank() + 1, np.float64)
        expect("allreduce", np.full(shape, total), allred.allreduce(mine, op=allred.Sum))
    expect("allgather_object", list(range(allred.size())), allred.allgather_object(allred.rank()))


def init(directory):
    begin()
    allred.init()
    collectives()


def shutdown(directory):
    allred.init()
    begin()
    collectives()
    allred.shutdown()


def train(opt, params, steps, first=0, mode="sync"):
    for step in range(steps):
        opt.step(params, {name: np.full_like(param, allred.rank() + 1) for name, param in params.items()})
        if mode == "sync":
            mean = sum(rank + 1 for rank in range(allred.size())) / allred.size()
            expect_parameters(f"step {step}", -mean * (first + step + 1), params)


def sync(directory):
    allred.init()
    begin()
    params, opt = new_parameters(), allred.distributed(allred.optim.SGD(lr=1.0))
    opt.broadcast(params)
    train(opt, params, STEPS)


def ps(directory):
    """One server and one worker."""
    allred.init(mode="ps", num_ps=1)
    begin()
    params, opt = new_parameters(), allred.distributed(allred.optim.SGD(lr=1.0))
    opt.broadcast(params)
    train(opt, params, STEPS, mode="ps")
    opt.finish()
    opt.pull(params)
    expect_parameters("pull", -1.0 * STEPS, params)


def local(directory):
    """Mode local: parameters are averaged every second step."""
    allred.init(mode="local")
    begin()
    params, opt = new_parameters(), allred.distributed(allred.optim.SGD(lr=1.0), every=2, outer=allred.optim.SGD(1.0))
    opt.broadcast(params)
    for _ in range(4):
        opt.step(params, {name: np.full_like(param, allred.rank() + 1) for name, param in params.items()})
    expect_parameters("step 4", -1.5 * 4, params)


def checkpoint(directory):
    """There is a checkpoint of step 1; the one of step 2 may fail."""
    allred.init()
    params, opt = new_parameters(), allred.distributed(allred.optim.SGD(lr=1.0))
    opt.broadcast(params)
    train(opt, params, 1)
    opt.save(directory, params)
    train(opt, params, 1, first=1)
    begin()
    opt.save(directory, params)


def checkpoint_ps(directory):
    """The same in mode ps."""
    allred.init(mode="ps", num_ps=1)
    if allred.rank() >= allred.size():  # the server, which stays in distributed()
        begin()
    params, opt = new_parameters(), allred.distributed(allred.optim.SGD(lr=1.0))
    opt.broadcast(params)
    train(opt, params, 1, mode="ps")
    opt.save(directory, params)
    train(opt, params, 1, mode="ps")
    begin()
    opt.save(directory, params)


def restore(directory):
    """There is a checkpoint of step 1."""
    allred.init()
    params, opt = new_parameters(), allred.distributed(allred.optim.SGD(lr=1.0))
    begin()
    step = opt.restore(directory, params)
    expect("the restored step", 1, step)
    expect_parameters("restore", -1.5, params)
    train(opt, params, 1, first=1)


def session(directory):
    """A session with a checkpoint at each second step. The first start fails at step 3; `allred run` starts again."""
    allred.init()
    begin()
    params, opt = new_parameters(), allred.distributed(allred.optim.SGD(lr=1.0))
    with allred.Session(directory, save_steps=2, max_steps=4, log_steps=None) as session:
        session.track(params=params, optimizer=opt)
        while not session.should_stop():
            if session.step == 3 and os.environ.get("ALLRED_STARTS", "1") == "1" and allred.rank() == 0:
                raise SystemExit(3)
            opt.step(params, {name: np.full_like(param, allred.rank() + 1) for name, param in params.items()})
    expect_parameters("after the session", -1.5 * 4, params)


def spark(directory):
    """The driver: allred.spark.run() starts two ranks. It prints what the ranks print under mpirun."""
    sys.path.append(f"{os.path.dirname(__file__)}/../spark")
    import spark_session

    import allred.spark

    session = spark_session.build("local[2]")
    try:
        for rank in allred.spark.run(rank_of_spark, num_proc=2):
            print(f"rank {rank} done", flush=True)
    except allred.RemoteRankError as error:
        kind = (error.exception or "RemoteRankError").partition(":")[0].rpartition(".")[2]
        print(f"rank {error.rank} raised {kind}", flush=True)
        sys.exit(str(error).partition("\n")[0])
    finally:
        session.stop()


def rank_of_spark():
    """Count from the beginning of init(). This rank has connected to the other one before."""
    begin(startup._tasks[0].rank)
    allred.init()
    collectives()
    return allred.rank()


def main():
    name, directory = sys.argv[1], sys.argv[2]
    who = launcher_variables.rank(os.environ)
    try:
        globals()[name](directory)
    except WrongResult as error:
        print(f"rank {who} wrong: {error}", flush=True)
        raise
    except BaseException as error:
        print(f"rank {who} raised {type(error).__name__}: {error}".replace("\n", " "), flush=True)
        raise
    print(f"rank {who} done", flush=True)


if __name__ == "__main__":
    main()
