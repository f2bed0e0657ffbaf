"""`allreduce` for the middle of a forward pass: torch computes the gradient through it."""

import dataclasses

import torch

from allred.comm.ops import ReduceOp
from allred.comm.process_set import ProcessSet
from allred.errors import InputError
from allred.horovod.process_sets import global_process_set
from allred.torch.horovod.allreduce import AllreduceCall, ScaledReduction, has_fractions
from allred.torch.horovod.operations import Compression, Tensors


@dataclasses.dataclass
class _DifferentiableAllreduce(AllreduceCall):
    """An allreduce that is linear, so that its gradient is an allreduce."""

    def check(self, tensors: Tensors) -> None:
        if self.reduction.op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            raise InputError(f"op={self.reduction.op!r} is not linear; use allred.Average or allred.Sum")
        if odd := next((tensor.dtype for tensor in tensors if not has_fractions(tensor)), None):
            raise InputError(f"dtype {odd} has no gradients; convert the tensor, for example by tensor.float()")


def allreduce(
    tensor: torch.Tensor, op: ReduceOp = ReduceOp.AVERAGE, process_set: ProcessSet | None = None
) -> torch.Tensor:
    """Reduce a tensor over the ranks in a computation that torch differentiates. Returns a new tensor. Collective, also
    in the backward pass: each rank calls `backward()` for its result.

    The convention: each rank has its own loss L_r, and the gradients are those of the sum of all losses. With
    y = allreduce(x), and g_r the gradient of L_r with respect to y on rank r, the gradient with respect to x is on all
    ranks

        op=allred.Sum       g_0 + g_1 + ... + g_(N-1)
        op=allred.Average   (g_0 + g_1 + ... + g_(N-1)) / N

    Afterwards each rank has, for a parameter with equal values on all ranks, the part of the gradient that comes from
    its own use of the parameter. Combine the parts over the ranks:

        Average  the gradient of the mean of the losses. `allred.distributed(optimizer)` does this at the end of the
                 backward pass.
        Sum      the gradient of the sum of the losses.

    When to divide or multiply by N:

        all ranks compute the same loss from reduced values   nothing, with averages: it is the mean of equal losses.
                                                               Divide sums of parameter gradients by N
        L_r is a mean over the samples of rank r               nothing, with averages
        L_r is a share of one loss, the sum of all L_r         multiply L_r by N with averages, or use sums

    Arguments:
        tensor: of floating-point or complex numbers, on the host or a GPU, with the same shape and dtype on all ranks.
            A complex gradient is that of torch: the derivative by the real part plus i times the derivative by the
            imaginary part.
        op: allred.Average or allred.Sum.
        process_set: an `allred.ProcessSet`; None: all ranks.

    Derivatives of higher order are supported. Raises InputError or MismatchError, on all ranks, if the tensors differ
    in shape or dtype or cannot be used, or for another `op`.

    Example: on 2 ranks, with `x = torch.tensor(1.0 + allred.rank(), requires_grad=True)`, the variance of the x of all
    ranks is `v = allreduce(x * x) - allreduce(x) ** 2`, `0.25` on both. After `v.backward()`, `x.grad` is
    `2 * (x - 1.5)`, `-1` and `1`: v is computed on both ranks, so it is the gradient of 2 * v, and the mean over the
    ranks of a parameter's gradients is that of v.
    """
    ranks, reduction = global_process_set if process_set is None else process_set, ScaledReduction(op)
    call = _DifferentiableAllreduce("allreduce", None, ranks, reduction=reduction)
    return call.apply([tensor], Compression.none)[0]
