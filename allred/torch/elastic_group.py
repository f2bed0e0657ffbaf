"""The process group of torch.distributed in a job of `allred run --elastic`, while the ranks change.

    DDP's operations in a step    complete without their result, and `Recovery` notes it: then the step of a distributed
                                  optimizer makes no update. An error would leave the reducer in the middle of a
                                  backward pass
    DDP's constructor             in a process that joins a running training: as on one rank, because the other ranks
                                  construct nothing then. The process receives the parameters afterwards
    other operations              raise RanksChanged; in such a process InputError

In the next world the group has other ranks, and each DDP a new reducer (`begin_world`): the old one divides by the old
number of ranks, and has an order of buckets that a process which joins does not know.
"""

import gc
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from allred.errors import ConfigError, InputError

# Functions of torch: those of DDP's constructor; that of DDP before a forward pass, which broadcasts buffers and the
# order of buckets; and that of all backward passes.
_CONSTRUCTOR = {"_verify_param_shape_across_processes", "_sync_module_states"}
_STEP = {"_pre_forward", "_engine_run_backward"}


def _is_called_by(names: set[str]) -> bool:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_name not in names:
        frame = frame.f_back
    return frame is not None


def loss_handler(recovery: Any, method: str, arguments: Sequence[Any]) -> Callable[[Exception], None] | None:
    """Return what to call with the RanksChanged of an operation that is being started, so that it completes without
    its result; None if the program must get the error."""
    if not (recovery.may_lose_operations and _is_called_by(_STEP)):
        return None

    before = [(each, each.clone()) for each in arguments[0]] if method == "broadcast" else []

    def lose(error: Exception) -> None:
        recovery.lose_operation(error)
        for tensor, value in before:
            tensor.copy_(value)

    return lose


def answer_to_joiner(method: str, arguments: Sequence[Any]) -> None:
    """Do what an operation does on one rank, in DDP's constructor of a process that joins a running training. Raises
    InputError for other operations."""
    if not _is_called_by(_CONSTRUCTOR):
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
    """Tell torch the ranks of a group whose communicator is that of a new world."""
    if (group.size(), group.rank()) != (group.communicator.size, group.communicator.rank):
        raise ConfigError(f"torch {torch.__version__} cannot change the ranks of a process group; use a later version")
    dist.distributed_c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(group.communicator.size)}
    for each in gc.get_objects():  # DDP has no list of its instances
        if issubclass(type(each), DistributedDataParallel) and vars(each).get("process_group") is group:
            _renew_reducer(each)


def _renew_reducer(module: Any) -> None:
    """Give a DDP a new reducer, as a pickle of it gets one, and the same communication hooks."""
    module._remove_autograd_hooks()
    module.__setstate__(module.__getstate__())
    if module.static_graph:
        module._static_graph_delay_allreduce_enqueued = False
    for hook, state in module._comm_hooks:
        dist._register_comm_hook(module.reducer, state, hook)
