"""A Bootstrap that uses the rendezvous process of tasks without a launcher, and no MPI."""

import abc
import base64
import contextlib
import hashlib
import math
import os
import select
import socket
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from allred import config, world
from allred.comm.backends.socket_messages import MessageSockets, SocketMessages
from allred.comm.bootstrap import Bootstrap
from allred.comm.work import Polled, Steps
from allred.config import Config
from allred.errors import AllredError, CollectiveTimeout
from allred.launch.rendezvous_client import Joined, rendezvous, shared_memory_domain
from allred.launch.rendezvous_server import decode_values
from allred.runtime.channel import Channel
from allred.runtime.stderr import rank_warning
from allred.runtime.timings import EXCHANGE_POLL_S
from allred.wording import ranges_in_order


class RendezvousBootstrap(Bootstrap):
    """The Bootstrap of some tasks of a rendezvous. members: their ranks; default: all.

    A call raises AllredError if another task has ended, and CollectiveTimeout if an exchange takes longer than
    `limit_s` of the connection. Only one thread may use a connection.
    """

    launcher_ends_job = False
    _opened: MessageSockets | None = None  # by this Bootstrap, which closes them
    _sockets: MessageSockets | None = None

    def __init__(self, connection: "TaskConnection", members: Sequence[int] | None = None, title: str = "") -> None:
        self._connection, self._title = connection, title
        self._members = tuple(range(connection.size) if members is None else members)
        super().__init__(self._members.index(connection.rank), len(self._members))

    def allgather(self, value: bytes) -> list[bytes]:
        return self._connection.wait(self._begin(self._members, value, self._title))

    def subset(self, ranks: Sequence[int], title: str = "") -> "RendezvousBootstrap":
        made = RendezvousBootstrap(self._connection, [self._members[rank] for rank in ranks], title)
        made.generation, made._sockets = self.generation, self._sockets
        return made

    def open_messages(self, network: str, timeout_s: float) -> None:
        domain = shared_memory_domain()
        self._opened = MessageSockets(self, domain, self._connection.own_host, network, timeout_s)
        self._sockets = self._opened

    def messages(self) -> SocketMessages | None:
        return None if self._sockets is None else SocketMessages(self._sockets, self, list(self._members))

    def barrier_of(self, ranks: Sequence[int], title: str) -> Steps[None]:
        key = self._begin([self._members[rank] for rank in ranks], b"", title)
        yield Polled(lambda: self._connection.poll(key), waits_for_peers=True)
        self._connection.take(key)

    def lowest_rank_on_node(self) -> int:
        nodes = self.allgather(shared_memory_domain().encode())
        return nodes.index(nodes[self.rank])

    def close(self) -> None:
        """Close what `open_messages` has opened. The owner of the connection closes it."""
        if self._opened is not None:
            self._opened.close()
            self._opened = self._sockets = None

    def _begin(self, members: Sequence[int], value: bytes, title: str) -> str:
        return self._connection.begin(members, value, f"{self.generation} {title}")


def connect(
    addresses: Mapping[str, str], task: str, secret: str, listener: socket.socket | None = None
) -> "RendezvousConnection":
    """Wait until all tasks have called it. Return the connection to them.

    addresses: host:port of all tasks by name, in rank order. listener: the socket at this task's address, if it is open
    already. Raises ConfigError if this task cannot take part, CollectiveTimeout at the time limit.
    """
    settings = config.explicit_settings(os.environ, {})
    start_s, limit_s = (settings.get(name, getattr(Config, name)) for name in ("start_timeout_s", "timeout_s"))
    joined = rendezvous(addresses, task, secret, start_s, listener)
    return RendezvousConnection(joined, limit_s, tuple(addresses))


