"""The calls that are compared, on the same arrays: a user's of allred, and a user's of mpi4py without allred.

allred                    allreduce_ or grouped_allreduce_: public, blocking, in place
allred uncompressed       the same, beside one with --compression
mpi, mpi per tensor       Allreduce in place on a duplicate of COMM_WORLD, blocking; one call a tensor
mpi concatenate + split   everything into one flat array, one Allreduce, everything back. The flat array is allocated
                          once, before; a user who allocates it in every step pays for that on top
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

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


def of_array(array: Array, comm: Any, against: bool, compression: Compression) -> dict[str, Call]:
    """The ways to reduce one array."""
    ways = _ours(functools.partial(allred.allreduce_, array, allred.Sum), compression)
    if against:
        from mpi4py import MPI

        ways["mpi"] = functools.partial(comm.Allreduce, MPI.IN_PLACE, array, MPI.SUM)
    return ways


def of_group(group: list[Array], comm: Any, against: bool, compression: Compression) -> dict[str, Call]:
    """The ways to reduce many arrays."""
    ways = _ours(functools.partial(allred.grouped_allreduce_, group, allred.Sum), compression)
    if against:
        ways[PER_TENSOR] = functools.partial(_per_tensor, group, comm)
        ways[CONCATENATED] = _concatenated(group, comm)
    return ways


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
