"""The common parts of the collectives: the start of operations, tensors as arrays, and gradients.

Operations match in the order of the calls, which must be the same on all ranks; Horovod matches them by name.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from allred.comm import functions
from allred.comm.communicator import Communicator
from allred.comm.header import quoted
from allred.comm.work import Work
from allred.errors import InputError
from allred.torch.horovod import handles
from allred.torch.horovod.horovod_errors import as_horovod_error
from allred.torch.horovod.process_sets import ProcessSet, communicator_of
from allred.torch.tensors import as_array, as_raw_array, as_tensor, check_host

Tensors = Sequence[Tensor]
Operations = Sequence[Work[Any] | handles.BlockingCall]
Started = tuple[Operations, Callable[[list[Any], int], Any]]  # operations, and handles.Started.finish
Begin = Callable[[Communicator], Started]


def start_operation(
    kind: str, name: str | None, process_set: ProcessSet, begin: Begin, is_async: bool, joins: bool
) -> int:
    """Start the operations of one call. begin: starts them, and returns them and `Started.finish`. If it raises
    InputError, all ranks raise it. Return the handle."""
    title, number = f"{kind}{quoted(name or '')}", process_set.process_set_id or 0
    communicator = communicator_of(process_set)
    key = (number, title) if name else None
    if key is not None:
        handles.check_name(key)
    if is_async:
        functions.enable_progress(communicator)
    with as_horovod_error():
        try:
            works, finish = begin(communicator)
        except InputError as error:
            communicator.check(kind.removeprefix("grouped_"), title, problem=str(error)).wait()
            raise
    return handles.add(handles.Started(title, works, communicator.size, finish, joins, key))


class Differentiable(torch.autograd.Function):
    """run: returns the list of results for tensors; gradient: returns the gradients of the tensors for those of the
    results."""

    @staticmethod
    def forward(
        ctx: Any, run: Callable[[Tensors], list[Tensor]], gradient: Callable[..., Any], *tensors: Tensor
    ) -> Any:
        ctx.gradient = gradient
        return tuple(run(tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return (None, None, *ctx.gradient(list(gradients)))


def detached(tensors: Tensors) -> list[Tensor]:
    """Return the tensors without gradient. Raises InputError for other objects and tensors that are not dense."""
    for tensor in tensors:
        if not getattr(tensor, "is_cuda", False):
            check_host(tensor)
    return [tensor.detach() for tensor in tensors]


def copies(tensors: Tensors) -> list[Tensor]:
    """As `detached`, in new memory."""
    return [tensor.clone(memory_format=torch.contiguous_format) for tensor in detached(tensors)]


def view(tensor: Tensor) -> Any:
    """Return a tensor as the collectives of allred take it: an array on the host, or a tensor on a GPU."""
    return tensor if tensor.is_cuda else as_array(tensor)


def rows_of(tensor: Tensor) -> Any:
    """Return a host tensor as an array of any dtype; a 0-d tensor counts as one of shape (1,)."""
    return as_raw_array(tensor if tensor.ndim else tensor.reshape(1))


def result_as_tensor(array: Any, like: Tensor) -> Tensor:
    """Return the result of a collective on `rows_of` as a tensor of the dtype and device of `like`."""
    if like.is_cuda:
        return torch.as_tensor(array, device=like.device)
    found = as_tensor(np.ascontiguousarray(array))
    if like.dtype.is_complex:
        return torch.view_as_complex(found)
    return found if found.dtype == like.dtype else found.view(like.dtype)
