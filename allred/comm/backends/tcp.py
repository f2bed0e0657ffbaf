"""Backend tcp, of several hosts: shared memory within a host, TCP connections between hosts (csrc/network.h).

All collectives but alltoall are one operation in C, as on one host. An alltoall is composed of collectives of the host
and of an exchange of bytes between hosts; `slices` ranks of each host share the exchange, and each byte crosses to
another host once.

Results are the same on all ranks, and from run to run for the same hosts. The sum of a host has the order of its ranks;
the sum over the hosts has an order that depends on the position in the array.
"""

import itertools
import mmap
import socket

import numpy as np

from allred import arrays
from allred.arrays import Array
from allred.comm.backends import connections
from allred.comm.backends.backend import Backend, SingleBackend
from allred.comm.backends.segment import share
from allred.comm.backends.shm import CHUNK_BYTES, ShmBackend
from allred.comm.bootstrap import Bootstrap
from allred.comm.work import Steps
from allred.errors import AllredError, ConfigError, RemoteRankError
from allred.native._kernels import network_bytes, segment_bytes
from allred.wording import named

WINDOW_BYTES = 2**20


class TcpBackend(ShmBackend):
    """The ranks of `bootstrap`, which the backend owns.

    hosts: the ranks of each host, in order. node: the backend of the ranks of this host, which it owns too. memory,
    windows: shared by the ranks of this host. sockets: to the rank with the same local number, by host. names: of the
    hosts.
    """

    name = "tcp"
    encodes = True

    def __init__(
        self,
        bootstrap: Bootstrap,
        hosts: list[list[int]],
        node: Backend,
        memory: mmap.mmap,
        windows: mmap.mmap,
        sockets: dict[int, socket.socket],
        names: list[str],
    ) -> None:
        super().__init__(node.rank, node.size, memory, bootstrap)
        self.rank, self.size = bootstrap.rank, bootstrap.size
        self._hosts, self._node, self._windows, self._sockets, self._names = hosts, node, windows, sockets, names
        self._here = next(index for index, ranks in enumerate(hosts) if self.rank in ranks)
        self._slices = min(map(len, hosts))
        self._order = [rank for ranks in hosts for rank in ranks]
        self._position = sorted(range(self.size), key=self._order.__getitem__)
        fds = [sockets[host].fileno() if host in sockets else -1 for host in range(len(hosts))]
        self.segment.set_network(windows, window_bytes(hosts), self._here, self._slices, hosts, fds)

    def connection_error(self) -> AllredError | None:
        lost = self.segment.lost_host
        if lost < 0:
            return None
        ranks, name = self._hosts[lost], self._names[lost]
        text = (
            f"the TCP connection to host {name} ({named('rank', ranks)}) was lost: its processes may have been killed"
        )
        return RemoteRankError(text, ranks[0], name, 1)

    def close(self, sound: bool) -> None:
        self._node.close(sound)
        super().close(sound)
        self._windows.close()
        for one in self._sockets.values():
            one.close()

    def exchange(self, record: bytes) -> Steps[list[bytes]]:
        headers = yield from super().exchange(record)
        return [headers[position] for position in self._position]

    def alltoall(self, send: Array, recv: Array, counts: Array) -> Steps[None]:
        ours = self._hosts[self._here]
        totals = [int(counts[rank].sum()) for rank in ours]
        everything = np.empty(sum(totals), np.uint8)
        yield from self._node.allgather(send, everything, totals)
        rows = dict(zip(ours, np.split(everything, np.cumsum(totals)[:-1]), strict=True))
        offsets = np.cumsum(np.hstack([np.zeros((self.size, 1), np.int64), counts]), axis=1)
        outgoing, incoming = [], []
        for ranks in self._hosts:
            parts = [rows[mine][offsets[mine, rank] : offsets[mine, rank + 1]] for mine in ours for rank in ranks]
            outgoing.append(np.concatenate(parts))
            incoming.append(np.empty(sum(int(counts[rank, mine]) for rank in ranks for mine in ours), np.uint8))
        yield from self._swap(outgoing, incoming)
        starts = np.cumsum([0, *counts[:, self.rank]])
        for ranks, block in zip(self._hosts, incoming, strict=True):
            at = 0
            for rank in ranks:
                for mine in ours:
                    count = int(counts[rank, mine])
                    if mine == self.rank:
                        recv[starts[rank] : starts[rank] + count] = block[at : at + count]
                    at += count

    # Between hosts.

    def _slice(self, size: int) -> tuple[int, int]:
        """Return start and end of what this rank sends and receives of `size` bytes."""
        index = self._node.rank
        return _cuts(0, size, self._slices)[index] if index < self._slices else (0, 0)

    def _swap(self, outgoing: list[Array], incoming: list[Array]) -> Steps[None]:
        """Send bytes to each host and receive from each. All ranks of a host pass the same bytes and get the same."""
        out, back = np.concatenate(outgoing), np.empty(sum(block.size for block in incoming), np.uint8)
        to, back_parts = (self._slices_of(blocks) for blocks in (outgoing, incoming))
        yield from self._exchange(out, to, back, back_parts)
        at = 0
        for block in incoming:
            block[:] = back[at : at + block.size]
            at += block.size
            yield from self._gather_slices(block)

    def _slices_of(self, blocks: list[Array]) -> list[tuple[int, int]]:
        """Return where this rank's slice of each block lies in their concatenation."""
        found, at = [], 0
        for block in blocks:
            start, stop = self._slice(block.size)
            found.append((at + start, at + stop))
            at += block.size
        return found

    def _exchange(
        self, send: Array, to: list[tuple[int, int]], recv: Array, back_parts: list[tuple[int, int]]
    ) -> Steps[None]:
        """Send send[start:stop] to each host, and receive recv[start:stop] from each; this host is included."""
        to_starts, to_counts = [start for start, _ in to], [stop - start for start, stop in to]
        starts, counts = [start for start, _ in back_parts], [stop - start for start, stop in back_parts]
        yield self.segment.begin_host_exchange(send, to_starts, to_counts, recv, starts, counts)

    def _gather_slices(self, data: Array) -> Steps[None]:
        """Complete `data` on all ranks of this host. Each has its slice."""
        if self._node.size == 1:
            return
        sizes = [stop - start for start, stop in _cuts(0, data.size, self._slices)]
        sizes += [0] * (self._node.size - self._slices)
        start, stop = self._slice(data.size)
        yield from self._node.allgather(data[start:stop].copy(), data, sizes)


