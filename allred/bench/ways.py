"""The calls that are compared, on the same arrays: a user's of allred, and a user's of mpi4py without allred.

allred                    allreduce_ or grouped_allreduce_: public, blocking, in place
allred uncompressed       the same, beside one with --compression
mpi, mpi per tensor       Allreduce in place on a duplicate of COMM_WORLD, blocking; one call a tensor
mpi concatenate + split   everything into one flat array, one Allreduce, everything back. The flat array is allocated
                          once, before; a user who allocates it in every step pays for that on top
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

import allred
from allred.arrays import Array
from allred.bench.measure import Call
from allred.compression import Compression

UNCOMPRESSED = "allred uncompressed"
PER_TENSOR = "mpi per tensor"
CONCATENATED = "mpi concatenate + split"


def allocate(shapes: Sequence[tuple[int, ...]], dtype: np.dtype[Any]) -> list[Array]:
    """Arrays of zeros, each in memory of its own that has been written."""
    group = [np.empty(shape, dtype) for shape in shapes]
    for array in group:
        array.fill(0)
    return group


class Ways(Protocol):
    """A way to reduce without allred."""

    def of_array(self, array: Any) -> dict[str, Call]: ...
    def of_group(self, group: list[Any]) -> dict[str, Call]: ...
    def close(self) -> None: ...


def ours(group: list[Any], one: bool, compression: Compression) -> dict[str, Call]:
    """A user's of allred. one: of the only array, else of all together."""
    if one:
        return _ours(functools.partial(allred.allreduce_, group[0], allred.Sum), compression)
    return _ours(functools.partial(allred.grouped_allreduce_, group, allred.Sum), compression)


class Mpi:
    """A user's of mpi4py; `comm` is its communicator."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm

    def of_array(self, array: Array) -> dict[str, Call]:
        from mpi4py import MPI

        return {"mpi": functools.partial(self._comm.Allreduce, MPI.IN_PLACE, array, MPI.SUM)}

    def of_group(self, group: list[Array]) -> dict[str, Call]:
        per_tensor = functools.partial(_per_tensor, group, self._comm)
        return {PER_TENSOR: per_tensor, CONCATENATED: _concatenated(group, self._comm)}

    def close(self) -> None:
        pass


def _ours(call: Callable[..., object], compression: Compression) -> dict[str, Call]:
    if compression is Compression.none:
        return {"allred": call}
    return {"allred": functools.partial(call, compression=compression), UNCOMPRESSED: call}


def _per_tensor(group: list[Array], comm: Any) -> None:
    from mpi4py import MPI

    for array in group:
        comm.Allreduce(MPI.IN_PLACE, array, MPI.SUM)


def _concatenated(group: list[Array], comm: Any) -> Call:
    from mpi4py import MPI

    flats = [array.reshape(-1) for array in group]
    (buffer,) = allocate([(sum(flat.size for flat in flats),)], flats[0].dtype)
    ends = np.cumsum([flat.size for flat in flats])
    parts = [buffer[end - flat.size : end] for flat, end in zip(flats, ends, strict=True)]

    def call() -> None:
        np.concatenate(flats, out=buffer)
        comm.Allreduce(MPI.IN_PLACE, buffer, MPI.SUM)
        for flat, part in zip(flats, parts, strict=True):
            np.copyto(flat, part)

    return call
