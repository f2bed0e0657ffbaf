"""Reductions over the ranks: allreduce and grouped_allreduce.

The forms without underscore return new tensors, the forms with one overwrite their argument. `..._async` returns a
handle (handles.py). `allreduce` and `grouped_allreduce` are differentiable: the gradient is the same reduction.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from allred.comm.communicator import Communicator
from allred.comm.ops import ReduceOp
from allred.errors import InputError
from allred.torch.horovod import handles
from allred.torch.horovod.compression import Compression
from allred.torch.horovod.operations import (
    Differentiable,
    Operations,
    Started,
    Tensors,
    copies,
    detached,
    start_operation,
    view,
)
from allred.torch.horovod.process_sets import ProcessSet, global_process_set

Average, Sum, Min, Max, Product = ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT
Adasum = "Adasum"


def operator(op: Any, average: bool | None) -> Any:
    """Return the reduction of the arguments `op` and `average`, which is deprecated."""
    if op is not None and average is not None:
        raise InputError("op and average exclude each other; pass op=hvd.Average or op=hvd.Sum only")
    if op is None:
        return Sum if average is False else Average
    if op == Adasum:
        raise NotImplementedError("Adasum is not available; use op=hvd.Average")
    if not isinstance(op, ReduceOp):
        raise InputError(f"op={op!r} is not a reduction; use hvd.Average, hvd.Sum, hvd.Min, hvd.Max or hvd.Product")
    return op


def scale_(tensor: Tensor, factor: float) -> None:
    """Multiply in place: integers in float64, rounded toward zero; 16-bit floats in float32."""
    if factor == 1.0:
        return
    if tensor.is_floating_point():
        tensor.mul_(factor)
    else:
        tensor.copy_(tensor.double() * factor)


def is_integer_mean(tensor: Tensor, op: ReduceOp) -> bool:
    return op is Average and not tensor.is_floating_point()


def divide(tensor: Tensor, op: ReduceOp, size: int, active: int) -> None:
    """Complete an average over `size` ranks: of integers from the sum; of floats from the mean over `active` ranks."""
    if is_integer_mean(tensor, op):
        torch.div(tensor, size, rounding_mode="trunc", out=tensor)
    elif op is Average and active != size:
        tensor.mul_(active).div_(size)


def _start_allreduce(
    tensors: Tensors,
    outputs: Tensors | None,
    op: ReduceOp,
    name: str | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    is_list: bool,
    is_async: bool = False,
) -> int:
    """outputs: the tensors to overwrite, or None for new ones."""
    kind, label = "grouped_allreduce" if is_list else "allreduce", name or ""

    def begin(communicator: Communicator) -> Started:
        results = copies(tensors) if outputs is None else outputs
        memory = detached(results)
        ops = [Sum if is_integer_mean(tensor, op) else op for tensor in memory]
        arrays = [view(tensor) for tensor in memory]
        for tensor in memory:
            scale_(tensor, prescale)
        works: Operations
        if len(arrays) == 1 and not is_async:
            call = functools.partial(communicator.allreduce_blocking, arrays[0], True, ops[0], label)
            works = [handles.BlockingCall(communicator, call)]
        elif len(set(ops)) == 1 and not is_async:
            group = functools.partial(communicator.grouped_allreduce_blocking, arrays, True, ops[0], label)
            works = [handles.BlockingCall(communicator, group)]
        elif len(set(ops)) == 1 and len(arrays) > 1:
            works = [communicator.grouped_allreduce(arrays, ops[0], label, in_place=True)]
        else:
            works = [communicator.allreduce(*pair, label, in_place=True) for pair in zip(arrays, ops, strict=True)]

        def finish(_: Any, active: int) -> Any:
            for tensor in memory:
                divide(tensor, op, communicator.size, active)
                scale_(tensor, postscale)
            return list(results) if is_list else results[0]

        return works, finish

    return start_operation(kind, name, process_set, begin, is_async, joins=True)


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start `allreduce`, without compression and gradient. Returns a handle.

    Raises ValueError if an operation of this name is not complete.

    Example: `hvd.synchronize(hvd.allreduce_async(torch.ones(2), op=hvd.Sum))`.
    """
    op = operator(op, average)
    return _start_allreduce([tensor], None, op, name, prescale_factor, postscale_factor, process_set, False, True)


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduce a tensor over the ranks. Returns a new tensor of its shape and dtype. Differentiable.

    average: deprecated, use `op`. op: hvd.Average (default; of integers rounded toward zero), Sum, Min, Max or Product.
    prescale_factor, postscale_factor: the tensor is multiplied by them before and after the reduction.
    compression: hvd.Compression.none or .fp16, or a class with static methods `compress` and `decompress`.

    Raises HorovodInternalError, on all ranks, if the tensors or calls differ or cannot be used; NotImplementedError for
    hvd.Adasum.

    Example: on 2 ranks, `hvd.allreduce(torch.tensor([1.0 + hvd.rank()]))` returns `[1.5]`.
    """
    op, named = operator(op, average), [name]

    def reduce(tensors: Tensors) -> list[Tensor]:
        label = named.pop() if named else None  # the gradient has no name
        scales = prescale_factor, postscale_factor
        return [handles.synchronize(_start_allreduce(tensors, None, op, label, *scales, process_set, False))]

    compressed, context = compression.compress(tensor)
    (result,) = Differentiable.apply(reduce, reduce, compressed)
    return compression.decompress(result, context)


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start `allreduce_`. Returns a handle.

    Example: `hvd.synchronize(hvd.allreduce_async_(tensor))`.
    """
    op = operator(op, average)
    return _start_allreduce([tensor], [tensor], op, name, prescale_factor, postscale_factor, process_set, False, True)


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """As `allreduce`, in place: overwrite the tensor and return it. Not differentiable.

    Example: `hvd.allreduce_(tensor, op=hvd.Max)`.
    """
    op, scales = operator(op, average), (prescale_factor, postscale_factor)
    return handles.synchronize(_start_allreduce([tensor], [tensor], op, name, *scales, process_set, False))


