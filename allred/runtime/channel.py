"""Authenticated channels between the processes of a job, over TCP or Unix sockets. A message is a line: JSON or text.

Both ends prove that they know the secret, which is never sent. The nonces N and M are random and used once:

    listening end                                    connecting end
    {"allred": VERSION, "nonce": N}             -->
                                                <--  {"nonce": M, "proof": P("connect"), "has": whether it has a secret}
    {"proof": P("listen")}, {"refused": reason} -->
                                                <--  its first message

P(role) is HMAC-SHA256(secret, [purpose, role, N, M]), so that a proof cannot be reflected to its sender, nor replayed
to another service with the same secret. Without a secret the same messages are exchanged, without any protection.
"""

import contextlib
import dataclasses
import errno
import hmac
import ipaddress
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Generator
from typing import Any

from allred.runtime import timings
from allred.runtime.loop import Loop, Timer

Message = dict[str, Any]

VERSION = 2
_MOST_MS = 2**31 - 1
_TCP_RTO_MAX_MS = 44  # include/uapi/linux/tcp.h; Python has no name for it


def family(address: Any) -> int:
    """Return the family of an address of a socket: a path, or host and port."""
    if isinstance(address, str):
        return socket.AF_UNIX
    return socket.AF_INET6 if ":" in address[0] else socket.AF_INET


def open_listener(host: str, backlog: int = 128) -> socket.socket:
    """Listen at a free port of this host's address `host`."""
    return socket.create_server((host, 0), family=family((host, 0)), backlog=backlog)


def user_of_peer(connection: socket.socket) -> int | None:
    """Return the user of the process at the other end of a TCP connection within this machine; -1 if it has closed the
    connection, or is on this machine and not found. None if it may be on another machine, or /proc does not tell."""
    try:
        ends = [(ipaddress.ip_address(host), port) for host, port, *_ in _both_ends(connection)]
    except OSError:
        return -1
    plain = [(getattr(host, "ipv4_mapped", None) or host, port) for host, port in ends]
    tables = {"/proc/net/tcp6": [_in_proc(host, port, 6) for host, port in plain]}
    if all(host.version == 4 for host, _ in plain):  # the other end may be a socket of either family
        tables["/proc/net/tcp"] = [_in_proc(host, port, 4) for host, port in plain]
    for name, addresses in tables.items():
        try:
            with open(name) as file:
                for fields in map(str.split, file):
                    if fields[1:3] == addresses:
                        return int(fields[7]) if fields[9] != "0" else -1
        except FileNotFoundError:  # no IPv6
            continue
        except OSError:
            return None
    return -1 if plain[0][0].is_loopback else None


def _both_ends(connection: socket.socket) -> list[Any]:
    return [connection.getpeername(), connection.getsockname()]


def _in_proc(host: Any, port: int, version: int) -> str:
    """Return an address as the kernel writes it into /proc/net/tcp or tcp6."""
    packed = host.packed if host.version == version else b"\0" * 10 + b"\xff\xff" + host.packed
    return "".join(f"{word:08X}" for word in struct.unpack(f"={len(packed) // 4}I", packed)) + f":{port:04X}"


_NOT_ALLRED = "is not an allred process: another program uses this port; choose another port"


class HandshakeError(Exception):
    """The handshake failed. The text is a predicate; its subject is the process that listens at the address."""


