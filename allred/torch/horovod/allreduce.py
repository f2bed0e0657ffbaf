"""Reductions over the ranks: allreduce and grouped_allreduce.

The forms without underscore return new tensors, the forms with one overwrite their argument. `..._async` returns a
handle (handles.py). `allreduce` and `grouped_allreduce` are differentiable: the gradient is the same reduction of the
gradients of all ranks (allred/torch/differentiable.py has the convention).
"""

import dataclasses
import functools
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from allred.comm import ops
from allred.comm.communicator import Communicator
from allred.comm.ops import ReduceOp
from allred.errors import InputError
from allred.horovod import handles
from allred.horovod.operators import Average, Sum, operator
from allred.horovod.process_sets import ProcessSet, global_process_set
from allred.torch.horovod.operations import (
    CollectiveCall,
    Compression,
    Tensors,
    apply_compressed,
    copies,
    detached,
    public_functions,
    view,
)


class ScaledReduction(NamedTuple):
    """The reduction of tensors that are multiplied by `prescale` before it and by `postscale` after it."""

    op: ReduceOp
    prescale: float = 1.0
    postscale: float = 1.0

    def check(self) -> "ScaledReduction":
        """Return it. Raises InputError if a factor is not a number."""
        for name, factor in (("prescale_factor", self.prescale), ("postscale_factor", self.postscale)):
            if not isinstance(factor, numbers.Real):
                raise InputError(f"{name}={factor!r} must be a number")
        return self

    def label(self, name: str, tensors: Tensors) -> str:
        """Return the name for allred, with what the ranks would not compare otherwise."""
        factors = {"prescale_factor": self.prescale, "postscale_factor": self.postscale}
        differing = [f"{key}={float(factor)}" for key, factor in factors.items() if factor != 1.0]
        if any(self._is_integer_mean(tensor) for tensor in tensors):
            differing.append("op=hvd.Average of integers")
        return ", ".join([name] * bool(name) + differing)

    def op_of(self, tensors: Tensors) -> ReduceOp:
        """Return the reduction of a group for allred, which has no average of integers."""
        return Sum if any(self._is_integer_mean(tensor) for tensor in tensors) else self.op

    def begin(self, tensor: Tensor) -> None:
        """Scale a tensor in place, before the reduction."""
        _scale_(_real(tensor), self.prescale)

    def end(self, tensor: Tensor, op: ReduceOp, size: int, active: int) -> None:
        """Complete the result of allred, by the operator `op`, in place. size: number of ranks; active: of those that
        have not joined."""
        tensor = _real(tensor)
        if self._is_integer_mean(tensor) and self.postscale != 1.0:
            _scale_(tensor, self.postscale / size)
        elif self._is_integer_mean(tensor):
            _divide_(tensor, size)
        else:
            if op is not self.op:
                tensor.div_(size)
            elif op is Average and active != size:
                tensor.mul_(active).div_(size)  # Horovod counts the ranks that have joined
            _scale_(tensor, self.postscale)

    def _is_integer_mean(self, tensor: Tensor) -> bool:
        return self.op is Average and not has_fractions(tensor)


MEAN = ScaledReduction(Average)
_HALF = (torch.float16, torch.bfloat16)
_UNSIGNED = tuple(getattr(torch, name) for name in ("uint16", "uint32", "uint64") if hasattr(torch, name))


