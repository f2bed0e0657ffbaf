"""broadcast. As in Horovod, the gradient on the root is the mean over the ranks, and zeros elsewhere."""

import torch
from torch import Tensor

from allred.comm import functions
from allred.comm.communicator import Communicator
from allred.torch.horovod import handles
from allred.torch.horovod.allreduce import Average, allreduce
from allred.torch.horovod.operations import Differentiable, Started, Tensors, copies, detached, start_operation
from allred.torch.horovod.process_sets import ProcessSet, global_process_set
from allred.torch.tensors import as_raw_array


def _start_broadcast(
    tensor: Tensor, in_place: bool, root_rank: int, name: str | None, process_set: ProcessSet, is_async: bool = False
) -> int:
    def begin(communicator: Communicator) -> Started:
        target = tensor if in_place else copies([tensor])[0]
        (memory,) = detached([target])
        array = memory if memory.is_cuda else as_raw_array(memory)
        return [communicator.broadcast(array, root_rank, name or "", in_place=True)], lambda _, __: target

    return start_operation("broadcast", name, process_set, begin, is_async, joins=False)


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start `broadcast`, without gradient. Returns a handle.

    Example: `hvd.synchronize(hvd.broadcast_async(tensor, root_rank=0))`.
    """
    return _start_broadcast(tensor, False, root_rank, name, process_set, True)


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Copy the tensor of rank `root_rank` to all ranks. Returns a new tensor. Differentiable.

    root_rank: a number `hvd.rank()`, also with a process set.

    Raises HorovodInternalError, on all ranks, if shapes, dtypes or roots differ or a rank has joined.

    Example: on 2 ranks, `hvd.broadcast(torch.tensor([hvd.rank()]), root_rank=1)` returns `[1]`.
    """

    def run(tensors: Tensors) -> list[Tensor]:
        return [handles.synchronize(_start_broadcast(tensors[0], False, root_rank, name, process_set))]

    def gradient(gradients: Tensors) -> list[Tensor]:
        mean = allreduce(gradients[0], op=Average, process_set=process_set)
        return [mean if functions.current().rank == root_rank else torch.zeros_like(mean)]

    (result,) = Differentiable.apply(run, gradient, tensor)
    return result


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start `broadcast_`. Returns a handle.

    Example: `hvd.synchronize(hvd.broadcast_async_(tensor, root_rank=0))`.
    """
    return _start_broadcast(tensor, True, root_rank, name, process_set, True)


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """As `broadcast`, in place: overwrite the tensor and return it. Not differentiable.

    Example: `hvd.broadcast_(model.weight, root_rank=0)`.
    """
    return handles.synchronize(_start_broadcast(tensor, True, root_rank, name, process_set))
