"""Broadcast of parameters and optimizer state; broadcast and allgather of Python objects."""

import pickle
from collections.abc import Callable
from typing import Any

import torch

from allred.comm.communicator import Communicator
from allred.errors import InputError
from allred.horovod import handles
from allred.horovod.horovod_errors import HorovodInternalError
from allred.horovod.object_pickle import dumps
from allred.horovod.process_sets import ProcessSet, communicator_of, global_process_set
from allred.torch.hooked_optimizer import HookedOptimizer
from allred.torch.horovod.collectives import broadcast_async_
from allred.torch.horovod.operations import CollectiveCall
from allred.torch.optimizer_state import load_in_place

_TENSOR = "allred: a tensor, which is sent apart"


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
    started, errors = [], []
    for name, tensor in pairs:
        try:
            started.append(broadcast_async_(tensor, root_rank, name))
        except HorovodInternalError as error:  # on all ranks, which start the others too
            errors.append(error)
    handles.synchronize_all(started)
    if errors:
        raise errors[0]


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Copy the state and the hyperparameters of an optimizer of rank `root_rank` to all ranks. As `load_state_dict`, it
    discards the gradients of an unfinished step.

    model: ignored.

    Raises ValueError for torch.optim.LBFGS, as Horovod does.

    Example: `hvd.broadcast_optimizer_state(optimizer, root_rank=0)`.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(f"broadcast_optimizer_state({type(optimizer).__name__}): expected an optimizer of torch")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InputError("broadcast_optimizer_state(): the state of torch.optim.LBFGS cannot be broadcast")
    is_root = communicator_of(global_process_set).number == root_rank
    tensors: list[torch.Tensor] = []

    def take(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        tensors.append(value.to_dense().contiguous())  # the momentum of sparse gradients; torch takes dense too
        return _TENSOR, len(tensors) - 1

    state = _map(optimizer.state_dict(), take) if is_root else None
    layout = [(tensor.shape, tensor.dtype, tensor.device.type) for tensor in tensors]
    hooked = getattr(optimizer, "allred", None)
    counters = hooked.counters if isinstance(hooked, HookedOptimizer) else None
    state, layout, sent = broadcast_object((state, layout, counters), root_rank, "state of the optimizer")
    if not is_root:
        tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in layout]
    broadcast_parameters(tensors, root_rank)
    if not is_root:
        given = _map(state, lambda value: tensors[value[1]] if _is_tensor_mark(value) else value, _is_tensor_mark)
        load_in_place(optimizer, given)
        if isinstance(hooked, HookedOptimizer) and sent is not None:
            hooked.counters = sent
    elif isinstance(hooked, HookedOptimizer):
        hooked.forget_gradients()  # as load_state_dict does on the other ranks


def _is_tensor_mark(value: Any) -> bool:
    return type(value) is tuple and value[:1] == (_TENSOR,)


def _map(value: Any, function: Callable[[Any], Any], is_leaf: Callable[[Any], bool] = lambda _: False) -> Any:
    """Return a copy of nested dicts, lists and tuples with `function` of each leaf."""
    if type(value) is dict:
        return {key: _map(each, function, is_leaf) for key, each in value.items()}
    if type(value) in (list, tuple) and not is_leaf(value):
        return type(value)(_map(each, function, is_leaf) for each in value)
    return function(value)


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the object of rank `root_rank`; the `obj` of other ranks is ignored.

    The object must be picklable; with the package cloudpickle installed also lambdas and functions of the program.

    Raises HorovodInternalError, on all ranks, if the object cannot be pickled, or after `hvd.join()` of some ranks.

    Example: `epoch = hvd.broadcast_object(epoch, root_rank=0)`.
    """
    is_root, call = (
        communicator_of(process_set).number == root_rank,
        CollectiveCall("broadcast_object", name, process_set),
    )

    def begin(communicator: Communicator) -> Any:
        data = dumps(obj) if is_root else b""
        return [communicator.broadcast_object(data, root_rank, call.label)], lambda results, _: results[0]

    (received,) = call.results(call.start(begin))
    return obj if is_root else pickle.loads(received)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Return the objects of all ranks, in rank order. Objects and errors: see `broadcast_object`.

    Example: `losses = hvd.allgather_object(loss)`.
    """
    call = CollectiveCall("allgather_object", name, global_process_set)

    def begin(communicator: Communicator) -> Any:
        return [communicator.allgather_object(dumps(obj), call.label)], lambda results, _: results[0]

    (gathered,) = call.results(call.start(begin))
    return [pickle.loads(data) for data in gathered]
