"""allgather and grouped_allgather. As in Horovod, the gradient is the mean over the ranks of the gradients of the
result, restricted to the rows of this rank."""

from typing import Any

import torch
from torch import Tensor

from allred.comm.communicator import Communicator
from allred.torch.horovod.allreduce import Average, grouped_allreduce
from allred.torch.horovod.operations import CollectiveCall, Differentiable, Tensors, detached, result_as_tensor, rows_of
from allred.torch.horovod.process_sets import ProcessSet, global_process_set


def _start(call: CollectiveCall, tensors: Tensors) -> int:
    def begin(communicator: Communicator) -> Any:
        sources = detached(tensors)
        works = [communicator.allgather(rows_of(tensor), call.label) for tensor in sources]

        def finish(results: list[Any], _: int) -> Any:
            found = [result_as_tensor(result, tensor) for result, tensor in zip(results, sources, strict=True)]
            return found if call.is_list else found[0]

        return works, finish

    return call.start(begin, len(tensors))


def _gather(call: CollectiveCall, tensors: Tensors) -> list[Tensor]:
    """Gather tensors, with gradient."""
    process_set, shapes = call.process_set, [tensor.shape for tensor in tensors]
    sizes = [shape[0] if shape else 1 for shape in shapes]

    def run(tensors: Tensors) -> list[Tensor]:
        return call.results(_start(call, tensors))

    def gradient(gradients: Tensors) -> list[Tensor]:
        means = grouped_allreduce(gradients, op=Average, process_set=process_set)
        rows = allgather(torch.tensor([sizes]), process_set=process_set)  # a row for each rank
        starts = rows[: process_set.rank()].sum(0).tolist()
        parts = [mean.narrow(0, *part) for mean, *part in zip(means, starts, sizes, strict=True)]
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]

    return list(Differentiable.apply(run, gradient, *tensors))


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Start `allgather`, without gradient. Returns a handle.

    Example: `hvd.synchronize(hvd.allgather_async(torch.tensor([hvd.rank()])))`.
    """
    return _start(CollectiveCall("allgather", name, process_set, is_async=True), [tensor])


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Concatenate the tensors of all ranks along the first dimension, in rank order. Ranks may differ in the first
    dimension only. Returns a new tensor. Differentiable.

    Raises HorovodInternalError, on all ranks, if the tensors differ otherwise or a rank has joined.

    Example: on 2 ranks, `hvd.allgather(torch.tensor([hvd.rank()]))` returns `[0, 1]`.
    """
    return _gather(CollectiveCall("allgather", name, process_set), [tensor])[0]


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start `grouped_allgather`, without gradient. Returns a handle.

    Example: `hvd.synchronize(hvd.grouped_allgather_async([torch.ones(1), torch.ones(2)]))`.
    """
    return _start(CollectiveCall("allgather", name, process_set, is_list=True, is_async=True), tensors)


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """As `allgather`, of each tensor of a list. Returns a list of new tensors.

    Example: `hvd.grouped_allgather([torch.ones(1), torch.ones(2)])`.
    """
    return _gather(CollectiveCall("allgather", name, process_set, is_list=True), tensors)
