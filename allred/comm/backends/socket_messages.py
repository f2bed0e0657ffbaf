"""Messages over sockets: Unix sockets between ranks of one network namespace, else TCP.

All communicators of a world share one MessageSockets in each process:

    1  when the world is created, each rank listens; all ranks exchange addresses, tokens and a shared secret
    2  at its first operation with a peer, a rank connects to it as an authenticated channel (runtime/channel.py), whose
       purpose is the token of the peer. It sends its rank, and the peer accepts each rank once
    3  from then on the connection carries messages in this direction: a header and the bytes of each

The acknowledgement of a synchronous message is a message in the other direction. There is no thread: connections are
made and all messages move whenever an operation of this rank is tested. If the receive of a message has started, its
bytes are received in the buffer of the receive, else they are kept. Data is not encrypted.
"""

import itertools
import os
import secrets
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakSet

import numpy as np

from allred.arrays import Array, as_bytes
from allred.comm.backends.connections import addresses
from allred.comm.bootstrap import Bootstrap
from allred.comm.messages import Messages
from allred.comm.work import spin_wait
from allred.errors import AllredError, ConfigError
from allred.runtime import channel, open_files
from allred.runtime.channel import Channel, Listener, Message
from allred.runtime.loop import Loop
from allred.runtime.timings import RETRY_S

_HEADER = struct.Struct("<QQQIIB")  # communicator, number, bytes, tag, generation, whether it is an acknowledgement

T = TypeVar("T")
Key = tuple[int, int]  # communicator and tag


class _Transfer:
    """A Pending. progress_count: bytes that have moved. peer: rank in the world; -1: any, until a message is found."""

    is_complete, progress_count = False, 0

    def __init__(self, sockets: "MessageSockets", peer: int, data: Array, waits_for_peers: bool = False) -> None:
        self._sockets, self.peer, self.waits_for_peers = sockets, peer, waits_for_peers
        self.data = as_bytes(data).data

    def done(self) -> bool:
        if not self.is_complete:
            self._sockets.progress()
        return self.is_complete

    def spin_wait(self) -> bool:
        return spin_wait(self.done)


class _SocketSend(_Transfer):
    """number: of a synchronous message; 0: it is complete when it is written."""

    number, header = 0, b""

    def write(self, connection: socket.socket) -> bool:
        """Write once. Return whether all is written. Raises OSError."""
        parts = self.header[self.progress_count :], self.data[max(self.progress_count - _HEADER.size, 0) :]
        self.progress_count += connection.sendmsg(parts, [], socket.MSG_NOSIGNAL)
        is_written = self.progress_count == _HEADER.size + self.data.nbytes
        self.is_complete = self.is_complete or (is_written and not self.number)
        return is_written


class _SocketReceive(_Transfer):
    key, ranks = (0, 0), list[int]()  # ranks: of the communicator
    acknowledgement: _SocketSend | None = None

    def done(self) -> bool:
        return super().done() and (self.acknowledgement is None or self.acknowledgement.done())

    @property
    def sender(self) -> int:
        return self.ranks.index(self.peer)


class _Outgoing:
    """The connection for messages to a rank. sends: which are not written yet."""

    def __init__(self, sockets: "MessageSockets", peer: int) -> None:
        self._sockets, self._peer = sockets, peer
        self.sends: deque[_SocketSend] = deque()
        self._connection: socket.socket | None = None
        self._connect()

    def _connect(self) -> None:
        address, token = self._sockets.address_of(self._peer)
        hello = {"rank": self._sockets.rank}
        self._channel = channel.connect_in_loop(
            self._sockets.loop, address, token, self._sockets.secret, hello, self._opened, self._failed
        )

    def _opened(self, connection: socket.socket) -> None:
        self._connection = connection
        if connection.family != socket.AF_UNIX:
            channel.limit_resending(connection, self._sockets.timeout_s)
        self._sockets.loop.on_input(connection, self._lose)  # nothing arrives but its end

    def _failed(self, error: Exception) -> None:
        if isinstance(error, BlockingIOError) or type(error) in (ConnectionError, ConnectionResetError):
            self._sockets.loop.after(RETRY_S, self._connect)  # too many ranks connect to the peer, or it has just died
        else:
            self._sockets.lose(self._peer)

    def _lose(self) -> None:
        self.close()
        self._sockets.lose(self._peer)

    def close(self) -> None:
        self._connection = None
        self._channel.close()

    def write(self) -> None:
        """Write what can be written without waiting."""
        try:
            while self._connection is not None and self.sends and self.sends[0].write(self._connection):
                self.sends.popleft()
        except BlockingIOError:
            pass
        except OSError:
            self._lose()


