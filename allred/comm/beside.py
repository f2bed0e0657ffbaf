"""What a communicator for other arrays stands on: one of host arrays, of the same ranks.

Host arrays go over that one, and so do the headers, objects and barriers of all operations: there is one queue, and one
order.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from allred.arrays import Array
from allred.comm.communicator import Communicator, T
from allred.comm.header import Call
from allred.comm.ops import ReduceOp
from allred.comm.work import Steps, Work
from allred.timeline.track import Track


class Beside(Communicator):
    """The ranks of `host`, which becomes this object's own."""

    def __init__(self, host: Communicator) -> None:
        self._host, among = host, host.among
        super().__init__(host.rank, host.size, host.queue.timeout_s)
        self.among = among
        self.queue, self.ranks, self.checks_places = host.queue, host.ranks, host.checks_places
        self.fuses = host.fuses

    @property
    def among(self) -> Callable[[Sequence[int]], Steps[Communicator]] | None:
        """The host's, which agrees on who takes part."""
        return self._host.among

    @among.setter
    def among(self, value: Callable[[Sequence[int]], Steps[Communicator]] | None) -> None:
        self._host.among = value

    @property
    def active(self) -> Communicator:
        return self._host._active or self

    @property
    def sent_bytes(self) -> int:
        return self._host.sent_bytes + self._sent_bytes

    def attend(self) -> None:
        self._host.attend()

    def allocate(self, count: int, dtype: np.dtype[Any]) -> Array:
        return self._host.allocate(count, dtype)

    def record(self, track: Track) -> None:
        self._host.record(track)

    def close(self) -> None:
        self._host.close()

    def _start(self, kind: str, name: str, body: Steps[T]) -> Work[T]:
        return self._host._start(kind, name, body)

    def _announce(self, call: Call) -> bytes:
        return self._host._announce(call)

    def _agree(self, call: Call) -> Steps[tuple[Communicator, list[bytes]]]:
        return self._host._agree(call)

    def _meet(self, call: Call) -> Steps[None]:
        return self._host._meet(call)

    def _exchange(self, record: bytes) -> Steps[list[bytes]]:
        return self._host._exchange(record)

    def _allreduce(self, flat: Array, op: ReduceOp, wire: int = 0) -> Steps[None]:
        return self._host._allreduce(flat, op, wire)

    def _broadcast(self, data: Array, root: int) -> Steps[None]:
        return self._host._broadcast(data, root)

    def _allgather(self, send: Array, recv: Array, counts: list[int]) -> Steps[None]:
        return self._host._allgather(send, recv, counts)

    def _alltoall(self, send: Array, recv: Array, counts: Array) -> Steps[None]:
        return self._host._alltoall(send, recv, counts)

    def _reducescatter(self, flat: Array, out: Array, counts: list[int], op: ReduceOp) -> Steps[None]:
        return self._host._reducescatter(flat, out, counts, op)
