"""Lines of text over TCP between a task and the process at which tasks meet, after both have shown that they know the
cluster's secret; it is never sent.

    meeting                                               task
    {"allred": 1, "nonce": N}                         -->
                                                      <--  {"nonce": M, "proof": HMAC(secret, "task" N M), "has": bool}
    {"proof": HMAC(secret, "meeting" N M)}, or        -->
    {"refused": why}

Then a hello of the task, in JSON. Without a secret the empty one is used: the same words, and no protection.
"""

import hmac
import json
import secrets
import socket
from typing import Any

VERSION = 1
_NONCE_BYTES = 32
_LONGEST = 2**16  # of a line
# A machine that loses its power says nothing: after a minute without a sign of it its task is gone.
_KEEPALIVE = {socket.TCP_KEEPIDLE: 20, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 4}


class Lines:
    """A connection, read line by line."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._received = b""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)

    def say(self, line: str) -> None:
        """Send a line. Raises OSError if the other end is gone."""
        self.connection.sendall(line.encode() + b"\n")

    def tell(self, **message: Any) -> None:
        """Send a line of JSON."""
        self.say(json.dumps(message))

    def receive(self) -> list[str]:
        """The lines that come next. Raises EOFError at the end, OSError, and ValueError for what is too long."""
        data = self.connection.recv(_LONGEST)
        if not data:
            raise EOFError
        *lines, self._received = (self._received + data).split(b"\n")
        if len(self._received) > _LONGEST:
            raise ValueError("a line without an end")
        return [line.decode(errors="replace") for line in lines]

    def hear(self) -> list[dict[str, Any]]:
        """The same, of JSON. Raises ValueError if it is not."""
        try:
            found = [json.loads(line) for line in self.receive()]
        except RecursionError:
            raise ValueError("nested too deep") from None
        if not all(isinstance(message, dict) for message in found):
            raise ValueError("not an object")
        return found

    def hear_one(self) -> dict[str, Any]:
        """One message, where no other can follow before an answer."""
        while not (found := self.hear()):
            pass
        return found[0]


def new_nonce() -> str:
    """A number used once."""
    return secrets.token_hex(_NONCE_BYTES)


def proof(secret: str, who: str, nonces: tuple[str, str]) -> str:
    """That one who plays this part knows the secret."""
    return hmac.digest(secret.encode(), " ".join((who, *nonces)).encode(), "sha256").hex()


def shows(message: dict[str, Any], secret: str, who: str, nonces: tuple[str, str]) -> bool:
    """Whether the message has that proof."""
    return hmac.compare_digest(str(message.get("proof", "")).encode(), proof(secret, who, nonces).encode())
