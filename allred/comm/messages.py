"""`Messages`: small messages between two ranks of a communicator, which make progress while one of both waits.

Every communicator of several ranks has one, of its backend: MpiMessages (backends/mpi_messages.py) uses MPI, and
SocketMessages (backends/socket_messages.py) sockets. Messages with the same sender, receiver and tag are received in
the order in which they are sent.
"""

import abc
from typing import Any, Protocol

from allred.arrays import Array
from allred.comm.work import Pending


class Receive(Pending, Protocol):
    """A started receive."""

    @property
    def sender(self) -> int:
        """The index of the sender, once the receive is complete."""


class Messages(abc.ABC):
    """Messages between the `size` ranks of a communicator; this process is number `rank`.

    last_tag: the largest tag; the smallest is 0. Data and buffers are contiguous arrays, which must live and stay as
    they are until the operation is complete.
    """

    last_tag: int

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    @abc.abstractmethod
    def send(self, data: Array, peer: int, tag: int, synchronous: bool = False) -> Pending:
        """Start to send to a rank. Complete when `data` may change; synchronous: when the peer also receives it."""

    @abc.abstractmethod
    def receive(self, buffer: Array, peer: int, tag: int, waits_for_peers: bool = True) -> Receive:
        """Start to receive a message of the size of `buffer`. peer: the sender; -1: any, the earliest message is taken.
        waits_for_peers: see Pending."""

    def lost_peers(self) -> dict[int, str]:
        """Return the hosts of the ranks that can send and receive no more, because the connection was lost."""
        return {}

    @abc.abstractmethod
    def close(self, incomplete: list[Any]) -> None:
        """End all operations. incomplete: objects that own the memory of those that are not complete."""
