"""The compared implementations on host arrays: allred, and the same by raw MPI (mpi4py and numpy) without allred.

Allreduce. All calls are blocking and in place, on the same arrays.

allred                    allreduce_ or grouped_allreduce_
allred uncompressed       the same without --compression
arena on, arena off       the other variant of --arena on,off; see arenas.py
mpi, mpi per tensor       Allreduce on a duplicate of COMM_WORLD, one call per tensor
mpi concatenate + split   copy all tensors into a flat array, one Allreduce, copy back; the flat array is allocated once

Parameter server of one worker. All buffers are flat and allocated once; nothing is checked.

mpi chunks                Isend of the gradients in chunks of 1 MiB; the server updates each chunk with numpy and sends
                          the updated parameters back; at most 4 chunks are in flight in each direction
mpi all chunks            the same, but the worker starts all sends and receives at once
mpi ping-pong             Send and Recv of a small model in both directions, without an update
"""

import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

import allred
from allred.arrays import Array
from allred.bench.measure import Call
from allred.bench.verify import Shape, first_difference, random_arrays
from allred.comm.ops import Compression

UNCOMPRESSED = "allred uncompressed"
PER_TENSOR = "mpi per tensor"
CONCATENATED = "mpi concatenate + split"
PING_PONG = "mpi ping-pong"
_PING_PONG_MAX_BYTES = 4096  # of the model
_CHUNK_BYTES = 2**20
_CHUNKS_IN_FLIGHT = 4
_PUSH, _PULL = 1, 2  # tags


def allocate(shapes: Sequence[Shape], dtype: np.dtype[Any], empty: Callable[..., Any] = np.empty) -> list[Array]:
    """Arrays of zeros, each in its own memory, written once so that all pages exist. empty: allocates one."""
    group = [empty(shape, dtype) for shape in shapes]
    for array in group:
        array.fill(0)
    return group


# Allreduce.


def allred_calls(group: list[Any], single: bool, compression: Compression) -> dict[str, Call]:
    """allred's calls by name. single: allreduce_ of the only array, else grouped_allreduce_ of all."""
    call: Callable[..., object]
    if single:
        call = functools.partial(allred.allreduce_, group[0], allred.Sum)
    else:
        call = functools.partial(allred.grouped_allreduce_, group, allred.Sum)
    if compression is Compression.none:
        return {"allred": call}
    return {"allred": functools.partial(call, compression=compression), UNCOMPRESSED: call}


class MpiBaseline:
    """Allreduce by mpi4py on its communicator `comm`."""

    def __init__(self, comm: Any) -> None:
        from mpi4py import MPI

        self._comm, self._in_place, self._sum = comm, MPI.IN_PLACE, MPI.SUM

    def array_calls(self, array: Array) -> dict[str, Call]:
        return {"mpi": functools.partial(self._comm.Allreduce, self._in_place, array, self._sum)}

    def group_calls(self, group: list[Array]) -> dict[str, Call]:
        flats = [array.reshape(-1) for array in group]
        (buffer,) = allocate([(sum(flat.size for flat in flats),)], flats[0].dtype)
        ends = np.cumsum([flat.size for flat in flats])
        parts = [buffer[end - flat.size : end] for flat, end in zip(flats, ends, strict=True)]

        def per_tensor() -> None:
            for array in group:
                self._comm.Allreduce(self._in_place, array, self._sum)

        def concatenated() -> None:
            np.concatenate(flats, out=buffer)
            self._comm.Allreduce(self._in_place, buffer, self._sum)
            for flat, part in zip(flats, parts, strict=True):
                np.copyto(flat, part)

        return {PER_TENSOR: per_tensor, CONCATENATED: concatenated}


# Parameter server.


@dataclasses.dataclass(frozen=True)
class ServerBaseline:
    """Round trips by name: one push and pull between rank 1, the worker, and rank 0, the server. `params` and
    `gradients` are flat."""

    round_trips: "dict[str, PingPong | ChunkedSgd]"
    params: Array
    expected: Array  # the worker's parameters after the last verified round trip
    gradients: Array
    lr: float

    def wrong(self, name: str) -> str:
        """Describes what is wrong with the worker's parameters after one more round trip `name`; "" if nothing is."""
        if name != PING_PONG:
            np.subtract(self.expected, np.multiply(self.gradients, self.lr), out=self.expected)
        return first_difference([self.params], [self.expected])


def server_baseline(comm: Any, shapes: list[Shape], dtype: DTypeLike, lr: float) -> ServerBaseline:
    """Allocate one rank's side. comm: mpi4py communicator; rank 0 is the server, rank 1 the worker."""
    start, gradients = (np.concatenate([a.reshape(-1) for a in random_arrays(shapes, dtype, seed)]) for seed in (2, 3))
    params = start.copy() if comm.Get_rank() == 0 else np.zeros_like(start)
    round_trips: dict[str, PingPong | ChunkedSgd]
    if params.nbytes <= _PING_PONG_MAX_BYTES:
        round_trips = {PING_PONG: PingPong(comm, params, gradients)}
    else:
        buffers = [np.zeros(_CHUNK_BYTES // params.itemsize, params.dtype) for _ in range(_CHUNKS_IN_FLIGHT)]
        chunks = _chunks(params), _chunks(gradients)
        round_trips = {
            name: ChunkedSgd(comm, *chunks, buffers, lr, in_flight)
            for name, in_flight in (("mpi chunks", _CHUNKS_IN_FLIGHT), ("mpi all chunks", len(chunks[0])))
        }
    return ServerBaseline(round_trips, params, start, gradients, lr)


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
