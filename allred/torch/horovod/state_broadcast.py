"""Copies of parameters, optimizer states and Python objects to all ranks."""

import pickle
from typing import Any

import torch

from allred.comm import functions
from allred.errors import InputError
from allred.torch.horovod import handles
from allred.torch.horovod.broadcast import broadcast_async_
from allred.torch.horovod.horovod_errors import as_horovod_error
from allred.torch.horovod.process_sets import ProcessSet, communicator_of, global_process_set

_PLACES = "allred: a tensor, which is sent apart"


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Copy tensors of rank `root_rank` to all ranks, in place.

    params: a dict, such as `model.state_dict()`; or a list of tensors or of (name, tensor). The same on all ranks.

    Raises ValueError for another type; HorovodInternalError, on all ranks, if shapes or dtypes differ.

    Example: `hvd.broadcast_parameters(model.state_dict(), root_rank=0)`.
    """
    if isinstance(params, dict):
        pairs = sorted(params.items())
    elif isinstance(params, list):
        pairs = [each if isinstance(each, tuple) else (None, each) for each in params]
    else:
        raise InputError(
            f"broadcast_parameters({type(params).__name__}): expected a dict or a list, such as model.state_dict() or "
            "list(model.parameters())"
        )
    started = [broadcast_async_(tensor, root_rank, name) for name, tensor in pairs]
    for handle in started:
        handles.synchronize(handle)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Copy the state and the hyperparameters of an optimizer of rank `root_rank` to all ranks.

    model: without meaning; Horovod needs it to create states.

    Raises ValueError for torch.optim.LBFGS, as Horovod does.

    Example: `hvd.broadcast_optimizer_state(optimizer, root_rank=0)`.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InputError("broadcast_optimizer_state(): the state of torch.optim.LBFGS cannot be broadcast")
    tensors: list[torch.Tensor] = []
    is_root = functions.current().number == root_rank if communicator_of(global_process_set) else False
    state = _without_tensors(optimizer.state_dict(), tensors) if is_root else None
    layout = [(tensor.shape, tensor.dtype, tensor.device.type) for tensor in tensors]
    state, layout = broadcast_object((state, layout), root_rank, "state of the optimizer")
    if not is_root:
        tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in layout]
    broadcast_parameters([tensor.contiguous() if is_root else tensor for tensor in tensors], root_rank)
    if not is_root:
        optimizer.load_state_dict(_with_tensors(state, tensors))


def _without_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return a copy of nested dicts, lists and tuples in which (_PLACES, index) stands for tensors[index]."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _PLACES, len(tensors) - 1
    if type(value) is dict:
        return {key: _without_tensors(each, tensors) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_without_tensors(each, tensors) for each in value)
    return value


def _with_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    if type(value) is tuple and value[:1] == (_PLACES,):
        return tensors[value[1]]
    if type(value) is dict:
        return {key: _with_tensors(each, tensors) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with_tensors(each, tensors) for each in value)
    return value


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the object of rank `root_rank`; the `obj` of other ranks is ignored.

    The object must be picklable; with the package cloudpickle installed also lambdas and functions of the program.

    Example: `epoch = hvd.broadcast_object(epoch, root_rank=0)`.
    """
    communicator = communicator_of(process_set)
    with as_horovod_error():
        data = _dumps(obj) if communicator.number == root_rank else b""
        received = communicator.broadcast_object(data, root_rank, name or "").wait()
        if communicator.active.size < communicator.size:
            raise InputError("broadcast_object() is not possible after hvd.join() of some ranks")
    return obj if communicator.number == root_rank else pickle.loads(received)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Return the objects of all ranks, in rank order. Objects: see `broadcast_object`.

    Example: `losses = hvd.allgather_object(loss)`.
    """
    communicator = communicator_of(global_process_set)
    with as_horovod_error():
        gathered = communicator.allgather_object(_dumps(obj), name or "").wait()
        if len(gathered) < communicator.size:
            raise InputError("allgather_object() is not possible after hvd.join() of some ranks")
    return [pickle.loads(data) for data in gathered]


def _dumps(value: Any) -> bytes:
    try:
        import cloudpickle
    except ModuleNotFoundError:
        return pickle.dumps(value)
    data: bytes = cloudpickle.dumps(value)
    return data
