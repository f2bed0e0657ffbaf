"""Sums of sparse tensors over the ranks: all ranks gather indices and values."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from allred.errors import InputError
from allred.torch.horovod import handles
from allred.torch.horovod.allgather import allgather_async
from allred.torch.horovod.allreduce import Average, Sum, operator
from allred.torch.horovod.process_sets import ProcessSet, communicator_of, global_process_set


def sparse_allreduce_async(
    tensor: Tensor, name: str, op: Any, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Start the sum or average of a sparse COO tensor. Returns a function that waits and returns the sparse result.

    Raises ValueError for other reductions and tensors; the returned function raises HorovodInternalError.

    Example: `total = hvd.sparse_allreduce_async(gradient, name="embedding", op=hvd.Sum)()`.
    """
    if (found := operator(op)) not in (Average, Sum):
        raise InputError(f"op={found!r} of a sparse tensor: use hvd.Average or hvd.Sum")
    if not tensor.is_sparse:
        raise InputError(f"sparse_allreduce_async({name!r}): expected a sparse COO tensor; use allreduce_async")
    mine, size = tensor.detach().coalesce(), communicator_of(process_set).size
    indices = allgather_async(mine.indices().t().contiguous(), f"{name}.indices", process_set)
    values = allgather_async(mine.values(), f"{name}.values", process_set)

    def wait() -> Tensor:
        rows, parts = handles.synchronize_all([indices, values])
        total = torch.sparse_coo_tensor(rows.t(), parts, tensor.shape, check_invariants=False).coalesce()
        if found is Average:
            total.values().div_(size)
        return total

    return wait
