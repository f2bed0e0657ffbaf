"""reducescatter and grouped_reducescatter. The gradient is gathered from all ranks, and scaled as in Horovod."""

from typing import Any

from torch import Tensor

from allred.comm.communicator import Communicator
from allred.comm.ops import ReduceOp
from allred.torch.horovod import handles
from allred.torch.horovod.allgather import grouped_allgather
from allred.torch.horovod.allreduce import Average, Sum, divide, is_integer_mean, operator, scale_
from allred.torch.horovod.compression import Compression
from allred.torch.horovod.operations import (
    Differentiable,
    Started,
    Tensors,
    copies,
    detached,
    result_as_tensor,
    start_operation,
    view,
)
from allred.torch.horovod.process_sets import ProcessSet, communicator_of, global_process_set


def _start_reducescatter(
    tensors: Tensors,
    op: ReduceOp,
    name: str | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    is_list: bool,
    is_async: bool = False,
) -> int:
    def begin(communicator: Communicator) -> Started:
        sources = detached(tensors) if prescale == 1.0 else copies(tensors)
        for tensor in sources:
            scale_(tensor, prescale)
        ops = [Sum if is_integer_mean(tensor, op) else op for tensor in sources]
        pairs = zip([view(tensor) for tensor in sources], ops, strict=True)
        works = [communicator.reducescatter(*pair, name or "") for pair in pairs]

        def finish(results: list[Any], active: int) -> Any:
            found = [result_as_tensor(result, tensor) for result, tensor in zip(results, sources, strict=True)]
            for tensor in found:
                divide(tensor, op, communicator.size, active)
                scale_(tensor, postscale)
            return found if is_list else found[0]

        return works, finish

    kind = "grouped_reducescatter" if is_list else "reducescatter"
    return start_operation(kind, name, process_set, begin, is_async, joins=False)


def _reduce_and_scatter(
    tensors: Tensors, compression: Any, op: Any, name: str | None, scales: tuple[float, float],
    process_set: ProcessSet, is_list: bool,
) -> list[Tensor]:  # fmt: skip
    """Reduce and scatter tensors, with gradient."""
    op = operator(op, None)

    def run(tensors: Tensors) -> list[Tensor]:
        found = handles.synchronize(_start_reducescatter(tensors, op, name, *scales, process_set, is_list))
        return found if is_list else [found]

    def gradient(gradients: Tensors) -> list[Tensor]:
        factor = scales[0] * scales[1] * (communicator_of(process_set).size if op is Sum else 1)
        return grouped_allgather([each * factor for each in gradients], process_set=process_set)

    pairs = [compression.compress(tensor) for tensor in tensors]
    results = Differentiable.apply(run, gradient, *(compressed for compressed, _ in pairs))
    return [compression.decompress(result, context) for result, (_, context) in zip(results, pairs, strict=True)]


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
    op = operator(op, None)
    return _start_reducescatter([tensor], op, name, prescale_factor, postscale_factor, process_set, False, True)


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
    divide evenly, the first ranks get one more. Differentiable. Arguments and errors: see `allreduce`.

    Example: on 2 ranks, `hvd.reducescatter(torch.tensor([1, 2]), op=hvd.Sum)` returns `[2]` on rank 0.
    """
    scales = prescale_factor, postscale_factor
    return _reduce_and_scatter([tensor], compression, op, name, scales, process_set, False)[0]


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
    op = operator(op, None)
    return _start_reducescatter(tensors, op, name, prescale_factor, postscale_factor, process_set, True, True)


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
    scales = prescale_factor, postscale_factor
    return _reduce_and_scatter(tensors, compression, op, name, scales, process_set, True)