def _real(tensor: Tensor) -> Tensor:
    """View a complex tensor as real numbers: (inf + 0j) * 2 is inf + nan j in complex arithmetic."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _divide_(tensor: Tensor, size: int) -> None:
    """Divide integers in place, and truncate."""
    if tensor.dtype in _UNSIGNED and not tensor.is_cuda:  # torch does not divide them
        array = view(tensor)
        np.floor_divide(array, size, out=array)
    else:
        torch.div(tensor, size, rounding_mode="trunc", out=tensor)


def has_fractions(tensor: Tensor) -> bool:
    """Whether the dtype of a tensor is real or complex floating point."""
    return bool(tensor.is_floating_point() or tensor.is_complex())


def _scale_(tensor: Tensor, factor: float) -> None:
    """Multiply a tensor by a factor, in place. Integers are multiplied in float64 and truncated; float16 and bfloat16
    in float32."""
    if factor == 1.0:
        return
    if has_fractions(tensor):
        tensor.mul_(factor)
    else:
        tensor.copy_(tensor.double() * factor)


@dataclasses.dataclass
class AllreduceCall(CollectiveCall):
    reduction: ScaledReduction = MEAN
    encoding: ops.Compression = ops.Compression.none  # of floats between hosts

    def check(self, tensors: Tensors) -> None:
        """Raise InputError if they cannot be reduced. All ranks raise it."""

    def begin_tensors(self, tensors: Tensors, in_place: bool) -> int:
        reduction = self.reduction

        def begin(communicator: Communicator) -> Any:
            direct = in_place and reduction.prescale == 1.0  # otherwise an error leaves the tensors as they are
            results = list(tensors) if direct else copies(tensors)
            memory = detached(results)
            self.check(memory)
            label = reduction.label(self.label, memory)
            op = reduction.op_of(memory)
            # Sums of 16-bit floats are rounded after the division only.
            sums = [tensor.float() if op is not reduction.op and tensor.dtype in _HALF else tensor for tensor in memory]
            arrays = [view(tensor) for tensor in sums]
            for tensor in sums:
                reduction.begin(tensor)

            def finish(_: Any, active: int) -> Any:
                for tensor, total in zip(memory, sums, strict=True):
                    reduction.end(total, op, communicator.size, active)
                    if total is not tensor:
                        tensor.copy_(total)
                if in_place and not direct:
                    for output, result in zip(detached(tensors), results, strict=True):
                        output.copy_(result)
                    return list(tensors) if self.is_list else tensors[0]
                return results if self.is_list else results[0]

            return [self._operation(communicator, arrays, op, label)], finish

        return self.start(begin, allows_joined=True)

    def _operation(self, communicator: Communicator, arrays: list[Any], op: ReduceOp, label: str) -> Any:
        """Start the reduction of arrays in place."""
        if self.is_async and self.is_list:
            return communicator.grouped_allreduce(arrays, op, label, self.encoding, in_place=True)
        if self.is_async:
            return communicator.allreduce(arrays[0], op, label, self.encoding, in_place=True)
        reduce: Callable[[], Any]
        if self.is_list:
            reduce = functools.partial(communicator.grouped_allreduce_blocking, arrays, True, op, label, self.encoding)
        else:
            reduce = functools.partial(communicator.allreduce_blocking, arrays[0], True, op, label, self.encoding)
        return handles.DeferredCall(communicator, reduce)

    def apply(self, tensors: Tensors, compression: Any) -> list[Tensor]:
        def gradient(gradients: Tensors) -> list[Tensor]:  # differentiable too
            return dataclasses.replace(self, name=None).apply(gradients, Compression.none)

        call = dataclasses.replace(self, encoding=getattr(compression, "encoding", ops.Compression.none))
        return apply_compressed(compression, call.run, gradient, tensors)


def _allreduce(
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> CollectiveCall:
    reduction = ScaledReduction(operator(op, average), prescale_factor, postscale_factor).check()
    return AllreduceCall("allreduce", name, process_set, reduction=reduction)


allreduce, allreduce_async, allreduce_, allreduce_async_ = public_functions(
    _allreduce,
    "allreduce",
    ("_async", "_", "_async_"),
    """Reduce a tensor over the ranks. Returns a new tensor of its shape and dtype. Differentiable; for the gradient of
    a computation with an allreduce in it see `allred.torch.differentiable.allreduce`.

    average: deprecated, use `op`. op: hvd.Average (default; integers are truncated), Sum, Min, Max or Product. Complex
    numbers have no Min and Max.
    prescale_factor, postscale_factor: the tensor is multiplied by them before and after the reduction.
    compression: hvd.Compression.none, .fp16, .int8 or .int4, or a class with static methods `compress` and
        `decompress`.

    Raises HorovodInternalError, on all ranks, if the tensors or calls differ or cannot be used; ValueError, on this
    rank, for another `op`; NotImplementedError for hvd.Adasum.

    Example: on 2 ranks, `hvd.allreduce(torch.tensor([1.0 + hvd.rank()]))` returns `[1.5]`.
    """,
    "tensor, op=hvd.Sum",
    compression_at=2,
)
grouped_allreduce, grouped_allreduce_async, grouped_allreduce_, grouped_allreduce_async_ = public_functions(
    _allreduce,
    "grouped_allreduce",
    ("_async", "_", "_async_"),
    """Reduce a list of tensors as one operation, which is faster than one by one. Returns a list of new tensors.
    Arguments and errors: see `allreduce`. Differentiable.

    Example: `hvd.grouped_allreduce([torch.ones(2), torch.ones(3)], op=hvd.Sum)`.
    """,
    "[tensor, other]",
    compression_at=2,
)
