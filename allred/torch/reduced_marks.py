"""Marks gradients that must not be reduced again: sums over the ranks, results of Horovod's other operators, and
gradients that were divided by the scale.

The mean of means is the mean, so a hooked optimizer may average a gradient again after each backward pass. With another
operator or `scaler` it may not. The mark is an attribute of the gradient tensor, so it ends with the tensor and is
valid for all optimizers that have the parameter.

    no mark   a gradient of this rank, such as after zero_grad()
    REDUCED   by all ranks; equal on all. It is not reduced again
    MIXED     a later backward pass has added the gradient of this rank: an error in the next reduction
"""

import weakref
from typing import Any

import torch

from allred.comm.ops import ReduceOp
from allred.torch.uncompiled import uncompiled

REDUCED, MIXED = BOTH = "reduced", "mixed"
_NAME = "_allred_mark"


def mark(parameters: dict[str, torch.Tensor]) -> None:
    """Mark the gradients of all parameters as REDUCED."""
    for parameter in parameters.values():
        if parameter.grad is not None:
            setattr(parameter.grad, _NAME, REDUCED)


def marked(parameters: dict[str, torch.Tensor], *which: str) -> list[str]:
    """Return the names of the parameters whose gradient has one of these marks."""
    return [name for name, parameter in parameters.items() if _mark_of(parameter.grad) in which]


def refusal(parameters: dict[str, torch.Tensor], op: ReduceOp) -> str:
    """Return why the gradients cannot be reduced again, or ""."""
    mixed = marked(parameters, MIXED)
    if not mixed:
        return ""
    cause = f"op=allred.{op.value}: '{mixed[0]}' was reduced over the ranks already"
    if op is ReduceOp.AVERAGE:
        cause = f"scaler: '{mixed[0]}' was divided by the scale already"
    return (
        f"{cause}, and a later backward() has added a gradient of each rank; pass accumulate=2 to allred.distributed "
        "(backward_passes_per_step=2 to hvd.DistributedOptimizer), use opt.allred.no_sync() for all but the last "
        "backward(), or call opt.zero_grad() in between"
    )


def watch(parameter: torch.Tensor) -> list[Any]:
    """Mark the gradient of a parameter as MIXED when a backward pass adds to a marked one. Return the handles of the
    hooks."""
    reference, adds = weakref.ref(parameter), False

    @uncompiled
    def before(_: torch.Tensor) -> None:  # torch.autograd.grad calls it too, and nothing is added
        nonlocal adds
        parameter = reference()
        adds = parameter is not None and bool(_mark_of(parameter.grad))

    @uncompiled
    def after(parameter: torch.Tensor) -> None:
        if adds:
            setattr(parameter.grad, _NAME, MIXED)

    return [parameter.register_hook(before), parameter.register_post_accumulate_grad_hook(after)]


def _mark_of(grad: torch.Tensor | None) -> str:
    """Return the mark of a gradient; "" if it has none, or all its elements are zero."""
    found: str = getattr(grad, _NAME, "")
    if found and grad is not None:
        values = grad.coalesce().values() if grad.is_sparse else grad
        if not values.count_nonzero():
            delattr(grad, _NAME)
            return ""
    return found
