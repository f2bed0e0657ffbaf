"""allgather, broadcast, alltoall, reducescatter, sums of sparse tensors, barrier and join. Gradients are Horovod's:

allgather      the mean over the ranks of the gradients of the result, restricted to the rows of this rank: the
               gradient of the mean of the losses of all ranks. So parameter gradients are summed afterwards
broadcast      at the root, the mean of the gradients of the results of all ranks; zeros at other ranks
alltoall       the gradient of a row is sent back to the rank that the row came from
reducescatter  gathered from all ranks, and scaled
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from allred.comm import functions
from allred.comm.communicator import Communicator
from allred.errors import InputError
from allred.horovod import handles
from allred.horovod.horovod_errors import as_horovod_error
from allred.horovod.operators import Average, Sum, operator
from allred.horovod.process_sets import ProcessSet, communicator_of, global_process_set, rank_set
from allred.torch.horovod.allreduce import MEAN, ScaledReduction, allreduce, grouped_allreduce
from allred.torch.horovod.operations import (
    CollectiveCall,
    Differentiable,
    Tensors,
    apply_compressed,
    copies,
    detached,
    public_functions,
    result_as_tensor,
    rows_of,
    view,
)
from allred.torch.tensors import as_raw_array

# allgather


class _Allgather(CollectiveCall):
    def begin_tensors(self, tensors: Tensors, in_place: bool) -> int:
        def begin(communicator: Communicator) -> Any:
            sources = detached(tensors)
            works = [communicator.allgather(rows_of(tensor), self.label) for tensor in sources]

            def finish(results: list[Any], _: int) -> Any:
                found = [result_as_tensor(result, tensor) for result, tensor in zip(results, sources, strict=True)]
                return found if self.is_list else found[0]

            return works, finish

        return self.start(begin, len(tensors))

    def apply(self, tensors: Tensors, compression: Any) -> list[Tensor]:
        process_set, shapes = self.process_set, [tensor.shape for tensor in tensors]
        sizes = [shape[0] if shape else 1 for shape in shapes]

        def gradient(gradients: Tensors) -> list[Tensor]:
            means = grouped_allreduce(gradients, op=Average, process_set=process_set)
            rows = allgather(torch.tensor([sizes]), process_set=process_set)  # a row for each rank
            starts = rows[: process_set.rank()].sum(0).tolist()
            parts = [mean.narrow(0, *part) for mean, *part in zip(means, starts, sizes, strict=True)]
            return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]

        return list(Differentiable.apply(self.run, gradient, *tensors))


def _allgather(name: str | None = None, process_set: ProcessSet = global_process_set) -> CollectiveCall:
    return _Allgather("allgather", name, process_set)


allgather, allgather_async = public_functions(
    _allgather,
    "allgather",
    ("_async",),
    """Concatenate the tensors of all ranks along the first dimension, in rank order. Ranks may differ in the first
    dimension only. Returns a new tensor. Differentiable.

    The gradient is Horovod's, the mean over the ranks. If parameter gradients are averaged afterwards, multiply the
    part of the loss that depends on the result by `hvd.size()` for the gradient of the mean of the losses.

    Raises HorovodInternalError, on all ranks, if the tensors differ otherwise or a rank has joined.

    Example: on 2 ranks, `hvd.allgather(torch.tensor([hvd.rank()]))` returns `[0, 1]`.
    """,
    "tensor",
)
grouped_allgather, grouped_allgather_async = public_functions(
    _allgather,
    "grouped_allgather",
    ("_async",),
    """As `allgather`, of each tensor of a list. Returns a list of new tensors.

    Example: `hvd.grouped_allgather([torch.ones(1), torch.ones(2)])`.
    """,
    "[tensor, other]",
)

# broadcast


@dataclasses.dataclass
class _Broadcast(CollectiveCall):
    root_rank: int = 0

    def begin_tensors(self, tensors: Tensors, in_place: bool) -> int:
        def begin(communicator: Communicator) -> Any:
            (target,) = tensors if in_place else copies(tensors)
            (memory,) = detached([target])
            array = memory if memory.is_cuda else as_raw_array(memory)
            return [communicator.broadcast(array, self.root_rank, self.label, in_place=True)], lambda _, __: target

        return self.start(begin)

    def apply(self, tensors: Tensors, compression: Any) -> list[Tensor]:
        process_set = self.process_set

        def gradient(gradients: Tensors) -> list[Tensor]:
            mean = allreduce(gradients[0], op=Average, process_set=process_set)
            return [mean if communicator_of(process_set).number == self.root_rank else torch.zeros_like(mean)]

        return list(Differentiable.apply(self.run, gradient, *tensors))


def _broadcast(root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set) -> CollectiveCall:
    return _Broadcast("broadcast", name, process_set, root_rank=root_rank)


broadcast, broadcast_async, broadcast_, broadcast_async_ = public_functions(
    _broadcast,
    "broadcast",
    ("_async", "_", "_async_"),
    """Copy the tensor of rank `root_rank` to all ranks. Returns a new tensor. Differentiable.

    root_rank: a number `hvd.rank()`, also with a process set.

    Raises HorovodInternalError, on all ranks, if shapes, dtypes or roots differ or a rank has joined.

    Example: on 2 ranks, `hvd.broadcast(torch.tensor([hvd.rank()]), root_rank=1)` returns `[1]`.
    """,
    "tensor, root_rank=0",
)

# alltoall


@dataclasses.dataclass
class _Alltoall(CollectiveCall):
    splits: Any = None

    def begin_tensors(self, tensors: Tensors, in_place: bool) -> int:
        splits = self.splits

        def begin(communicator: Communicator) -> Any:
            (source,) = detached(tensors)
            rows = splits.tolist() if isinstance(splits, torch.Tensor) else splits
            work = communicator.alltoall(rows_of(source), rows, self.label)

            def finish(results: list[Any], _: int) -> tuple[Tensor, Tensor]:
                array, counts = results[0]
                kind = (splits.dtype, splits.device) if isinstance(splits, torch.Tensor) else (torch.int32, "cpu")
                return result_as_tensor(array, source), torch.tensor(counts.tolist(), dtype=kind[0], device=kind[1])

            return [work], finish

        return self.start(begin)

    def apply(self, tensors: Tensors, compression: Any) -> list[Any]:
        shape, process_set = tensors[0].shape, self.process_set
        received: list[Tensor] = []

        def run(tensors: Tensors) -> list[Tensor]:
            rows, counts = handles.synchronize(self.begin_tensors(tensors, False))
            received.append(counts)
            return [rows]

        def gradient(gradients: Tensors) -> list[Tensor]:
            rows, _ = alltoall(gradients[0], received[0], process_set=process_set)
            return [rows.reshape(shape)]

        (result,) = Differentiable.apply(run, gradient, *tensors)
        return [result if self.splits is None else (result, received[0])]


def _alltoall(
    splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> CollectiveCall:
    return _Alltoall("alltoall", name, process_set, splits=splits)


alltoall, alltoall_async = public_functions(
    _alltoall,
    "alltoall",
    ("_async",),
    """Send splits[r] rows of a tensor to each rank r. Returns the rows received, in rank order, as a new tensor; with
    `splits` also the received splits, a 1-d tensor whose entry r is the number of rows from rank r. Differentiable.

    splits: a list, or an integer tensor, whose dtype and device the received splits get; those of a list are int32.
    Without it the rows must divide evenly.

    Raises HorovodInternalError, which is a ValueError too, on all ranks, if the splits of a rank do not add up to its
    rows.

    Example: on 2 ranks, `hvd.alltoall(torch.tensor([hvd.rank(), 5]))` returns `[0, 1]` on rank 0.
    """,
    "tensor",
)

# reducescatter


@dataclasses.dataclass
class _Reducescatter(CollectiveCall):
    reduction: ScaledReduction = MEAN

    def begin_tensors(self, tensors: Tensors, in_place: bool) -> int:
        reduction = self.reduction

        def begin(communicator: Communicator) -> Any:
            sources = detached(tensors) if reduction.prescale == 1.0 else copies(tensors)
            for tensor in sources:
                if not tensor.ndim:
                    raise InputError("a 0-d tensor has no first dimension to split; use allreduce")
                reduction.begin(tensor)
            pairs = [(view(tensor), reduction.op_of([tensor])) for tensor in sources]
            label = reduction.label(self.label, sources)
            works = [communicator.reducescatter(*pair, label) for pair in pairs]

            def finish(results: list[Any], active: int) -> Any:
                found = [result_as_tensor(result, tensor) for result, tensor in zip(results, sources, strict=True)]
                for tensor, (_, op) in zip(found, pairs, strict=True):
                    reduction.end(tensor, op, communicator.size, active)
                return found if self.is_list else found[0]

            return works, finish

        return self.start(begin, len(tensors))

    def apply(self, tensors: Tensors, compression: Any) -> list[Tensor]:
        process_set, reduction = self.process_set, self.reduction

        def gradient(gradients: Tensors) -> Any:
            ranks = communicator_of(process_set).size if reduction.op is Sum else 1
            factor = reduction.prescale * reduction.postscale * ranks
            return grouped_allgather([each * factor for each in gradients], process_set=process_set)

        return apply_compressed(compression, self.run, gradient, tensors)


def _reducescatter(
    name: str | None = None,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> CollectiveCall:
    if (found := operator(op)) not in (Average, Sum):
        raise InputError(f"reducescatter with op={found!r}: use hvd.Average or hvd.Sum")
    reduction = ScaledReduction(found, prescale_factor, postscale_factor).check()
    return _Reducescatter("reducescatter", name, process_set, reduction=reduction)


reducescatter, reducescatter_async = public_functions(
    _reducescatter,
    "reducescatter",
    ("_async",),
    """Reduce a tensor over the ranks, and return this rank's rows of the result, a new tensor. If the rows do not
    divide evenly, the first ranks get one more. Differentiable.

    op: hvd.Average or hvd.Sum. Other arguments and errors: see `allreduce`.

    Example: on 2 ranks, `hvd.reducescatter(torch.tensor([1, 2]), op=hvd.Sum)` returns `[2]` on rank 0.
    """,
    "tensor",
    compression_at=1,
)
grouped_reducescatter, grouped_reducescatter_async = public_functions(
    _reducescatter,
    "grouped_reducescatter",
    ("_async",),
    """As `reducescatter`, of each tensor of a list. Returns a list of new tensors.

    Example: `hvd.grouped_reducescatter([torch.ones(4), torch.ones(2)])`.
    """,
    "[tensor, other]",
    compression_at=1,
)


def sparse_allreduce_async(
    tensor: Tensor, name: str, op: Any, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Start the sum or average of a sparse COO tensor. Returns a function that waits and returns the sparse result.

    Raises ValueError for other reductions and tensors; the returned function raises HorovodInternalError.

    Example: `total = hvd.sparse_allreduce_async(gradient, name="embedding", op=hvd.Sum)()`.
    """
    if (found := operator(op)) not in (Average, Sum):
        raise InputError(f"op={found!r} of a sparse tensor: use hvd.Average or hvd.Sum")
    if not tensor.is_sparse:
        raise InputError(f"sparse_allreduce_async({name!r}): expected a sparse COO tensor; use allreduce_async")
    mine, size = tensor.detach().coalesce(), communicator_of(process_set).size
    indices = allgather_async(mine.indices().t().contiguous(), f"{name}.indices", process_set)
    values = allgather_async(mine.values(), f"{name}.values", process_set)

    def wait() -> Tensor:
        rows, parts = handles.synchronize_all([indices, values])
        total = torch.sparse_coo_tensor(rows.t(), parts, tensor.shape, check_invariants=False).coalesce()
        if found is Average:
            total.values().div_(size)
        return total

    return wait


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks have called this function.

    Example: `hvd.barrier()`.
    """
    with as_horovod_error():
        communicator_of(process_set).barrier().wait()


def join(device: int = -1) -> int:
    """Take part in the allreduces of the other ranks with zeros, until all ranks have called `join`. Returns the rank
    that joined last, the same on all ranks.

    Averages are divided by the number of all ranks, as in Horovod. Meanwhile allgather, broadcast, alltoall and
    reducescatter of the other ranks raise HorovodInternalError. Afterwards each DistributedOptimizer has the
    parameters and the state of the rank that joined last; in Horovod the program has to broadcast them. If a rank joins
    before its first step, nothing is copied, and a warning names the rank.

    device: ignored.

    Example: after a loop over batches whose number differs between ranks, `last = hvd.join()`.
    """
    communicator_of(global_process_set)  # raises before init()
    with as_horovod_error():
        return functions.join(rank_set(global_process_set))