class _Incoming:
    """The connection for messages of a rank."""

    def __init__(self, sockets: "MessageSockets", peer: int, connection: socket.socket) -> None:
        self._sockets, self._peer, self._connection = sockets, peer, connection
        self._header = self._missing = memoryview(bytearray(_HEADER.size))  # missing: of the header, then of the data
        self._data: memoryview | None = None  # after the header
        self._receive: _SocketReceive | None = None  # that takes the message, if it has started
        connection.setblocking(False)
        sockets.loop.on_input(connection, self._ready)

    def close(self) -> None:
        self._sockets.loop.remove(self._connection)
        self._connection.close()

    def _ready(self) -> None:
        self._sockets.is_moving = True
        try:
            while self._read():
                pass
        except BlockingIOError:
            pass
        except OSError:
            self.close()
            self._sockets.lose(self._peer)
        self._sockets.is_moving = False

    def _read(self) -> bool:
        """Read once. Return whether to read again at once: the data after a header."""
        count = self._connection.recv_into(self._missing)
        if count == 0:
            raise ConnectionError("the peer has closed the connection")
        self._missing = self._missing[count:]
        if self._receive is not None:
            self._receive.progress_count += count
        if self._missing:
            return False
        fields = _HEADER.unpack(self._header)
        if self._data is None:
            self._receive = self._sockets.find_receive(self._peer, *fields)
            data = np.empty(fields[2], np.uint8).data if self._receive is None else self._receive.data
            if data.nbytes != fields[2]:
                raise RuntimeError(f"a message of {fields[2]} bytes for a buffer of {data.nbytes}")
            self._data = self._missing = data
            if self._missing:
                return True
        self._sockets.deliver(self._peer, self._receive, self._data, *fields)
        self._data, self._receive, self._missing = None, None, self._header
        return False


