"""benchmarks/bench.py ps --against mpi: a parameter server of one worker in raw MPI (mpi4py and numpy) without allred.

All buffers are flat and allocated once; nothing is checked. The worker asks the server to leave its loop for a number
of round trips.

mpi chunks                Isend of the gradients in chunks of 1 MiB; the server updates each chunk with numpy and sends
                          the updated parameters back; at most 4 chunks are in flight in each direction
mpi all chunks            the same, but the worker starts all sends and receives at once
mpi ping-pong             Send and Recv of a small model in both directions, without an update
"""

import argparse
import contextlib
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from allred.arrays import Array
from allred.bench import ps
from allred.bench.verify import LR, Shape, first_difference, random_arrays
from allred.ps.context import current
from allred.ps.control import NO_REPLY
from allred.ps.mpi_transport import CALL, MpiTransport
from allred.ps.protocol import ControlRequest

PING_PONG = "mpi ping-pong"
_PING_PONG_MAX_BYTES = 4096  # of the model
_CHUNK_BYTES = 2**20
_CHUNKS_IN_FLIGHT = 4
_PUSH, _PULL = 1, 2  # tags


class _RoundTrips(ControlRequest):
    """Serve `count` round trips of this name. There is no reply."""

    name: str
    count: int


def run(options: argparse.Namespace, comm: Any, conditions: dict[str, Any]) -> None:
    """Run `bench ps`, with --against mpi in turn with raw MPI."""
    ps.run(options, comm, conditions, RawMpi if options.against else None)


class RawMpi:
    """Round trips by name: one push and pull between rank 1, the worker, and rank 0, the server, with flat arrays.
    comm: mpi4py communicator. Implements ps.StepBaseline."""

    def __init__(self, comm: Any, shapes: list[Shape], dtype: DTypeLike, lr: float = LR) -> None:
        self._comm, self._lr = comm, lr
        self.expected, self.gradients = (
            np.concatenate([a.reshape(-1) for a in random_arrays(shapes, dtype, seed)]) for seed in (2, 3)
        )
        self.params = self.expected.copy() if comm.Get_rank() == 0 else np.zeros_like(self.expected)
        self._round_trips = self._make_round_trips()
        self.calls = {name: round_trip.work for name, round_trip in self._round_trips.items()}
        self.handlers = {_RoundTrips: self._serve}

    def _make_round_trips(self) -> "dict[str, PingPong | ChunkedSgd]":
        params, gradients, comm = self.params, self.gradients, self._comm
        if params.nbytes <= _PING_PONG_MAX_BYTES:
            return {PING_PONG: PingPong(comm, params, gradients)}
        buffers = [np.zeros(_CHUNK_BYTES // params.itemsize, params.dtype) for _ in range(_CHUNKS_IN_FLIGHT)]
        chunks = _chunks(params), _chunks(gradients)
        return {
            name: ChunkedSgd(comm, *chunks, buffers, self._lr, in_flight)
            for name, in_flight in (("mpi chunks", _CHUNKS_IN_FLIGHT), ("mpi all chunks", len(chunks[0])))
        }

    def _serve(self, worker: int, request: _RoundTrips) -> Any:
        empty = np.empty(0, np.uint8)
        self._comm.Send(empty, worker + 1)  # the server is ready
        for _ in range(request.count):
            self._round_trips[request.name].serve()
        self._comm.Send(empty, worker + 1)  # the server has completed all round trips
        return NO_REPLY

    @contextlib.contextmanager
    def context(self, name: str, calls: int) -> Iterator[None]:
        """The server serves `calls` round trips inside. The last message makes MPI complete the last send."""
        empty = np.empty(0, np.uint8)
        MpiTransport(current().comm).send(0, CALL, _RoundTrips(name, calls))
        self._comm.Recv(empty, 0)
        yield
        self._comm.Recv(empty, 0)

    def verify(self) -> dict[str, str]:
        """Make each round trip once; returns {name: problem or ""}."""
        problems = {}
        for name, call in self.calls.items():
            with self.context(name, 1):
                call()
            problems[name] = self.wrong(name)
        return problems

    def wrong(self, name: str) -> str:
        """Describes what is wrong with the worker's parameters after one more round trip `name`; "" if nothing is."""
        if name != PING_PONG:
            np.subtract(self.expected, np.multiply(self.gradients, self._lr), out=self.expected)
        return first_difference([self.params], [self.expected])


def _chunks(flat: Array) -> list[Array]:
    size = _CHUNK_BYTES // flat.itemsize
    return [flat[at : at + size] for at in range(0, flat.size, size)]


class PingPong:
    """One message in each direction, without an update."""

    def __init__(self, comm: Any, params: Array, gradients: Array) -> None:
        self._comm, self._params, self._gradients = comm, params, gradients

    def work(self) -> None:
        self._comm.Send(self._gradients, 0, _PUSH)
        self._comm.Recv(self._params, 0, _PULL)

    def serve(self) -> None:
        self._comm.Recv(self._gradients, 1, _PUSH)
        self._comm.Send(self._params, 1, _PULL)


class ChunkedSgd:
    """SGD chunk by chunk. buffers: the server's, one per chunk in flight. in_flight: the worker's limit, in chunks."""

    def __init__(
        self, comm: Any, params: list[Array], gradients: list[Array], buffers: list[Array], lr: float, in_flight: int
    ) -> None:
        self._comm, self._params, self._gradients = comm, params, gradients
        self._buffers, self._lr, self._in_flight = buffers, lr, in_flight

    def work(self) -> None:
        started: deque[tuple[Any, Any]] = deque()
        for chunk, target in zip(self._gradients, self._params, strict=True):
            if len(started) == self._in_flight:
                for request in started.popleft():
                    request.Wait()
            started.append((self._comm.Isend(chunk, 0, _PUSH), self._comm.Irecv(target, 0, _PULL)))
        for requests in started:
            for request in requests:
                request.Wait()

    def serve(self) -> None:
        depth = len(self._buffers)
        buffers = [self._buffers[i % depth][: chunk.size] for i, chunk in enumerate(self._params)]
        receives = deque(self._comm.Irecv(buffer, 1, _PUSH) for buffer in buffers[:depth])
        sends = []
        for i, (param, buffer) in enumerate(zip(self._params, buffers, strict=True)):
            receives.popleft().Wait()
            np.multiply(buffer, self._lr, out=buffer)
            np.subtract(param, buffer, out=param)
            sends.append(self._comm.Isend(param, 1, _PULL))
            if i + depth < len(buffers):
                receives.append(self._comm.Irecv(buffers[i + depth], 1, _PUSH))
        for send in sends:
            send.Wait()
