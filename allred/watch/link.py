"""TCP between the watchers of two nodes: JSON, a line each, after both have shown that they know the job's secret.

chief's watcher              other watcher
nonce N                 -->
                        <--  HMAC-SHA256(secret, "watcher" N), nonce M
HMAC-SHA256(secret, "chief" M) -->

Who answers is in the proof, so that none can be sent back to where it came from.
"""

import contextlib
import hmac
import json
import secrets
import socket
from collections.abc import Iterable
from typing import Any

CONNECT_S = 3.0
NONCE_BYTES = PROOF_BYTES = 32
_LARGEST = 2**17


class Link:
    """A connection to another watcher."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._received = b""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.settimeout(CONNECT_S)

    def send(self, message: Any) -> None:
        """A link that is broken is noticed by reading, and so is one where half a message has been sent."""
        try:
            self.connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)

    def receive(self) -> list[Any] | None:
        """The messages that have come; None at the end."""
        try:
            data = self.connection.recv(_LARGEST)
        except OSError:
            return None
        if not data:
            return None
        *lines, self._received = (self._received + data).split(b"\n")
        return [json.loads(line) for line in lines]


def proof(secret: str, who: bytes, nonce: bytes) -> bytes:
    """That one who plays this part knows the secret."""
    return hmac.digest(secret.encode(), who + nonce, "sha256")


def connect(addresses: Iterable[str], port: int, secret: str) -> Link | None:
    """A link to the watcher that has the secret, at the first of the addresses where it is; None if at none."""
    for address in addresses:
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            connection = stack.enter_context(socket.create_connection((address, port), CONNECT_S))
            if _authenticate(connection, secret):
                stack.pop_all()
                return Link(connection)
    return None


def _authenticate(connection: socket.socket, secret: str) -> bool:
    nonce, mine = _exactly(connection, NONCE_BYTES), secrets.token_bytes(NONCE_BYTES)
    connection.sendall(proof(secret, b"watcher", nonce) + mine)
    return hmac.compare_digest(_exactly(connection, PROOF_BYTES), proof(secret, b"chief", mine))


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise ConnectionError
        data += more
    return data


class Guest:
    """A connection that has not shown yet that it knows the secret. It is never waited for."""

    def __init__(self, connection: socket.socket, secret: str) -> None:
        self.connection = connection
        self._secret, self._nonce, self._received = secret, secrets.token_bytes(NONCE_BYTES), b""
        connection.setblocking(False)
        connection.send(self._nonce)

    def admit(self) -> bool | None:
        """Whether it does, None while that is not known."""
        data = self.connection.recv(PROOF_BYTES + NONCE_BYTES - len(self._received))
        self._received += data
        if len(self._received) < PROOF_BYTES + NONCE_BYTES:
            return None if data else False
        given, nonce = self._received[:PROOF_BYTES], self._received[PROOF_BYTES:]
        if not hmac.compare_digest(given, proof(self._secret, b"watcher", self._nonce)):
            return False
        self.connection.send(proof(self._secret, b"chief", nonce))
        return True


def own_addresses() -> list[str]:
    """Where other hosts may reach this one: its name, then its IPv4 addresses."""
    found = [socket.gethostname()]
    with contextlib.suppress(OSError), open("/proc/net/fib_trie") as file:
        address = ""
        for line in file:
            words = line.split()
            if words[:1] == ["|--"]:
                address = words[1]
            elif words[:3] == ["/32", "host", "LOCAL"] and not address.startswith("127."):
                found.append(address)
    return list(dict.fromkeys(found))
