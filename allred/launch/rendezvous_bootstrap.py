"""Forms communicators without MPI, through the rendezvous process of tasks that were started without a launcher."""

import base64
import hashlib
import os
import select
import socket
import time
from collections import defaultdict
from collections.abc import Sequence

from allred.comm.bootstrap import Bootstrap
from allred.comm.work import Polled, Steps
from allred.errors import AllredError, CollectiveTimeout
from allred.launch.rendezvous_client import Joined, shared_memory_domain
from allred.runtime.channel import Channel


class RendezvousBootstrap(Bootstrap):
    """Some tasks of a rendezvous, by default all of them.

    connection: to the rendezvous process. members: the ranks of the tasks.
    A call raises AllredError if another task ends before it has reported that it has started, and CollectiveTimeout.
    """

    launcher_ends_job = False

    def __init__(self, connection: "RendezvousConnection", members: Sequence[int] = ()) -> None:
        self._connection, self._members = connection, tuple(members or range(connection.size))
        super().__init__(self._members.index(connection.rank), len(self._members))

    def allgather(self, mine: bytes) -> list[bytes]:
        return self._connection.wait(self._connection.send(self._members, mine))

    def subset(self, ranks: Sequence[int]) -> "RendezvousBootstrap":
        return RendezvousBootstrap(self._connection, [self._members[rank] for rank in ranks])

    def assemble(self, ranks: Sequence[int], title: str) -> Steps[None]:
        key = self._connection.send([self._members[rank] for rank in ranks], b"", title)
        yield Polled(lambda: self._connection.has_all(key), waits_for_peers=True)
        self._connection.wait(key)

    def lowest_rank_here(self) -> int:
        nodes = self.allgather(shared_memory_domain().encode())
        return nodes.index(nodes[self.rank])

    def close(self) -> None:
        """Nothing: the connection is closed by its owner."""


class RendezvousConnection:
    """The connection of this task to the rendezvous process. limit_s: how long an exchange may take, in seconds."""

    def __init__(self, joined: Joined, limit_s: float) -> None:
        self.rank, self.size = joined.rank, joined.size
        self._channel = Channel(socket.socket(fileno=joined.pmi))
        self._lifeline, self._limit_s = joined.lifeline, limit_s
        self._sent: dict[str, int] = defaultdict(int)  # exchanges so far, by members and title
        self._values: dict[str, list[bytes]] = {}  # that have arrived, of exchanges that are not complete
        self._sizes: dict[str, int] = {}

    def send(self, members: Sequence[int], value: bytes, title: str = "") -> str:
        """Start an exchange. Return its key."""
        ranks = ",".join(map(str, members))
        name = hashlib.blake2b(f"{ranks} {title}".encode(), digest_size=8).hexdigest()
        self._sent[name] += 1
        key = f"{name}.{self._sent[name]}"
        self._values[key], self._sizes[key] = [], len(members)
        self._channel.send_line(f"cmd=gather key={key} ranks={ranks} value={base64.b64encode(value).decode()}")
        return key

    def has_all(self, key: str, limit_s: float = 0.0) -> bool:
        """Return whether all values of an exchange have arrived; wait for some of them for at most `limit_s`."""
        if len(self._values[key]) < self._sizes[key]:
            self._receive(limit_s)
        return len(self._values[key]) == self._sizes[key]

    def wait(self, key: str) -> list[bytes]:
        """Wait for the values of an exchange. Return them in the order of its members."""
        deadline, left_s = time.monotonic() + self._limit_s, self._limit_s
        while not self.has_all(key, min(left_s, 1.0)):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise CollectiveTimeout(
                    f"rank {self.rank} has waited for {self._limit_s:g} s for {self._sizes[key]} tasks to exchange "
                    f"addresses; {len(self._values[key])} have answered"
                )
        del self._sizes[key]
        return self._values.pop(key)

    def close(self) -> None:
        self._channel.close()

    def _receive(self, limit_s: float) -> None:
        ready, _, _ = select.select([self._channel.connection.fileno(), self._lifeline], [], [], limit_s)
        if self._lifeline in ready:
            text = os.read(self._lifeline, 4096).decode(errors="replace").strip()
            raise AllredError(text or "the rendezvous process of the job has ended")
        if not ready:
            return
        try:
            lines = self._channel.receive_lines()
        except ConnectionError:
            raise AllredError("the rendezvous process of the job has ended") from None
        for line in lines:
            words = dict(word.partition("=")[::2] for word in line.split())
            self._values[words["key"]].append(base64.b64decode(words["value"]))
