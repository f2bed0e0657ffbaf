"""The process group of torch.distributed in a job of `allred run --elastic`, while the ranks change.

    operations in a step of DDP   complete without their result, and `Recovery` notes it: then the step of a distributed
                                  optimizer makes no update. An error would leave the reducer in the middle of a
                                  backward pass. These are all operations in backward passes, and those of DDP before
                                  a forward pass
    DDP's constructor             in a process that joins a running training: as on one rank, because the other ranks
                                  construct nothing then. The process receives the parameters afterwards
    other operations              raise RanksChanged; in such a process InputError

In the next world the default group has other ranks, and each DDP a new reducer (`begin_world`): the old one has an
order of buckets that a process which joins does not know.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from allred.errors import ConfigError, InputError

# Living DDPs whose constructor has communicated; and those whose gradients a distributed optimizer uses.
constructed, managed = WeakSet[DistributedDataParallel](), WeakSet[DistributedDataParallel]()


def _codes(*functions: tuple[Any, str]) -> set[Any]:
    """Return the code of functions of torch, which not all versions have. functions: their modules or classes."""
    return {getattr(owner, name).__code__ for owner, name in functions if hasattr(owner, name)}


_CONSTRUCTOR = _codes((DistributedDataParallel, "__init__"))
# Before a forward pass DDP broadcasts buffers and the order of buckets; and all backward passes.
_STEP = _codes((DistributedDataParallel, "_pre_forward"), (torch.autograd.graph, "_engine_run_backward"))


def _caller(codes: set[Any]) -> FrameType | None:
    """Return the frame of the innermost of these functions that run; None if none does."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code not in codes:
        frame = frame.f_back
    return frame


def note_constructor() -> None:
    """Note the DDP whose constructor makes this operation, if one does."""
    if (frame := _caller(_CONSTRUCTOR)) is not None:
        constructed.add(frame.f_locals["self"])


def has_ddp(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether a DDP has one of these parameters."""
    ids = set(map(id, parameters))
    return any(id(each) in ids for module in constructed for each in module.parameters())


def loss_handler(recovery: Any, method: str, arguments: Sequence[Any]) -> Callable[[Exception], None] | None:
    """Return what to call with the RanksChanged of an operation that is being started, so that it completes without
    its result; None if the program must get the error."""
    if not recovery.may_lose_operations or constructed - managed or (frame := _caller(_STEP)) is None:
        return None
    in_backward = frame.f_code.co_name == "_engine_run_backward"

    before = [(each, each.clone()) for each in arguments[0]] if method == "broadcast" else []
    generation = recovery.generation

    def lose(error: Exception) -> None:
        if recovery.generation == generation:
            recovery.lose_operation(error, in_backward)
        for tensor, value in before:
            tensor.copy_(value)

    return lose


def answer_to_joiner(method: str, arguments: Sequence[Any]) -> None:
    """Do what an operation does on one rank, in DDP's constructor of a process that joins a running training. Raises
    InputError for other operations."""
    if _caller(_CONSTRUCTOR) is None:
        raise InputError(
            f"{method}(): this process has joined a running training, whose ranks do not make this call now; call "
            "session.track(params=model) or optimizer.allred.broadcast(model) before other collectives"
        )
    if method == "allgather":  # the outputs of others are their inputs
        outputs, inputs, *_ = arguments
        for into in outputs:
            for output in into:
                output.copy_(inputs[0])


def begin_world(group: Any) -> None:
    """Tell torch the new ranks of a group, and give its DDPs new reducers."""
    if (group.size(), group.rank()) != (group.communicator.size, group.communicator.rank):
        raise ConfigError(f"torch {torch.__version__} cannot change the ranks of a process group; use a later version")
    dist.distributed_c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(group.communicator.size)}
    for module in constructed | managed:
        if module.process_group is group:
            _renew_reducer(module)


def _renew_reducer(module: Any) -> None:
    """Give a DDP a new reducer, as a pickle of it gets one, and the same communication hooks."""
    module._remove_autograd_hooks()
    module.__setstate__(module.__getstate__())
    if module.static_graph:
        module._static_graph_delay_allreduce_enqueued = False
    for hook, state in module._comm_hooks:
        dist._register_comm_hook(module.reducer, state, hook)
