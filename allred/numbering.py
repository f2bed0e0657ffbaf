"""The numbers of every rank, computed from the node of each rank.

rank, size               the workers (mode sync: all ranks), for data shards and learning rates. On a
                         parameter server rank is size + its task index, so it is never the chief; clients follow the
                         servers
local_rank, local_size   among the workers of this node; on a server, among the servers; on a client, the clients
cross_rank, cross_size   among those that have this local rank on their nodes
world_rank, world_size   the MPI world: first the servers, then the workers, then the clients
leader                   the lowest rank of this node
"""

import collections
import dataclasses

from allred.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Numbering:
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

    @property
    def clients(self) -> int:
        return self.world_size - self.size - self.servers


def number(nodes: list[int], rank: int, servers: int = 0, clients: int = 0) -> Numbering:
    """Return the numbers of world rank `rank`. nodes: the node of each rank, any numbers.

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
    counts: collections.Counter[int] = collections.Counter()
    local_ranks = []  # the number of ranks before each one on its node
    for node in mine:
        local_ranks.append(counts[node])
        counts[node] += 1
    same_local = [r for r, local in enumerate(local_ranks) if local == local_ranks[index]]
    return Numbering(
        rank=workers + rank if rank < servers else rank - servers if rank < end else rank,
        size=workers,
        local_rank=local_ranks[index],
        local_size=counts[mine[index]],
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
