"""`python -m allred bench ps`: a step with parameter servers: push, update by SGD, pull, through `opt.step`.

    ranks 0 to --servers - 1 serve, the others work -> verify a step -> time steps in turns (turns.py) -> verify all

Against raw MPI (peer.py) one server and one worker take turns in the same processes: the worker calls the server out
of its loop for some rounds of the peer. algbw = bytes / p50: a step moves the bytes twice, there and back.
"""

import argparse
import dataclasses
import os

import allred
from allred import arrays, native
from allred.bench import peer, sets, setting, table, values
from allred.bench.verify import WrongResultError
from allred.cluster import launcher
from allred.errors import ConfigError
from allred.modes.options import Options
from allred.ps import running
from allred.ps.consistency import Policy, Sync


def run(options: argparse.Namespace, command: str) -> None:
    """Measure, and print on worker 0. Raises ConfigError or WrongResultError on all ranks."""
    ranks = launcher.launched_size(os.environ)
    if options.against and (options.servers, ranks) != (1, 2):
        raise ConfigError("--against mpi compares one server and one worker: mpirun -np 2, and --servers 1")
    mpi_settings = setting.before_mpi(against=options.against is not None)
    allred.init(mode="ps", num_ps=options.servers, banner=False)
    from mpi4py import MPI

    here = running.current()
    policy = policy_of(options.consistency, here)
    comm = MPI.COMM_WORLD.Dup()
    workers = comm.Split(here.serves, here.rank)
    raw = None if options.against is None else peer.prepare(comm, sets.SERVED[options.set](), options.dtype, values.LR)
    where = {
        "op": "push, SGD, pull",
        **setting.describe(comm, mpi_settings),
        "allred": allred.__version__,
        "command": f"mpirun -np {ranks} {command}",
    }
    if here.serves:
        from allred.bench import ps_server  # imports MPI

        return ps_server.serve(here, policy, comm, raw)
    from allred.bench import ps_worker

    common = {
        "ranks": ranks,
        "servers": here.servers,
        "workers": here.workers,
        "consistency": type(policy).__name__.lower(),
        "dtype": arrays.name_of(options.dtype),
        "backend": "shm" if native.available and len(set(here.nodes)) == 1 else "mpi",
    }
    printer = table.Printer(options.json, speaks=here.worker == 0)
    printer.begin(options.bench, common, where, options.against)
    worker = ps_worker.Worker(options.set, options.dtype, policy, workers, comm, raw)
    try:
        for numbers in worker.measure(options.seconds):
            printer.line({"bench": options.bench, **worker.what, **common, **numbers, **where})
    except WrongResultError as error:
        worker.tell(str(error))
        raise
    finally:
        allred.shutdown()


def policy_of(name: str | None, here: running.Running) -> Policy:
    """The policy of that name, or of the settings. Raises ConfigError for backup workers."""
    config = here.config if name is None else dataclasses.replace(here.config, consistency=name)
    policy = Options("opt").policy(config)
    if isinstance(policy, Sync) and policy.replicas_to_aggregate not in (None, here.workers):
        raise ConfigError(
            f"in bench ps all workers make the same number of steps, and with {policy.replicas_to_aggregate} gradients "
            f"a step of {here.workers} workers one could be left waiting; leave ALLRED_REPLICAS_TO_AGGREGATE out"
        )
    return policy