class TaskConnection(abc.ABC):
    """The connection of this task to a process that passes values between the tasks. Each of them is a rank.

    rank, size: of this task, and the number of tasks. tasks: the names of all, or none. limit_s: how long an exchange
    may take, in seconds. warn_s: after this time, print a warning.
    """

    rank: int
    size: int

    def __init__(self, limit_s: float, tasks: tuple[str, ...] = ()) -> None:
        self.tasks, self.limit_s, self.warn_s = tasks, limit_s, math.inf
        self._exchanges: dict[str, int] = defaultdict(int)  # how many exchanges were begun, by members and title
        self._values: dict[str, list[bytes] | None] = {}  # by the key of the exchange; None: some have not arrived
        self._parts: dict[str, list[str]] = {}  # of these values, by the key
        self._sizes: dict[str, int] = {}  # the number of members, by the key
        self._missing: dict[str, str] = {}  # some ranks that have not sent a value, by the key

    @property
    @abc.abstractmethod
    def own_host(self) -> str:
        """The address of this host in the network of the other tasks."""

    @abc.abstractmethod
    def _send(self, line: str) -> None: ...

    @abc.abstractmethod
    def _receive(self, timeout_s: float) -> None:
        """Wait for messages, and pass lines to `_handle`. Raises AllredError if another task has ended."""

    def _handle(self, line: str) -> None:
        """Handle a line of the other end (`rendezvous_server.Exchanges`). Raises ValueError or KeyError."""
        words = dict(word.partition("=")[::2] for word in line.split())
        if words["cmd"] == "missing":
            self._missing[words["key"]] = words["ranks"]
        elif (key := words["key"]) in self._values:
            self._parts.setdefault(key, []).append(words["values"])
            if words["left"] == "0":
                self._values[key] = decode_values("".join(self._parts.pop(key)), self._sizes[key])

    def begin(self, members: Sequence[int], value: bytes, title: str) -> str:
        """Begin an exchange. Return its key."""
        ranks = ranges_in_order(members)
        name = hashlib.blake2b(f"{ranks} {title}".encode(), digest_size=8).hexdigest()
        self._exchanges[name] += 1
        key = f"{name}.{self._exchanges[name]}"
        self._values[key], self._sizes[key] = None, len(members)
        self._send(f"cmd=allgather key={key} ranks={ranks} value={base64.b64encode(value).decode()}")
        return key

    def poll(self, key: str, timeout_s: float = 0.0) -> bool:
        """Wait up to `timeout_s` for more values of an exchange. Return whether all have arrived."""
        if self._values[key] is None:
            self._receive(timeout_s)
        return self._values[key] is not None

    def wait(self, key: str) -> list[bytes]:
        """Wait for the values of an exchange. Return them in the order of its members."""
        begun, warn_s = time.monotonic(), self.warn_s
        while not self.poll(key, EXCHANGE_POLL_S):
            if (error := world.error()) is not None:
                raise error
            if (waited_s := time.monotonic() - begun) > self.limit_s:
                raise CollectiveTimeout(
                    f"{self._who_waits(key, self.limit_s)}, which has stopped or does not take part"
                )
            if waited_s > warn_s:
                warn_s = math.inf
                rank_warning(f"{self._who_waits(key, waited_s)}; for {self.limit_s:g} s at most")
        return self.take(key)

    def _who_waits(self, key: str, waited_s: float) -> str:
        self._send(f"cmd=missing key={key}")
        until = time.monotonic() + EXCHANGE_POLL_S
        while key not in self._missing and time.monotonic() < until:
            self._receive(EXCHANGE_POLL_S)
        ranks = self._missing.pop(key, "").split(",")
        names = [self.tasks[int(rank)] for rank in ranks if rank] if self.tasks else []
        return f"rank {self.rank} has waited for {waited_s:.0f} s for {' and '.join(names) or 'another task'}"

    def take(self, key: str) -> list[bytes]:
        """Return the values of a complete exchange, and forget it."""
        del self._sizes[key]
        values = self._values.pop(key)
        assert values is not None, f"the exchange {key} is not complete"
        return values


class RendezvousConnection(TaskConnection):
    """The connection of this task to the rendezvous process. lifeline: the descriptor of the connection that reports
    the end of this task. uses_mpi: whether the tasks have started MPI with it."""

    uses_mpi = False

    def __init__(self, joined: Joined, limit_s: float, tasks: tuple[str, ...] = ()) -> None:
        super().__init__(limit_s, tasks)
        self.rank, self.size, self.lifeline = joined.rank, joined.size, joined.lifeline
        self._channel = Channel(socket.socket(fileno=joined.pmi))
        self._kept = socket.socket(fileno=joined.lifeline), joined.listener
        self._poller = select.poll()  # the connection of PMI-1 carries the exchanges
        for file in (joined.pmi, joined.lifeline):
            self._poller.register(file, select.POLLIN)
        os.register_at_fork(after_in_child=self.close)
        self._error: AllredError | None = None

    @property
    def own_host(self) -> str:
        return str(self._channel.connection.getsockname()[0])

    def peek(self) -> str:
        """Return the message of the lifeline, which it keeps; "" if the rendezvous process has ended."""
        with contextlib.suppress(OSError):
            return self._kept[0].recv(4096, socket.MSG_PEEK | socket.MSG_DONTWAIT).decode(errors="replace")
        return ""

    def report(self, word: str) -> None:
        """Report "starts": this task waits for the others, and hears of their ends; or "up": the watchers run."""
        with contextlib.suppress(OSError):  # the process has ended; the next exchange reports it
            self._kept[0].sendall(f"{word}\n".encode())

    @contextlib.contextmanager
    def used_by_mpi(self) -> Iterator[None]:
        """Give the connection to MPICH, which is started in this block. It makes no exchanges afterwards."""
        self.uses_mpi = True
        file = self._channel.detach().detach()
        variables = {"PMI_FD": str(file), "PMI_RANK": str(self.rank), "PMI_SIZE": str(self.size)}
        os.environ.update(variables)
        try:
            yield
        finally:
            for name in variables:  # not for child processes
                os.environ.pop(name, None)

    def close(self) -> None:
        """Close everything; in a forked child, which may outlive this task and would hide its end."""
        for each in (self._channel, *self._kept):
            if each is not None:
                each.close()

    def _send(self, line: str) -> None:
        self._channel.send_line(line)

    def _receive(self, timeout_s: float) -> None:
        if self._error is not None:
            raise self._error
        ready = [file for file, _ in self._poller.poll(timeout_s * 1000)]
        try:
            if self.lifeline in ready:
                raise ConnectionError(os.read(self.lifeline, 4096).decode(errors="replace").strip())
            for line in self._channel.receive_lines() if ready else []:
                self._handle(line)
        except (OSError, ValueError, KeyError) as error:  # KeyError: a line without a word that it needs
            why = (
                str(error) if self.lifeline in ready else f"the connection to the rendezvous process was lost: {error}"
            )
            self._error = AllredError(why or "the rendezvous process of the job has ended")
            raise self._error from None