def limit_resending(connection: socket.socket, limit_s: float) -> None:
    """Keep a TCP connection for `limit_s` seconds without an answer, instead of the kernel's time.

    From Linux 6.15 on, unanswered data is sent again every second. Before it, the kernel doubles the time between two
    attempts, so a link that works again may not be noticed until it has worked for as long as it was cut.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, min(int(1000 * limit_s), _MOST_MS))
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, 1000)


class Channel:
    """A TCP or Unix connection that sends and receives lines. `longest`: bytes of the longest line that it accepts."""

    def __init__(self, connection: socket.socket, longest: int = timings.LINE_BYTES) -> None:
        self.connection, self.longest = connection, longest
        self._received = bytearray()
        self._loop: Loop | None = None
        self._unsent: bytearray | None = None  # None: a send waits
        self._expiry: Timer | None = None
        if connection.family == socket.AF_UNIX:
            return
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.keep_alive(*timings.KEEPALIVE_S)

    def keep_alive(self, idle_s: int, interval_s: int) -> None:
        """Notice that the machine of the peer has lost power or network, after idle_s + KEEPALIVE_COUNT * interval_s
        without an answer."""
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_s)
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval_s)
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, timings.KEEPALIVE_COUNT)

    def serve(
        self,
        loop: Loop,
        handle: Callable[[list[Any]], object],
        lost: Callable[[Exception], object],
        receive: Callable[[], list[Any]] | None = None,
        waits: bool = True,
    ) -> None:
        """Call `handle` with the messages of each receive. At the end of the connection, or if it carries anything that
        is not the protocol, close it and call `lost`. handle: may raise ValueError for such messages. receive: default:
        `receive`. waits: whether a send waits for a peer that does not read; else the loop sends the rest later."""

        def ready() -> None:
            try:
                handle((receive or self.receive)())
            except (OSError, ValueError, HandshakeError) as error:
                self.close()
                lost(error)

        self._loop = loop
        loop.on_input(self.connection, ready)
        if not waits:
            self.connection.setblocking(False)
            self._unsent = bytearray()

    def close(self) -> None:
        """Close the connection. What the loop has not sent yet is lost."""
        if self._expiry is not None:
            self._expiry.cancel()
        if self._loop is not None:
            self._loop.remove(self.connection)
        self.connection.close()

    def finish(self) -> None:
        """Send what the loop has not sent yet, and close the connection."""
        if self._unsent:
            with contextlib.suppress(OSError):
                self.connection.settimeout(timings.SEND_S)
                self.connection.sendall(self._unsent)
        self.close()

    def detach(self) -> socket.socket:
        """Return the connection, without a time limit, for bytes that are no messages. Raises ConnectionError if some
        have arrived already."""
        if self._received:
            raise ConnectionError("the peer has sent more than its answer")
        self.connection.settimeout(None)
        return self.connection

    def send(self, message: Message) -> None:
        """Send JSON; see `send_line`."""
        self.send_line(json.dumps(message))

    def send_line(self, line: str) -> None:
        """Send a line of text. An error shuts down the connection in both directions; the next receive reports it."""
        self.send_bytes(line.encode() + b"\n")

    def send_bytes(self, lines: bytes) -> None:
        """Send complete lines; see `send_line`."""
        if self._unsent is not None:
            if len(self._unsent) > timings.SNAPSHOT_BYTES:
                return self._shut_down()
            self._unsent += lines
            if len(self._unsent) == len(lines):
                self._send_unsent()
            return
        try:
            self.connection.sendall(lines)
        except OSError:
            self._shut_down()

    def _send_unsent(self) -> None:
        """Send as much as the kernel takes now. If it takes nothing for SEND_S, or more than SNAPSHOT_BYTES wait when
        another line is sent, that is an error, as in `send_line`."""
        assert self._loop is not None
        assert self._unsent is not None
        try:
            del self._unsent[: self.connection.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            return self._shut_down()
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry = self._loop.after(timings.SEND_S, self._shut_down) if self._unsent else None
        self._loop.on_output(self.connection, self._send_unsent if self._unsent else None)

    def _shut_down(self) -> None:
        if self._unsent and self._loop is not None:
            self._unsent.clear()
            self._loop.on_output(self.connection, None)
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def receive_lines(self) -> list[str]:
        """Return the next complete lines; none if only a part of a line has arrived. Waits for the socket's timeout.

        Raises ConnectionError if the peer has closed the connection, OSError for other errors of the socket, and
        ValueError for a line longer than `longest`; at most one read of such a line is kept in memory.
        """
        try:
            data = self.connection.recv(min(timings.RECEIVE_BYTES, self.longest + 1))
        except BlockingIOError:
            return []
        if not data:
            raise ConnectionError("the peer has closed the connection")
        self._received += data
        *lines, self._received = self._received.split(b"\n") if b"\n" in data else [self._received]
        if any(len(line) > self.longest for line in (*lines, self._received)):
            raise ValueError(f"a line of more than {self.longest} bytes")
        return [line.decode(errors="replace") for line in lines]

    def receive(self) -> list[Message]:
        """Return the next complete lines, parsed as JSON objects. Raises what `receive_lines` raises, and ValueError
        for a line that is not a JSON object."""
        try:
            messages = [json.loads(line) for line in self.receive_lines()]
        except RecursionError:
            raise ValueError("JSON is nested too deep") from None
        if not all(isinstance(message, dict) for message in messages):
            raise ValueError("a message is not a JSON object")
        return messages

    def receive_one(self, deadline: float) -> Message:
        """Return the next message of a peer that waits for an answer to each message. Raises TimeoutError at
        `deadline`, in seconds of time.monotonic(), else as `receive`."""
        while (left_s := deadline - time.monotonic()) > 0:
            self.connection.settimeout(left_s)
            if messages := self.receive():
                return messages[0]
        raise TimeoutError("no answer")


def connect(address: Any, purpose: str, secret: str, limit_s: float = timings.AUTHENTICATE_S) -> Channel:
    """Connect to the listener at `address` (as in socket.connect) and authenticate, within `limit_s` seconds.

    Connects again if the listener closes the connection before authentication, as it does with too many connections.
    Raises HandshakeError if the listener refuses this process or is not an allred process with the same secret, and
    OSError if there is no connection or no answer (TimeoutError).
    """
    deadline = time.monotonic() + limit_s
    while (left_s := deadline - time.monotonic()) > 0:
        with contextlib.ExitStack() as on_error:
            connection = on_error.enter_context(socket.socket(family(address), socket.SOCK_STREAM))
            connection.settimeout(left_s)
            connection.connect(address)
            channel = Channel(connection, timings.UNAUTHENTICATED_BYTES)
            with contextlib.suppress(ConnectionError):
                _prove_as_connector(channel, purpose, secret, deadline)
                connection.settimeout(timings.SEND_S)
                channel.longest = timings.LINE_BYTES
                on_error.pop_all()
                return channel
        time.sleep(timings.RETRY_S)
    raise ConnectionError("the listener closes each connection before authentication")


def _prove_as_connector(channel: Channel, purpose: str, secret: str, deadline: float) -> None:
    steps = prove(channel, purpose, secret)
    next(steps)
    try:
        with contextlib.suppress(StopIteration):
            while True:
                steps.send(channel.receive_one(deadline))
    except ValueError:
        raise HandshakeError(_NOT_ALLRED) from None


def prove(channel: Channel, purpose: str, secret: str) -> Generator[None, Message, None]:
    """Authenticate as the connecting end, without waiting: receives each message of the listening end (`send`), and
    ends when both ends have proved that they know the secret. Raises HandshakeError."""
    greeting = yield
    if not {"allred", "nonce"} <= greeting.keys():
        raise HandshakeError(_NOT_ALLRED)
    version, nonces = greeting["allred"], (str(greeting["nonce"]), secrets.token_hex())
    if version != VERSION:
        raise HandshakeError(
            f"has another version of allred (protocol {version}, here {VERSION}); install the same in all environments"
        )
    channel.send({"nonce": nonces[1], "proof": _proof(secret, purpose, "connect", nonces), "has": bool(secret)})
    answer = yield
    if "refused" in answer:
        raise HandshakeError(f"refuses this process: {answer['refused']}")
    if not _proves(answer, _proof(secret, purpose, "listen", nonces)):
        raise HandshakeError("does not know this job's secret")


def connect_in_loop(
    loop: Loop,
    address: Any,
    purpose: str,
    secret: str,
    hello: Message,
    opened: Callable[[socket.socket], object],
    failed: Callable[[Exception], object],
) -> Channel:
    """Connect as `connect`, but without waiting and without a time limit, then send `hello`. When the listener has
    answered {"accepted": True}, call `opened` with the nonblocking connection, for bytes that are no messages.

    failed: called with HandshakeError, ValueError (it is not the protocol) or OSError instead: a ConnectionError itself
    or ConnectionResetError, if the listener has closed the connection. Returns the channel, for `close`.
    """
    channel = Channel(socket.socket(family(address), socket.SOCK_STREAM))
    channel.connection.setblocking(False)

    def introduce() -> Generator[None, Message, None]:
        yield from prove(channel, purpose, secret)
        channel.send(hello)
        if "accepted" not in (yield):
            raise HandshakeError(_NOT_ALLRED)

    def handle(messages: list[Message]) -> None:
        for message in messages:
            try:
                steps.send(message)
            except StopIteration:
                loop.remove(channel.connection)
                channel.detach().setblocking(False)
                opened(channel.connection)

    steps = introduce()
    next(steps)
    error = channel.connection.connect_ex(address)
    if error in (0, errno.EINPROGRESS):
        channel.serve(loop, handle, failed)
    else:
        channel.close()
        failed(OSError(error, os.strerror(error)))
    return channel


def _proof(secret: str, purpose: str, role: str, nonces: tuple[str, str]) -> str:
    return hmac.digest(secret.encode(), json.dumps([purpose, role, *nonces]).encode(), "sha256").hex()


def _proves(message: Message, proof: str) -> bool:
    return hmac.compare_digest(str(message.get("proof", "")).encode(errors="replace"), proof.encode())


@dataclasses.dataclass(eq=False)
class _UnauthenticatedPeer:
    channel: Channel
    nonce: str
    expiry: Timer


class Listener:
    """Accepts connections on a socket, in an event loop, and authenticates them.

    It never waits for a peer. It closes a connection if the peer sends something else than the protocol, if the first
    message after authentication does not arrive within `limit_s`, or if UNAUTHENTICATED_PEERS + `expected` newer
    connections are not authenticated. expected: the number of peers that may connect at once.

    admit(channel, messages): called with each authenticated channel and its first messages.
    refusal(host, has): returns the reason that is sent to a peer with a wrong secret. `has`: whether the peer has a
        secret at all.
    """

    def __init__(
        self,
        loop: Loop,
        listening: socket.socket,
        purpose: str,
        secret: str,
        admit: Callable[[Channel, list[Message]], object],
        refusal: Callable[[str, bool], str] = lambda host, has: "its secret is not the secret of this job",
        limit_s: float = timings.AUTHENTICATE_S,
        expected: int = 0,
    ) -> None:
        self._most = timings.UNAUTHENTICATED_PEERS + expected
        self._loop, self._socket, self._purpose, self._secret = loop, listening, purpose, secret
        self._admit, self._refusal, self._limit_s = admit, refusal, limit_s
        self._pending: dict[_UnauthenticatedPeer, None] = {}  # from the oldest to the newest
        self._authenticated: set[_UnauthenticatedPeer] = set()  # their first message has not arrived
        listening.setblocking(False)
        listening.listen(max(1024, self._most))
        loop.on_input(listening, self._accept)

    def close(self) -> None:
        """Listen no more, and close connections that are not authenticated."""
        for peer in [*self._pending, *self._authenticated]:
            self._close(peer)
        self._loop.remove(self._socket)
        self._socket.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except OSError:  # the peer has closed the connection, or there are too many open files
            return
        if len(self._pending) >= self._most:
            self._close(next(iter(self._pending)))
        connection.setblocking(False)
        channel = Channel(connection, timings.UNAUTHENTICATED_BYTES)
        expiry = self._loop.after(self._limit_s, lambda: self._close(peer))
        peer = _UnauthenticatedPeer(channel, secrets.token_hex(), expiry)
        self._pending[peer] = None
        self._loop.on_input(connection, lambda: self._receive(peer))
        channel.send({"allred": VERSION, "nonce": peer.nonce})

    def _receive(self, peer: _UnauthenticatedPeer) -> None:
        try:
            messages = peer.channel.receive()
            if messages and peer in self._pending:
                return self._authenticate(peer, *messages)
        except Exception:  # closed, or not the protocol: bytes of an unknown program must not end this process
            return self._close(peer)
        if messages:
            self._forget(peer)
            peer.channel.connection.settimeout(timings.SEND_S)
            try:
                self._admit(peer.channel, messages)
            except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError):
                # closed, or another first message than expected
                peer.channel.close()

    def _authenticate(self, peer: _UnauthenticatedPeer, message: Message) -> None:
        nonces = peer.nonce, str(message["nonce"])
        if _proves(message, _proof(self._secret, self._purpose, "connect", nonces)):
            peer.channel.send({"proof": _proof(self._secret, self._purpose, "listen", nonces)})
            del self._pending[peer]
            self._authenticated.add(peer)
            peer.channel.longest = timings.LINE_BYTES
        else:
            host = [*peer.channel.connection.getpeername(), "this host"][0]  # a Unix socket has no name
            peer.channel.send({"refused": self._refusal(host, bool(message.get("has")))})
            self._close(peer)

    def _forget(self, peer: _UnauthenticatedPeer) -> None:
        peer.expiry.cancel()
        self._pending.pop(peer, None)
        self._authenticated.discard(peer)
        self._loop.remove(peer.channel.connection)

    def _close(self, peer: _UnauthenticatedPeer) -> None:
        self._forget(peer)
        peer.channel.close()
