"""alltoall. The gradient of a row is sent back to the rank that the row came from."""

from typing import Any

import torch
from torch import Tensor

from allred.comm.communicator import Communicator
from allred.torch.horovod import handles
from allred.torch.horovod.operations import CollectiveCall, Differentiable, Tensors, detached, result_as_tensor, rows_of
from allred.torch.horovod.process_sets import ProcessSet, global_process_set


def _start(call: CollectiveCall, tensor: Tensor, splits: Any) -> int:
    def begin(communicator: Communicator) -> Any:
        (source,) = detached([tensor])
        rows = splits.tolist() if isinstance(splits, torch.Tensor) else splits
        work = communicator.alltoall(rows_of(source), rows, call.label)

        def finish(results: list[Any], _: int) -> tuple[Tensor, Tensor]:
            array, counts = results[0]
            kind = (splits.dtype, splits.device) if isinstance(splits, torch.Tensor) else (torch.int32, "cpu")
            return result_as_tensor(array, source), torch.tensor(counts.tolist(), dtype=kind[0], device=kind[1])

        return [work], finish

    return call.start(begin)


def alltoall_async(
    tensor: Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start `alltoall`, without gradient. Returns a handle; its result is (new tensor, received splits).

    Example: `rows, received = hvd.synchronize(hvd.alltoall_async(torch.arange(4)))`.
    """
    return _start(CollectiveCall("alltoall", name, process_set, is_async=True), tensor, splits)


def alltoall(
    tensor: Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Send splits[r] rows of a tensor to each rank r. Returns the rows received, in rank order, as a new tensor; with
    `splits` also the received splits, a 1-d tensor whose entry r is the number of rows from rank r. Differentiable.

    splits: a list, or an integer tensor, whose dtype and device the received splits get; those of a list are int32.
    Without it the rows must divide evenly.

    Raises HorovodInternalError, which is a ValueError too, on all ranks, if the splits of a rank do not add up to its
    rows.

    Example: on 2 ranks, `hvd.alltoall(torch.tensor([hvd.rank(), 5]))` returns `[0, 1]` on rank 0.
    """
    call, shape = CollectiveCall("alltoall", name, process_set), tensor.shape
    received: list[Tensor] = []

    def run(tensors: Tensors) -> list[Tensor]:
        rows, counts = handles.synchronize(_start(call, tensors[0], splits))
        received.append(counts)
        return [rows]

    def gradient(gradients: Tensors) -> list[Tensor]:
        rows, _ = alltoall(gradients[0], received[0], process_set=process_set)
        return [rows.reshape(shape)]

    (result,) = Differentiable.apply(run, gradient, tensor)
    return result if splits is None else (result, received[0])
