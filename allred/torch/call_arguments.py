"""The arguments of torch's calls of a process group: their device, and calls without options."""

import datetime
import types
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

_OPTIONS = {int: "rootRank", datetime.timedelta: "timeout"}  # arguments in place of options, by type; others: reduceOp


def with_options(arguments: Sequence[Any], takes_lists: bool) -> tuple[Any, ...]:
    """Return the arguments of a call without options as those of a call with options. Such calls have root, operator
    and time limit as arguments, or none of them, and may have a tensor in place of a list of one tensor."""
    tensors = [each for each in arguments if isinstance(each, (torch.Tensor, list, tuple))]
    if takes_lists and any(isinstance(each, torch.Tensor) for each in tensors):
        tensors = [[each] for each in tensors]
    options = types.SimpleNamespace(reduceOp=dist.ReduceOp.SUM, rootRank=0, timeout=None)
    for each in arguments:
        if each is not None and not isinstance(each, (torch.Tensor, list, tuple)):
            setattr(options, _OPTIONS.get(type(each), "reduceOp"), each)
    return (*tensors, options)


def device_of(arguments: Sequence[Any]) -> str:
    """Return the type of the device of the tensors in nested lists; "cpu" if there are none."""
    for each in arguments:
        if isinstance(each, torch.Tensor):
            return str(each.device.type)
        if isinstance(each, (list, tuple)) and (found := device_of(each)) != "cpu":
            return found
    return "cpu"
