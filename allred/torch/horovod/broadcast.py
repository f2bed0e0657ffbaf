"""broadcast. As in Horovod, the gradient of the root is the mean of the gradients of the results of all ranks; other
ranks get zeros."""

from typing import Any

import torch
from torch import Tensor

from allred.comm.communicator import Communicator
from allred.torch.horovod.allreduce import Average, allreduce
from allred.torch.horovod.operations import CollectiveCall, Differentiable, Tensors, copies, detached
from allred.torch.horovod.process_sets import ProcessSet, communicator_of, global_process_set
from allred.torch.tensors import as_raw_array


def _start(call: CollectiveCall, tensor: Tensor, root_rank: int, in_place: bool) -> int:
    def begin(communicator: Communicator) -> Any:
        target = tensor if in_place else copies([tensor])[0]
        (memory,) = detached([target])
        array = memory if memory.is_cuda else as_raw_array(memory)
        return [communicator.broadcast(array, root_rank, call.label, in_place=True)], lambda _, __: target

    return call.start(begin)


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start `broadcast`, without gradient. Returns a handle.

    Example: `hvd.synchronize(hvd.broadcast_async(tensor, root_rank=0))`.
    """
    return _start(CollectiveCall("broadcast", name, process_set, is_async=True), tensor, root_rank, in_place=False)


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Copy the tensor of rank `root_rank` to all ranks. Returns a new tensor. Differentiable.

    root_rank: a number `hvd.rank()`, also with a process set.

    Raises HorovodInternalError, on all ranks, if shapes, dtypes or roots differ or a rank has joined.

    Example: on 2 ranks, `hvd.broadcast(torch.tensor([hvd.rank()]), root_rank=1)` returns `[1]`.
    """
    call = CollectiveCall("broadcast", name, process_set)

    def run(tensors: Tensors) -> list[Tensor]:
        return call.results(_start(call, tensors[0], root_rank, in_place=False))

    def gradient(gradients: Tensors) -> list[Tensor]:
        mean = allreduce(gradients[0], op=Average, process_set=process_set)
        return [mean if communicator_of(process_set).number == root_rank else torch.zeros_like(mean)]

    (result,) = Differentiable.apply(run, gradient, tensor)
    return result


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start `broadcast_`. Returns a handle.

    Example: `hvd.synchronize(hvd.broadcast_async_(tensor, root_rank=0))`.
    """
    return _start(CollectiveCall("broadcast", name, process_set, is_async=True), tensor, root_rank, in_place=True)


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """As `broadcast`, in place: overwrite the tensor and return it. Not differentiable.

    Example: `hvd.broadcast_(model.weight, root_rank=0)`.
    """
    call = CollectiveCall("broadcast", name, process_set)
    return call.results(_start(call, tensor, root_rank, in_place=True))[0]
