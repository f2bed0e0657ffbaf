"""Makes communicators: tries the transport that select.py chooses, and returns failures as facts, from which it chooses
again."""

import dataclasses
import mmap
from collections import Counter

from allred.comm.backends.backend import SingleBackend
from allred.comm.bootstrap import Bootstrap
from allred.comm.communicator import Communicator
from allred.comm.group import T
from allred.comm.select import TransportFacts, memory_nodes, plan
from allred.comm.work import Steps, Work, WorkQueue
from allred.config import Config
from allred.errors import ConfigError, InputError
from allred.gpu import streams
from allred.gpu.launch_order import LaunchTurn
from allred.gpu.streams import Device
from allred.numbering import number


def create(
    bootstrap: Bootstrap, facts: list[TransportFacts], config: Config
) -> tuple[Communicator, list[TransportFacts]]:
    """Make the communicator of host arrays on the transport that `plan` chooses. It owns `bootstrap`. Return it, and
    the facts with what the attempt has shown. Collective and blocking.

    Raises ConfigError, the same on all ranks, if `plan` does, if hosts cannot connect by TCP, or if a node has too
    little shared memory for it. Then it closes `bootstrap`.
    """
    try:
        communicator, facts = _create(bootstrap, facts, config)
    except ConfigError:
        bootstrap.close()
        raise
    communicator.generation = bootstrap.generation
    return communicator, facts


def _create(
    bootstrap: Bootstrap, facts: list[TransportFacts], config: Config
) -> tuple[Communicator, list[TransportFacts]]:
    memory, arenas = None, None
    if plan(facts, config).within == "shm":
        memory, arenas, shared = _share_memory(bootstrap, [each.node for each in facts])
        facts = [dataclasses.replace(each, shares_memory=one) for each, one in zip(facts, shared, strict=True)]
    chosen, nodes = plan(facts, config).backend, memory_nodes(facts)
    if chosen == "single":
        bootstrap.close()
        return Communicator(SingleBackend(), config.timeout_s), facts
    if chosen == "mpi":
        from allred.comm.backends.mpi import MpiBackend  # imports MPI

        return Communicator(MpiBackend(bootstrap.mpi), config.timeout_s), facts
    if chosen == "tcp":
        from allred.comm.backends import tcp

        return Communicator(
            tcp.connect(bootstrap, nodes, memory, config.network, config.timeout_s), config.timeout_s
        ), facts
    from allred.comm.backends.shm import ShmBackend

    here, owned = number(nodes, bootstrap.rank), bootstrap if chosen == "shm" else None
    node = SingleBackend() if memory is None else ShmBackend(here.local_rank, here.local_size, memory, owned, arenas)
    if chosen == "shm":
        return Communicator(node, config.timeout_s), facts
    from allred.comm.backends.shm_mpi import ShmMpiBackend

    return Communicator(ShmMpiBackend(bootstrap.mpi, node, min(Counter(nodes).values())), config.timeout_s), facts


def _share_memory(
    bootstrap: Bootstrap, nodes: list[int]
) -> tuple[mmap.mmap | None, list[mmap.mmap] | None, list[bool]]:
    """Let the ranks of each node share memory. Return the memory of this node and its arenas, None if it has none, and
    for each rank whether it shares memory with others. Collective."""
    from allred.comm.backends import peer_arenas
    from allred.comm.backends.shm import segment_memory  # imports the C extension

    of_node = bootstrap.subset([rank for rank, node in enumerate(nodes) if node == nodes[bootstrap.rank]])
    memory = segment_memory(of_node) if of_node.size > 1 else None
    arenas = None if memory is None else peer_arenas.share(of_node)
    shared = bootstrap.allgather_object(memory is not None)
    of_node.close()
    return memory, arenas, shared


def add_devices(communicator: Communicator, facts: list[TransportFacts], config: Config) -> list[TransportFacts]:
    """Choose the GPU of each rank, and let the communicator take arrays on GPUs too, if `plan` does. Return the
    facts with the GPU problems. Collective. Only for the communicator of all workers: a rank has the same GPU in
    all others.

    Raises ConfigError, the same on all ranks, if `plan` does.
    """
    if not plan(facts, config).device:
        return facts
    problem = ""
    try:
        gpus, nodes = [each.gpus for each in facts], [each.node for each in facts]
        device = Device(streams.bind(gpus, nodes, communicator.rank), communicator.rank)
    except Exception as error:  # cupy is for another CUDA version or lacks NCCL; the other ranks have to know
        problem = f"{type(error).__name__}: {error}"
    problems = communicator.allgather_object(problem).wait()
    facts = [dataclasses.replace(each, gpu_problem=text) for each, text in zip(facts, problems, strict=True)]
    if chosen := plan(facts, config).device:
        add_device(communicator, device, chosen, config.nccl_16bit == "native")
    return facts


def add_device(
    communicator: Communicator,
    device: Device,
    name: str,
    native_halves: bool = False,
    queue: WorkQueue | None = None,
) -> None:
    """Add a device backend.

    Arguments:
        name: of the backend, nccl or staged. native_halves: see NcclBackend.
        queue: of the communicator that starts the operations; default: this one.
    """
    from allred.comm.backends.nccl import NcclBackend  # only jobs with GPUs need these
    from allred.comm.backends.staged import StagedBackend
    from allred.comm.device_collectives import DeviceCollectives

    host = communicator.backend
    if name == "staged":
        communicator.devices = StagedBackend(host, device)
    else:
        communicator.devices = NcclBackend(host, communicator.ranks, device, queue or communicator.queue, native_halves)
    communicator.gpu, communicator.name = DeviceCollectives(communicator), name


class NoCollectives(Communicator):
    """The communicator of a parameter server or a client: collectives are only for workers, and raise InputError."""

    def __init__(self, timeout_s: float, is_client: bool = False) -> None:
        super().__init__(SingleBackend(), timeout_s)
        self.name = "none"
        self._is_client = is_client

    def start(self, kind: str, name: str, body: Steps[T], turn: LaunchTurn | None = None) -> Work[T]:
        body.close()
        if self._is_client:
            raise InputError(
                f"{kind} was called by a client, but collectives are for workers. Call it in a function that all "
                "workers run: session.start(function) for each"
            )
        raise InputError(
            f"{kind} was called by a parameter server, but collectives are for workers. A server runs the script up to "
            "allred.distributed(...), where it serves: create the optimizer before this call, or make the call only if "
            "allred.rank() < allred.size()"
        )
