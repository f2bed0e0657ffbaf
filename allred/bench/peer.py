"""A parameter server of mpi4py and numpy alone: what one writes by hand, to compare with.

mpi chunks       Gradients go by Isend in chunks of 1 MiB, the server updates each in place with numpy as it comes and
                 sends that chunk of the parameters back at once. Four chunks are under way each way.
mpi all chunks   The same, but the worker starts all sends and receives at once.
mpi ping-pong    Of a model that is hardly more than a message: Send and Recv there and back, and no update.

All its buffers are made once, and are flat: it need not gather tensors, and nobody checks anything.
"""

import dataclasses
from collections import deque
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike

from allred.arrays import Array
from allred.bench.sets import Shape
from allred.bench.values import different, random

PING_PONG = "mpi ping-pong"
_PING_PONG_BYTES = 4096  # of a model, at most
_CHUNK_BYTES = 2**20
_DEPTH = 4
_UP, _DOWN = 1, 2  # tags


class Peer(Protocol):
    """One end, on each of two ranks."""

    def work(self) -> object:
        """A round, on the worker."""

    def serve(self) -> object:
        """The same, on the server."""


@dataclasses.dataclass(frozen=True)
class Raw:
    """The forms to compare with, on one rank; params and gradients are flat. The server has parameters of its own."""

    forms: dict[str, Peer]
    params: Array
    expected: Array  # a worker's parameters after the last round
    gradients: Array
    lr: float

    def wrong(self, name: str) -> str:
        """After one round of that form on a worker: what is wrong with its parameters; nothing if nothing is."""
        if name != PING_PONG:
            np.subtract(self.expected, np.multiply(self.gradients, self.lr), out=self.expected)
        return different([self.params], [self.expected])


def prepare(comm: Any, shapes: list[Shape], dtype: DTypeLike, lr: float) -> Raw:
    """The forms. comm: an mpi4py communicator, of which rank 0 serves and rank 1 works."""
    start, gradients = (np.concatenate([a.reshape(-1) for a in random(shapes, dtype, seed)]) for seed in (2, 3))
    params = start.copy() if comm.Get_rank() == 0 else np.zeros_like(start)
    forms: dict[str, Peer]
    if params.nbytes <= _PING_PONG_BYTES:
        forms = {PING_PONG: PingPong(comm, params, gradients)}
    else:
        buffers = [np.zeros(_CHUNK_BYTES // params.itemsize, params.dtype) for _ in range(_DEPTH)]
        chunks = _chunks(params), _chunks(gradients)
        forms = {
            name: Chunks(comm, *chunks, buffers, lr, depth)
            for name, depth in (("mpi chunks", _DEPTH), ("mpi all chunks", len(chunks[0])))
        }
    return Raw(forms, params, start, gradients, lr)


def _chunks(flat: Array) -> list[Array]:
    size = _CHUNK_BYTES // flat.itemsize
    return [flat[at : at + size] for at in range(0, flat.size, size)]


class PingPong:
    """A message there, and one back."""

    def __init__(self, comm: Any, params: Array, gradients: Array) -> None:
        self._comm, self._params, self._gradients = comm, params, gradients

    def work(self) -> None:
        self._comm.Send(self._gradients, 0, _UP)
        self._comm.Recv(self._params, 0, _DOWN)

    def serve(self) -> None:
        self._comm.Recv(self._gradients, 1, _UP)
        self._comm.Send(self._params, 1, _DOWN)


class Chunks:
    """SGD. depth: chunks that the worker has under way."""

    def __init__(
        self, comm: Any, params: list[Array], gradients: list[Array], buffers: list[Array], lr: float, depth: int
    ) -> None:
        self._comm, self._params, self._gradients = comm, params, gradients
        self._buffers, self._lr, self._depth = buffers, lr, depth

    def work(self) -> None:
        under_way: deque[tuple[Any, Any]] = deque()
        for chunk, target in zip(self._gradients, self._params, strict=True):
            if len(under_way) == self._depth:
                send, receive = under_way.popleft()
                send.Wait()
                receive.Wait()
            under_way.append((self._comm.Isend(chunk, 0, _UP), self._comm.Irecv(target, 0, _DOWN)))
        for send, receive in under_way:
            send.Wait()
            receive.Wait()

    def serve(self) -> None:
        cells = [self._buffers[i % _DEPTH][: chunk.size] for i, chunk in enumerate(self._params)]
        receives = deque(self._comm.Irecv(cell, 1, _UP) for cell in cells[:_DEPTH])
        sends = []
        for i, (param, cell) in enumerate(zip(self._params, cells, strict=True)):
            receives.popleft().Wait()
            np.multiply(cell, self._lr, out=cell)
            np.subtract(param, cell, out=param)
            sends.append(self._comm.Isend(param, 1, _DOWN))
            if i + _DEPTH < len(cells):
                receives.append(self._comm.Irecv(cells[i + _DEPTH], 1, _UP))
        for send in sends:
            send.Wait()
