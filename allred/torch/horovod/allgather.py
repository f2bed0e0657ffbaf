"""allgather and grouped_allgather. As in Horovod, the gradient is the mean over the ranks of this rank's rows."""

from typing import Any

import torch
from torch import Tensor

from allred.comm.communicator import Communicator
from allred.torch.horovod import handles
from allred.torch.horovod.allreduce import Average, grouped_allreduce
from allred.torch.horovod.operations import (
    Differentiable,
    Started,
    Tensors,
    detached,
    result_as_tensor,
    rows_of,
    start_operation,
)
from allred.torch.horovod.process_sets import ProcessSet, global_process_set


def _start_allgather(
    tensors: Tensors, name: str | None, process_set: ProcessSet, is_list: bool, is_async: bool = False
) -> int:
    def begin(communicator: Communicator) -> Started:
        sources = detached(tensors)
        arrays = [tensor if tensor.is_cuda else rows_of(tensor) for tensor in sources]
        works = [communicator.allgather(array, name or "") for array in arrays]

        def finish(results: list[Any], _: int) -> Any:
            found = [result_as_tensor(result, tensor) for result, tensor in zip(results, sources, strict=True)]
            return found if is_list else found[0]

        return works, finish

    return start_operation(
        "grouped_allgather" if is_list else "allgather", name, process_set, begin, is_async, joins=False
    )


def _gather(tensors: Tensors, name: str | None, process_set: ProcessSet, is_list: bool) -> list[Tensor]:
    """Gather tensors, with gradient."""
    sizes = [tensor.shape[0] if tensor.ndim else 1 for tensor in tensors]

    def run(tensors: Tensors) -> list[Tensor]:
        found = handles.synchronize(_start_allgather(tensors, name, process_set, is_list))
        return found if is_list else [found]

    def gradient(gradients: Tensors) -> list[Tensor]:
        means = grouped_allreduce(gradients, op=Average, process_set=process_set)
        rows = allgather(torch.tensor([sizes]), process_set=process_set)  # a row for each rank
        starts = rows[: process_set.rank()].sum(0).tolist()
        parts = [mean.narrow(0, *part) for mean, *part in zip(means, starts, sizes, strict=True)]
        return [part.reshape(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    return list(Differentiable.apply(run, gradient, *tensors))


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Start `allgather`, without gradient. Returns a handle.

    Example: `hvd.synchronize(hvd.allgather_async(torch.tensor([hvd.rank()])))`.
    """
    return _start_allgather([tensor], name, process_set, False, True)


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Concatenate the tensors of all ranks along the first dimension, in rank order. Ranks may differ in the first
    dimension only. Returns a new tensor. Differentiable.

    Raises HorovodInternalError, on all ranks, if the tensors differ otherwise or a rank has joined.

    Example: on 2 ranks, `hvd.allgather(torch.tensor([hvd.rank()]))` returns `[0, 1]`.
    """
    return _gather([tensor], name, process_set, False)[0]


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start `grouped_allgather`, without gradient. Returns a handle.

    Example: `hvd.synchronize(hvd.grouped_allgather_async([torch.ones(1), torch.ones(2)]))`.
    """
    return _start_allgather(tensors, name, process_set, True, True)


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """As `allgather`, of each tensor of a list. Returns a list of new tensors.

    Example: `hvd.grouped_allgather([torch.ones(1), torch.ones(2)])`.
    """
    return _gather(tensors, name, process_set, True)