def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start `grouped_allreduce`, without compression and gradient. Returns a handle.

    Example: `hvd.synchronize(hvd.grouped_allreduce_async([torch.ones(2), torch.ones(3)]))`.
    """
    op = operator(op, average)
    return _start_allreduce(tensors, None, op, name, prescale_factor, postscale_factor, process_set, True, True)


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Reduce a list of tensors as one operation, which is faster than one by one. Returns a list of new tensors.
    Arguments and errors: see `allreduce`. Differentiable.

    Example: `hvd.grouped_allreduce([torch.ones(2), torch.ones(3)], op=hvd.Sum)`.
    """
    op, named = operator(op, average), [name]

    def reduce(tensors: Tensors) -> list[Tensor]:
        label = named.pop() if named else None
        scales = prescale_factor, postscale_factor
        return handles.synchronize(  # type: ignore[no-any-return]
            _start_allreduce(tensors, None, op, label, *scales, process_set, True)
        )

    pairs = [compression.compress(tensor) for tensor in tensors]
    results = Differentiable.apply(reduce, reduce, *(compressed for compressed, _ in pairs))
    return [compression.decompress(result, context) for result, (_, context) in zip(results, pairs, strict=True)]


def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start `grouped_allreduce_`. Returns a handle.

    Example: `hvd.synchronize(hvd.grouped_allreduce_async_(tensors))`.
    """
    op = operator(op, average)
    return _start_allreduce(tensors, tensors, op, name, prescale_factor, postscale_factor, process_set, True, True)


def grouped_allreduce_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """As `grouped_allreduce`, in place: overwrite the tensors and return them. Not differentiable.

    Example: `hvd.grouped_allreduce_([tensor.grad for tensor in parameters])`.
    """
    op, scales = operator(op, average), (prescale_factor, postscale_factor)
    return handles.synchronize(  # type: ignore[no-any-return]
        _start_allreduce(tensors, tensors, op, name, *scales, process_set, True)
    )
