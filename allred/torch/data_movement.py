"""Collectives that move tensors: allgather, gather, scatter and alltoall, by allred's allgather and alltoall.

Each function starts an operation. It returns it with a function that post-processes its result, or None. Sizes and
dtypes are checked before the start, as far as this rank knows them, so that all ranks raise the InputError of one rank.
"""

import functools
import math
from collections.abc import Sequence

import numpy as np
import torch

from allred.arrays import Array, flat
from allred.comm.arguments import splits_of
from allred.comm.communicator import Communicator
from allred.errors import InputError
from allred.torch.tensors import as_raw_array
from allred.torch.torch_work import StartedOperation

Tensors = Sequence[torch.Tensor]


def allgather(comm: Communicator, outputs: Tensors, tensor: torch.Tensor) -> StartedOperation:
    """Gather the tensors of all ranks on all ranks. outputs: a tensor for each rank, or one for all."""
    targets, source = [as_raw_array(each) for each in outputs], flat(as_raw_array(tensor))
    sizes = [target.size for target in targets]
    if len(targets) != 1:
        _check_sizes(comm, [source] * comm.size, targets)
    elif sizes[0] != source.size * comm.size:
        raise InputError(
            f"the output tensor has {sizes[0]} elements; expected {source.size} for each of {comm.size} ranks"
        )
    _check_dtypes(targets, source)
    if len(set(sizes)) > 1:  # the name lets the ranks compare the sizes
        return comm.allgather(source, f"into tensors of {sizes} elements"), functools.partial(_split, targets)
    if len(targets) == 1 and targets[0].flags.c_contiguous:
        return comm.allgather(source, out=targets[0].reshape(-1)), None
    out = np.empty(source.size * comm.size, source.dtype)  # with `out`, ranks with other sizes are an error
    return comm.allgather(source, out=out), functools.partial(_split, targets)


def gather(comm: Communicator, outputs: Tensors, tensor: torch.Tensor, root: int, name: str) -> StartedOperation:
    """Gather the tensors of all ranks on the root. outputs: on the root a tensor for each rank; ignored elsewhere."""
    is_root, source = root == comm.rank, flat(as_raw_array(tensor))
    targets = [as_raw_array(each) for each in outputs] if is_root else []
    if is_root:
        _check_sizes(comm, [source] * comm.size, targets)
        _check_equal(targets, "output", source)
    return _exchange(comm, source[np.newaxis], _one(root, comm.size), targets, [int(is_root)] * comm.size, name)


def scatter(comm: Communicator, output: torch.Tensor, inputs: Tensors, root: int, name: str) -> StartedOperation:
    """Send one tensor of the root to each rank. inputs: on the root a tensor for each rank; ignored elsewhere."""
    is_root, target = root == comm.rank, as_raw_array(output)
    rows = np.empty((0, target.size), target.dtype)
    if is_root:
        sources = [flat(as_raw_array(each)) for each in inputs]
        _check_sizes(comm, sources, [target] * comm.size)
        _check_equal(sources, "input", target)
        rows = np.stack(sources)
    return _exchange(comm, rows, [int(is_root)] * comm.size, [target], _one(root, comm.size), name)


def alltoall(comm: Communicator, outputs: Tensors, inputs: Tensors) -> StartedOperation:
    """Send inputs[r] to rank r; outputs[r] is the tensor from rank r. Their sizes may differ."""
    targets, sources = [as_raw_array(each) for each in outputs], [flat(as_raw_array(each)) for each in inputs]
    _check_sizes(comm, sources, targets)
    _check_dtypes(sources, sources[0])
    sent, expected = [source.size for source in sources], [target.size for target in targets]
    return _exchange(comm, np.concatenate(sources), sent, targets, expected)


def alltoall_single(
    comm: Communicator, output: torch.Tensor, tensor: torch.Tensor, received: Sequence[int], sent: Sequence[int]
) -> StartedOperation:
    """Send sent[r] rows to rank r, and receive received[r] rows from rank r. An empty list: the rows divide evenly."""
    target, source = np.atleast_1d(as_raw_array(output)), np.atleast_1d(as_raw_array(tensor))
    expected = list(received) or [len(target) // comm.size] * comm.size
    if len(expected) != comm.size or sum(expected) != len(target):
        raise InputError(
            f"the output tensor has {len(target)} rows; expected the sum of {comm.size} splits, {expected}"
        )
    if math.prod(source.shape[1:]) != math.prod(target.shape[1:]):
        raise InputError(f"the rows of input {source.shape} and output {target.shape} have different sizes")
    counts = [int(count) for count in splits_of(len(source), list(sent) or None, comm.size)]
    return _exchange(comm, source, counts, [target], expected)


def _exchange(
    comm: Communicator, rows: Array, sent: list[int], targets: list[Array], expected: list[int], name: str = ""
) -> StartedOperation:
    """Start an alltoall of sent[r] rows to rank r. targets: for the expected[r] rows from rank r, in rank order."""
    if sent[comm.rank] != expected[comm.rank]:
        raise InputError(f"this rank sends itself {sent[comm.rank]} rows, but expects {expected[comm.rank]}")
    _check_dtypes(targets, rows)

    def finish(result: tuple[Array, Array]) -> None:
        arrived, counts = result
        if counts.tolist() != expected:
            raise InputError(f"alltoall: {counts.tolist()} rows were received, but {expected} were expected")
        _split(targets, arrived.reshape(-1))

    return comm.alltoall(rows, sent, name), finish


def _split(targets: list[Array], result: Array) -> None:
    """Copy consecutive parts of a flat array into arrays."""
    start = 0
    for target in targets:
        target[...] = result[start : start + target.size].reshape(target.shape)
        start += target.size


def _one(root: int, size: int) -> list[int]:
    return [int(rank == root) for rank in range(size)]


def _check_sizes(comm: Communicator, sources: list[Array], targets: list[Array]) -> None:
    """Raise InputError unless there is one of each for every rank, and those of this rank have the same size."""
    if not len(sources) == len(targets) == comm.size:
        raise InputError(
            f"expected a tensor for each of {comm.size} ranks, got {len(sources)} inputs and {len(targets)} outputs"
        )
    if sources[comm.rank].size != targets[comm.rank].size:
        raise InputError(
            f"this rank sends itself {sources[comm.rank].size} elements, but the output tensor for them has "
            f"{targets[comm.rank].size}"
        )


def _check_equal(arrays: list[Array], what: str, like: Array) -> None:
    """Raise InputError unless the arrays have the size and dtype of `like`."""
    _check_dtypes(arrays, like)
    if any(array.size != like.size for array in arrays):
        sizes = [array.size for array in arrays]
        raise InputError(f"the {what} tensors have {sizes} elements; expected {like.size} each")


def _check_dtypes(arrays: list[Array], like: Array) -> None:
    for array in arrays:
        if array.dtype != like.dtype:
            raise InputError(f"input and output tensors must have one dtype, got {like.dtype} and {array.dtype}")