def connect(
    bootstrap: Bootstrap, nodes: list[int], memory: mmap.mmap | None, network: str, timeout_s: float
) -> TcpBackend:
    """Make the backend of the ranks of `bootstrap`, which it owns. Collective and blocking. Raises ConfigError, the
    same on all ranks, if some of them cannot connect, or if a node has too little shared memory.

    nodes: the node of each rank. memory: for the operations within this node, see `segment_memory`; None if it has one
    rank. network, timeout_s: the settings of these names.
    """
    hosts = [[rank for rank, node in enumerate(nodes) if node == name] for name in dict.fromkeys(nodes)]
    groups = [list(group) for group in zip(*hosts, strict=False)]
    sockets, problem = connections.connect(bootstrap, groups, network, timeout_s)
    if problem:
        raise ConfigError(f"{problem}; set ALLRED_NETWORK to the interface between the hosts, or ALLRED_TRANSPORT=mpi")
    here = next(index for index, members in enumerate(hosts) if bootstrap.rank in members)
    size, local = len(hosts[here]), hosts[here].index(bootstrap.rank)
    node_bootstrap = bootstrap.subset(hosts[here])
    segment, windows = (
        _own_memory(nbytes) if size == 1 else share(node_bootstrap, nbytes)
        for nbytes in (segment_bytes(size, CHUNK_BYTES), network_bytes(size, bootstrap.size, window_bytes(hosts)))
    )
    node_bootstrap.close()
    of_ranks = bootstrap.allgather_object((segment is not None and windows is not None, socket.gethostname()))
    if not all(has_memory for has_memory, _ in of_ranks):
        for one in sockets.values():
            one.close()
        raise ConfigError("a node has too little memory for ALLRED_TRANSPORT=tcp; use ALLRED_TRANSPORT=mpi")
    assert segment is not None
    assert windows is not None
    node = SingleBackend() if memory is None else ShmBackend(local, size, memory)
    of_rank = {rank: index for index, members in enumerate(hosts) for rank in members}
    by_host = {of_rank[rank]: one for rank, one in sockets.items()}
    names = [of_ranks[members[0]][1] for members in hosts]
    return TcpBackend(bootstrap, hosts, node, segment, windows, by_host, names)


def _own_memory(nbytes: int) -> mmap.mmap | None:
    try:
        return mmap.mmap(-1, nbytes)
    except OSError:
        return None


def window_bytes(hosts: list[list[int]]) -> int:
    """Return the bytes of a window: enough that each host's block of each slice fills a link for some time."""
    return min(max(WINDOW_BYTES, len(hosts) * min(map(len, hosts)) * 2**17), 2**23)


def _cuts(start: int, stop: int, parts: int) -> list[tuple[int, int]]:
    ends = np.cumsum([start, *arrays.split_sizes(stop - start, parts)]).tolist()
    return list(itertools.pairwise(ends))
