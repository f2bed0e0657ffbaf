"""The topology: the numbers of every rank, computed from the node of each rank.

rank, size               the workers (mode sync: all ranks), for data shards and learning rates. On a
                         parameter server rank is size + its task index, so it is never the chief; on a client, after
                         those of the servers
local_rank, local_size   among the workers of this node; on a server, among the servers; on a client, the clients
cross_rank, cross_size   among those that have this local rank on their nodes
world_rank, world_size   the MPI world: first the servers, then the workers, then the clients
leader                   the lowest rank of this node
"""

import contextlib
import dataclasses
import pathlib
from typing import Any

from allred import world
from allred.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Topology:
    """The numbers of one rank, and of all ranks."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    world_rank: int
    world_size: int
    nodes: int
    leader: int
    servers: int


def number(nodes: list[int], rank: int, servers: int = 0, clients: int = 0) -> Topology:
    """Return the topology of world rank `rank`. nodes: the node of each rank, any numbers.

    The first `servers` ranks are parameter servers, the last `clients` are clients.

    >>> t = number([7, 7, 3], rank=2)
    >>> (t.local_rank, t.local_size, t.cross_rank, t.cross_size, t.nodes)
    (0, 1, 1, 2, 2)
    >>> t = number([7, 7, 3], rank=2, servers=1)
    >>> (t.rank, t.size, t.local_rank, t.world_rank, t.world_size)
    (1, 2, 0, 2, 3)
    """
    end = len(nodes) - clients
    workers = end - servers
    first, last = (0, servers) if rank < servers else (servers, end) if rank < end else (end, len(nodes))
    mine, index = nodes[first:last], rank - first  # the nodes of the ranks with the same job
    local_ranks = [mine[:r].count(node) for r, node in enumerate(mine)]
    same_local = [r for r, local in enumerate(local_ranks) if local == local_ranks[index]]
    return Topology(
        rank=workers + rank if rank < servers else rank - servers if rank < end else rank,
        size=workers,
        local_rank=local_ranks[index],
        local_size=mine.count(mine[index]),
        cross_rank=same_local.index(index),
        cross_size=len(same_local),
        world_rank=rank,
        world_size=len(nodes),
        nodes=len(set(nodes)),
        leader=nodes.index(nodes[rank]),
        servers=servers,
    )


def pretend(sizes: str, ranks: int) -> list[int]:
    """Return the node of each rank for the setting `pretend_nodes`; [] if it is "none". Raises ConfigError if it is
    invalid.

    >>> pretend("3,1", ranks=4)
    [0, 0, 0, 1]
    """
    words = [] if sizes == "none" else [word.strip() for word in sizes.split(",")]
    numbers = [int(word) if word.isdecimal() else 0 for word in words]
    if words and (sum(numbers) != ranks or not all(numbers)):
        raise ConfigError(f"pretend_nodes={sizes!r} must be numbers of ranks, such as 2,2, that add up to {ranks}")
    return [node for node, count in enumerate(numbers) for _ in range(count)]


def node_id(comm: Any) -> int:
    """Return the lowest rank on this node. Collective over the mpi4py communicator `comm`."""
    from mpi4py import MPI

    node = comm.Split_type(MPI.COMM_TYPE_SHARED)  # MPI has no nonblocking form of it
    lowest = node.allreduce(comm.Get_rank(), op=MPI.MIN)
    node.Free()
    return int(lowest)


def rank() -> int:
    """Return this worker's number, 0 to size() - 1; worker 0 is the chief."""
    return world.current().topology.rank


def size() -> int:
    """Return the number of workers."""
    return world.current().topology.size


def local_rank() -> int:
    """Return this rank's number on its node."""
    return world.current().topology.local_rank


def local_size() -> int:
    """Return the number of ranks on this node."""
    return world.current().topology.local_size


def cross_rank() -> int:
    """Return this rank's number among the ranks of all nodes that have its local rank."""
    return world.current().topology.cross_rank


def cross_size() -> int:
    """Return the number of nodes that have a rank with this local rank."""
    return world.current().topology.cross_size


def world_rank() -> int:
    """Return this process's number in the MPI world."""
    return world.current().topology.world_rank


def world_size() -> int:
    """Return the number of processes of the MPI world."""
    return world.current().topology.world_size


def is_chief() -> bool:
    """Return whether this is worker 0, which writes checkpoints and messages; never true on a parameter server."""
    return world.current().topology.rank == 0


def job_name() -> str:
    """Return the job of this task: "ps" on a parameter server, "client" on a client, else "worker" or the name of the
    workers' job in the `ClusterSpec`."""
    here = world.current()
    if here.topology.rank < here.topology.size:
        return here.workers_job
    return "ps" if here.topology.world_rank < here.topology.servers else "client"


def role() -> str:
    """Return the job and the index of this task, for messages."""
    names = {"ps": "parameter server", "client": "client"}
    return f"{names.get(job_name(), 'worker')} {task_index()}"


def task_index() -> int:
    """Return this task's number in its job; for a worker, rank()."""
    here = world.current().topology
    first = {"ps": here.size, "client": here.size + here.servers}.get(job_name(), 0)
    return here.rank - first


def fabric(sys_class: pathlib.Path = pathlib.Path("/sys/class")) -> str:
    """Return an active network device of this host that MPI drives without TCP: "InfiniBand mlx5_0" (EFA devices have
    this class too) or "Slingshot cxi0"; "" if there is none."""
    for state in sorted(sys_class.glob("infiniband/*/ports/*/state")):
        with contextlib.suppress(OSError):
            if "ACTIVE" in state.read_text():
                return f"InfiniBand {state.parts[-4]}"
    return next((f"Slingshot {device.name}" for device in sorted(sys_class.glob("cxi/*"))), "")