class MessageSockets:
    """The sockets of this process for all Messages of a world; see the text of this module.

    bootstrap: of all ranks of the world. domain: the same for ranks that Unix sockets can connect. host: an address at
    which other hosts reach this one; network: the setting of that name, which replaces it unless it is "auto".
    timeout_s: how long sent data may stay unacknowledged. Collective. Raises ConfigError, the same on all ranks, if TCP
    is needed and one of them cannot listen.
    """

    def __init__(self, bootstrap: Bootstrap, domain: str, host: str, network: str, timeout_s: float) -> None:
        self.rank, self.generation, self.timeout_s = bootstrap.rank, bootstrap.generation, timeout_s
        self.loop, self.numbers = Loop(), itertools.count(1)
        self.lost: dict[int, str] = {}  # the host of each rank whose connection was lost
        self.is_moving = False  # while this rank handles messages; stays true after an exception, and after the end
        self._lock = threading.Lock()
        self.started: deque[_SocketSend | _SocketReceive] = deque()  # by any thread, since the last progress
        self._outgoing: dict[int, _Outgoing] = {}
        self._incoming: dict[int, _Incoming] = {}
        self._receives: dict[Key, list[_SocketReceive]] = {}  # for which no message has arrived
        self._unexpected: dict[Key, list[tuple[int, int, memoryview]]] = {}  # sender, number and data
        self._unacknowledged: dict[int, _SocketSend] = {}
        here, token, problem, files = socket.gethostname(), secrets.token_hex(16), "", list[socket.socket]()
        try:
            open_files.allow(2 * bootstrap.size)  # a timeline needs as many; a rank that sends little needs few
            files.append(socket.socket(socket.AF_UNIX))
            files[0].bind(f"\0allred-{token}")
            host = host if network == "auto" else addresses(network)[0]
            files.append(channel.open_listener(host))
        except (OSError, ConfigError) as error:
            problem = f"rank {self.rank} on {here} cannot receive messages at {host}: {error}"
        secret = secrets.token_hex(32) if self.rank == 0 else ""
        mine = problem, domain, here, secret, token, files[-1].getsockname()[:2] if files else None
        self._ranks = bootstrap.allgather_object(mine)
        needs_tcp = len({each[1] for each in self._ranks}) > 1
        if not needs_tcp and not problem:
            files.pop().close()
        self.secret, no_limit = self._ranks[0][3], float("inf")  # a rank may compute between two tests
        self._listeners = [
            Listener(self.loop, each, token, self.secret, self._admit, limit_s=no_limit) for each in files
        ]
        _open.add(self)
        if problem := next((each[0] for each in self._ranks if each[0] and needs_tcp), ""):
            self.close()
            raise ConfigError(problem)

    def close(self) -> None:
        """Close all connections; in a fork, without an effect on its parent."""
        _open.discard(self)
        self.is_moving = True
        self.loop.close()  # first: a fork shares the selector of its parent
        for side in (self._listeners, self._outgoing.values(), self._incoming.values()):
            for each in side:
                each.close()

    def address_of(self, peer: int) -> tuple[Any, str]:
        """Return the address and the token of a rank."""
        _, domain, _, _, token, address = self._ranks[peer]
        return f"\0allred-{token}" if domain == self._ranks[self.rank][1] else address, token

    def progress(self) -> None:
        """Let messages move, without waiting. One thread at a time does it."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self.is_moving:
                raise AllredError(
                    "send and recv cannot be used any more: allred.shutdown() has closed their connections, or an "
                    "exception has interrupted them; end the job and start again"
                )
            self._write()
            self.loop.turn(0.0)
        finally:
            self._lock.release()

    def _write(self) -> None:
        self.is_moving = True
        while self.started:
            operation = self.started.popleft()
            if isinstance(operation, _SocketSend):
                self._send(operation)
            else:
                self._receive(operation)
        for link in self._outgoing.values():
            link.write()
        self.is_moving = False

    def _link(self, peer: int) -> _Outgoing:
        if peer not in self._outgoing:
            self._outgoing[peer] = _Outgoing(self, peer)
        return self._outgoing[peer]

    def _send(self, send: _SocketSend) -> None:
        if send.number:
            self._unacknowledged[send.number] = send
        self._link(send.peer).sends.append(send)

    def _receive(self, receive: _SocketReceive) -> None:
        if receive.peer >= 0:
            self._link(receive.peer)  # its end shows that the peer has died
        message = _take(self._unexpected, receive.key, lambda message: receive.peer in (-1, message[0]))
        if message is None:
            self._receives.setdefault(receive.key, []).append(receive)
        else:
            self._complete(receive, *message)

    def find_receive(
        self, sender: int, communicator: int, number: int, nbytes: int, tag: int, generation: int, acknowledges: int
    ) -> _SocketReceive | None:
        """Remove and return the receive that takes a message; None if none has started, or the message is dropped."""
        if acknowledges or generation < self.generation:
            return None
        return _take(self._receives, (communicator, tag), lambda receive: receive.peer in (-1, sender))

    def deliver(self, sender: int, receive: _SocketReceive | None, data: memoryview, *fields: int) -> None:
        """Handle a message that has arrived. receive: that has taken it."""
        communicator, number, _, tag, generation, acknowledges = fields
        if acknowledges:
            self._unacknowledged.pop(number).is_complete = True
        elif (receive := receive or self.find_receive(sender, *fields)) is not None:
            self._complete(receive, sender, number, data)
        elif generation >= self.generation:
            self._unexpected.setdefault((communicator, tag), []).append((sender, number, data))

    def _complete(self, receive: _SocketReceive, sender: int, number: int, data: memoryview) -> None:
        if data is not receive.data:
            receive.data[:] = data
        receive.peer, receive.is_complete = sender, True
        if number:
            receive.acknowledgement = _SocketSend(self, sender, np.empty(0, np.uint8))
            receive.acknowledgement.header = _HEADER.pack(0, number, 0, 0, self.generation, 1)
            self._send(receive.acknowledgement)

    def _admit(self, peer: Channel, messages: list[Message]) -> None:
        rank = messages[0]["rank"]
        if rank not in range(len(self._ranks)) or rank in self._incoming:
            return peer.close()
        peer.send({"accepted": True})
        self._incoming[rank] = _Incoming(self, rank, peer.detach())

    def lose(self, peer: int) -> None:
        """Note that a connection with a rank was lost."""
        self.lost[peer] = self._ranks[peer][2]

    def forget(self, communicator: int) -> None:
        """Forget the messages of a communicator that is closed."""
        self._receives = {key: value for key, value in self._receives.items() if key[0] != communicator}
        self._unexpected = {key: value for key, value in self._unexpected.items() if key[0] != communicator}


class SocketMessages(Messages):
    """Messages between some ranks of a world. bootstrap: of these ranks. ranks: their numbers in it. Collective."""

    last_tag = 2**32 - 1

    def __init__(self, sockets: MessageSockets, bootstrap: Bootstrap, ranks: list[int]) -> None:
        super().__init__(bootstrap.rank, bootstrap.size)
        self._sockets, self._ranks = sockets, ranks
        self._number = bootstrap.broadcast_object(secrets.randbits(64))

    def send(self, data: Array, peer: int, tag: int, synchronous: bool = False) -> _SocketSend:
        send = _SocketSend(self._sockets, self._ranks[peer], data)
        send.number = next(self._sockets.numbers) if synchronous else 0
        send.header = _HEADER.pack(self._number, send.number, data.nbytes, tag, self._sockets.generation, 0)
        self._sockets.started.append(send)
        return send

    def receive(self, buffer: Array, peer: int, tag: int, waits_for_peers: bool = True) -> _SocketReceive:
        receive = _SocketReceive(self._sockets, -1 if peer < 0 else self._ranks[peer], buffer, waits_for_peers)
        receive.key, receive.ranks = (self._number, tag), self._ranks
        self._sockets.started.append(receive)
        return receive

    def lost_peers(self) -> dict[int, str]:
        return {self._ranks.index(rank): host for rank, host in dict(self._sockets.lost).items() if rank in self._ranks}

    def close(self, incomplete: list[Any]) -> None:
        self._sockets.forget(self._number)


def _take(table: dict[Key, list[T]], key: Key, fits: Callable[[T], bool]) -> T | None:
    """Remove the first entry of a list that fits, and return it; None if there is none."""
    entries = table.get(key, [])
    found = next((index for index, entry in enumerate(entries) if fits(entry)), None)
    if found is None:
        return None
    if len(entries) == 1:
        del table[key]
    return entries.pop(found)


_open: WeakSet[MessageSockets] = WeakSet()


def _close_in_child() -> None:
    """Close the connections in a forked child, which may outlive this process and would hide its end."""
    for each in [*_open]:
        each.close()


os.register_at_fork(after_in_child=_close_in_child)
