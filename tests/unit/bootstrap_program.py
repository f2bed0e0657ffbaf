"""Creates worlds without MPI, as one task of a rendezvous; at the end rank 1 dies. Started by test_bootstrap.py.

Usage: bootstrap_program.py TASK DIES PORTS...; DIES: the task that ends before it takes part in an exchange, or -1
"""

import contextlib
import dataclasses
import os
import socket
import sys

import numpy as np

import allred
from allred import native, numbering, world
from allred.comm import recording
from allred.comm.bootstrap import Bootstrap
from allred.comm.create import create
from allred.comm.process_set import PROCESS_SETS, ProcessSets
from allred.comm.select import TransportFacts, plan
from allred.config import Config
from allred.errors import RemoteRankError
from allred.launch import rendezvous_bootstrap
from allred.launch.rendezvous_bootstrap import RendezvousBootstrap, RendezvousConnection
from allred.launch.rendezvous_client import rendezvous
from allred.world import World


def enter(ranks: Bootstrap, nodes: list[int], generation: int) -> None:
    """Create a world of all ranks. nodes: the node of each rank."""
    config = dataclasses.replace(Config(), timeout_s=30.0, network="127.0.0.1", watcher=False)
    facts = [TransportFacts(node, has_mpi=False, has_kernels=native.available) for node in nodes]
    ranks.generation = generation
    ranks.open_messages(config.network, config.timeout_s)
    communicator, facts = create(ranks, facts, config)
    here = World(numbering.number(nodes, ranks.rank), communicator, config, "; ".join(plan(facts, config).reasons))
    world.install(here)
    PROCESS_SETS.set(here, ProcessSets(ranks, 0, communicator, facts, config))
    here.queues.add(communicator.queue)


def leave() -> None:
    here = world.current()
    PROCESS_SETS.of(here).close()
    here.communicator.close()
    PROCESS_SETS.of(here).bootstrap.close()
    world.install(None)


def train() -> float:
    rank, size = allred.rank(), allred.size()
    assert float(allred.allreduce(rank, allred.Sum)) == size * (size - 1) / 2
    large = np.full(1_000_000, rank, np.float32)
    assert (allred.allreduce(large, allred.Max) == size - 1).all()
    assert allred.broadcast_object({"of": rank}, root=1) == {"of": 1}
    ends = allred.ProcessSet([0, 2])
    if ends.included():
        assert allred.allgather(np.array([rank]), process_set=ends).tolist() == [0, 2]
    w = np.zeros(5)
    opt = allred.distributed(allred.optim.SGD(lr=1.0))
    for _ in range(10):
        opt.step([w], [np.full(5, float(rank))])
    return float(w[0])


def send_and_receive() -> None:
    comm = world.current().communicator
    before, after, found = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size, np.zeros(300_000)
    sent = comm.send(np.full(300_000, float(comm.rank)), after, tag=4)
    assert comm.recv(found, tag=4).wait() == before
    assert (found == before).all()
    sent.wait()
    ends = allred.ProcessSet([0, 2])
    if ends.included():
        found = np.zeros(3)
        if comm.rank == 0:
            ends.communicator().send(np.ones(3), 2).wait()
        else:
            assert ends.communicator().recv(found, 0).wait() == 0
            assert found.tolist() == [1.0] * 3
    clock = recording.measure_clock(comm.backend.messages, [0, 1, 2])
    _, offset, error = comm.queue.start("the comparison of clocks", clock).wait()
    assert abs(offset) <= error  # it is one clock


def lose_rank_1() -> None:
    comm = world.current().communicator
    comm.barrier().wait()
    if comm.rank == 1:
        os._exit(0)
    with contextlib.suppress(RemoteRankError):
        comm.recv(np.zeros(1), 1).wait()
        raise AssertionError("a dead rank has sent a message")
    try:
        comm.send(np.zeros(1), 1, tag=1).wait()
    except RemoteRankError as error:
        print(str(error).replace(socket.gethostname(), "HOST"), error.rank, flush=True)
    os._exit(0)  # the rendezvous process has reported the death, too


def main() -> None:
    task, dies, *ports = (int(word) for word in sys.argv[1:])
    addresses = {f"task {number}": f"127.0.0.1:{port}" for number, port in enumerate(ports)}
    joined = rendezvous(addresses, f"task {task}", "", 60.0)
    if task == dies:
        return
    connection = RendezvousConnection(joined, 30.0)
    connection.report("starts")
    ranks = RendezvousBootstrap(connection)
    assert ranks.lowest_rank_on_node() == 0
    assert ranks.broadcast_object(task, root=2) == 2
    files = []
    for generation, nodes in enumerate(([0, 0, 0], [0, 0, 1], [0, 1, 2]), 1):
        if generation == 3:  # messages by TCP
            rendezvous_bootstrap.shared_memory_domain = lambda: str(task)
        enter(ranks, nodes, generation)
        print(world.current().communicator.name, train(), flush=True)
        send_and_receive()
        leave()
        files.append(len(os.listdir("/proc/self/fd")))
    assert files[1] == files[2], files
    enter(ranks, [0, 0, 0], 4)
    assert "mpi4py" not in sys.modules
    lose_rank_1()


main()
