"""reducescatter and grouped_reducescatter. The gradient is gathered from all ranks, and scaled as in Horovod."""

from typing import Any

from torch import Tensor

from allred.comm.communicator import Communicator
from allred.errors import InputError
from allred.torch.horovod.allgather import grouped_allgather
from allred.torch.horovod.allreduce import Average, ScaledReduction, Sum, operator
from allred.torch.horovod.compression import Compression
from allred.torch.horovod.operations import (
    CollectiveCall,
    Tensors,
    apply_compressed,
    copies,
    detached,
    result_as_tensor,
    view,
)
from allred.torch.horovod.process_sets import ProcessSet, communicator_of, global_process_set


def _reduction(op: Any, prescale: float, postscale: float) -> ScaledReduction:
    if (found := operator(op)) not in (Average, Sum):
        raise InputError(f"reducescatter with op={found!r}: use hvd.Average or hvd.Sum")
    return ScaledReduction(found, prescale, postscale).check()


def _start(call: CollectiveCall, tensors: Tensors, reduction: ScaledReduction) -> int:
    def begin(communicator: Communicator) -> Any:
        sources = detached(tensors) if reduction.prescale == 1.0 else copies(tensors)
        for tensor in sources:
            reduction.begin(tensor)
        pairs = [(view(tensor), reduction.op_of([tensor])) for tensor in sources]
        label = reduction.label(call.label, sources)
        works = [communicator.reducescatter(*pair, label) for pair in pairs]

        def finish(results: list[Any], active: int) -> Any:
            found = [result_as_tensor(result, tensor) for result, tensor in zip(results, sources, strict=True)]
            for tensor, (_, op) in zip(found, pairs, strict=True):
                reduction.end(tensor, op, communicator.size, active)
            return found if call.is_list else found[0]

        return works, finish

    return call.start(begin, len(tensors))


def _reduce_and_scatter(
    call: CollectiveCall, tensors: Tensors, compression: Any, reduction: ScaledReduction
) -> list[Tensor]:
    """Reduce and scatter tensors, with gradient."""
    process_set = call.process_set

    def run(tensors: Tensors) -> list[Tensor]:
        return call.results(_start(call, tensors, reduction))

    def gradient(gradients: Tensors) -> list[Tensor]:
        ranks = communicator_of(process_set).size if reduction.op is Sum else 1
        factor = reduction.prescale * reduction.postscale * ranks
        return grouped_allgather([each * factor for each in gradients], process_set=process_set)

    return apply_compressed(compression, run, gradient, tensors)


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start `reducescatter`, without compression and gradient. Returns a handle.

    Example: `hvd.synchronize(hvd.reducescatter_async(torch.ones(4)))`.
    """
    reduction = _reduction(op, prescale_factor, postscale_factor)
    return _start(CollectiveCall("reducescatter", name, process_set, is_async=True), [tensor], reduction)


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Reduce a tensor over the ranks, and return this rank's rows of the result, a new tensor. If the rows do not
    divide evenly, the first ranks get one more. Differentiable.

    op: hvd.Average or hvd.Sum. Other arguments and errors: see `allreduce`.

    Example: on 2 ranks, `hvd.reducescatter(torch.tensor([1, 2]), op=hvd.Sum)` returns `[2]` on rank 0.
    """
    reduction = _reduction(op, prescale_factor, postscale_factor)
    return _reduce_and_scatter(CollectiveCall("reducescatter", name, process_set), [tensor], compression, reduction)[0]


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start `grouped_reducescatter`, without compression and gradient. Returns a handle.

    Example: `hvd.synchronize(hvd.grouped_reducescatter_async([torch.ones(4), torch.ones(2)]))`.
    """
    reduction = _reduction(op, prescale_factor, postscale_factor)
    return _start(CollectiveCall("reducescatter", name, process_set, is_list=True, is_async=True), tensors, reduction)


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """As `reducescatter`, of each tensor of a list. Returns a list of new tensors.

    Example: `hvd.grouped_reducescatter([torch.ones(4), torch.ones(2)])`.
    """
    reduction = _reduction(op, prescale_factor, postscale_factor)
    call = CollectiveCall("reducescatter", name, process_set, is_list=True)
    return _reduce_and_scatter(call, tensors, compression, reduction)
