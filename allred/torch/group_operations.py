"""The operations of a process group by allred's collectives, and the arguments of torch's calls.

Reductions include bitwise operators and complex, bool and sparse tensors. allgather, gather, scatter and alltoall use
allred's allgather and alltoall.

Each function starts operations. It returns each with a function that post-processes its result, or None. Of operations
that move tensors, sizes and dtypes are checked before the start, as far as this rank knows them, so that all ranks
raise the InputError of one rank.
"""

import datetime
import functools
import math
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp as TorchOp

from allred.arrays import Array, flat
from allred.comm.arguments import splits_of
from allred.comm.communicator import Communicator
from allred.comm.ops import Compression, ReduceOp
from allred.comm.work import Work
from allred.errors import InputError
from allred.torch import arena_allocator
from allred.torch.tensors import as_array, as_raw_array, as_tensor, check_host
from allred.torch.torch_work import Blocking, StartedOperation

# Arguments: their device, and calls without options.

_OPTIONS = {int: "rootRank", datetime.timedelta: "timeout"}  # arguments in place of options, by type; others: reduceOp


def with_options(arguments: Sequence[Any], takes_lists: bool) -> tuple[Any, ...]:
    """Convert the arguments of a call without an options object to the arguments of a call with one. A call without
    options passes root, operator and time limit as arguments, and may pass a tensor in place of a list of one."""
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


# Reductions.

_OPS = (
    *((TorchOp.SUM, ReduceOp.SUM), (TorchOp.AVG, ReduceOp.AVERAGE), (TorchOp.PREMUL_SUM, ReduceOp.SUM)),
    *((TorchOp.PRODUCT, ReduceOp.PRODUCT), (TorchOp.MIN, ReduceOp.MIN), (TorchOp.MAX, ReduceOp.MAX)),
)
_COMBINE = {
    "SUM": torch.add, "PRODUCT": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum, "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor,
}  # fmt: skip
_BITWISE = ((TorchOp.BAND, np.bitwise_and), (TorchOp.BOR, np.bitwise_or), (TorchOp.BXOR, np.bitwise_xor))


def allreduce(
    comm: Communicator, tensors: Sequence[torch.Tensor], op: Any, blocking: bool = False
) -> list[StartedOperation]:
    """Reduce tensors in place, as one operation where possible. blocking: the caller waits at once, without a limit."""
    if not tensors:
        raise InputError("expected a tensor, got an empty list")
    if any(tensor.is_sparse for tensor in tensors):
        return [part for tensor in tensors for part in _sparse_sum(comm, tensor, op)]
    real = [_as_real(tensor, op) for tensor in tensors]
    arrays = [flat_view(as_array(tensor)) for tensor in real]
    if _bitwise(op) is not None or any(_is_integer_mean(op, array) for array in arrays):
        return [
            (work, _assign(array, convert)) for array in arrays for work, convert in [_start_reduction(comm, array, op)]
        ]
    ops = [_op_for(op, tensor) for tensor in real]
    arena_allocator.learn(tensors)
    if op == TorchOp.PREMUL_SUM:
        for tensor in real:
            tensor.detach().mul_(_factor(op))
    grouped = len(arrays) > 1 and len(set(ops)) == 1
    if grouped and blocking:
        return [(Blocking(lambda: comm.grouped_allreduce_blocking(arrays, True, ops[0], "")), None)]
    if grouped:
        return [(comm.grouped_allreduce(arrays, ops[0], in_place=True), None)]
    if blocking and len(arrays) == 1:
        return [(Blocking(lambda: comm.allreduce_blocking(arrays[0], True, ops[0], "")), None)]
    return [(comm.allreduce(array, each, in_place=True), None) for array, each in zip(arrays, ops, strict=True)]


def compressed_mean(
    comm: Communicator, tensors: Sequence[torch.Tensor], compression: Compression, residual: Array
) -> StartedOperation:
    """Average tensors in place, as one operation. residual: as in `Communicator.grouped_allreduce`."""
    arrays, kept = [as_array(tensor) for tensor in tensors], residual if comm.backend.encodes else None
    work = comm.grouped_allreduce(arrays, ReduceOp.AVERAGE, "", compression, in_place=True, residual=kept)
    return work, None


def reduce_locally(tensors: Sequence[torch.Tensor], op: Any) -> torch.Tensor:
    """Return the reduction of tensors of this rank, which have one shape and dtype."""
    combine = _COMBINE.get(_op_name(op))
    if combine is None:
        raise InputError(f"{_op_name(op)} over several tensors of a rank is not available; use {', '.join(_COMBINE)}")
    first = tensors[0]
    for each in tensors:
        if (each.shape, each.dtype, each.layout) != (first.shape, first.dtype, first.layout):
            raise InputError(
                f"allreduce of a list reduces over its tensors, which must have one shape, dtype and layout; got "
                f"{first.dtype} {tuple(first.shape)} and {each.dtype} {tuple(each.shape)}; allreduce_coalesced reduces "
                "each by itself"
            )
    with torch.no_grad():
        return functools.reduce(combine, tensors)


def without_repeated(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors without those that are the same memory as an earlier one: gloo reduces such memory once. All
    ranks must repeat the same ones."""
    found: dict[Any, torch.Tensor] = {}
    for each in tensors:
        place = id(each) if each.is_sparse else (each.data_ptr(), each.shape, each.stride(), each.dtype)
        found.setdefault(place, each)
    return [*found.values()]


def with_copies(
    parts: Sequence[StartedOperation], pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> list[StartedOperation]:
    """Return the operations; when they are complete, the second tensor of each pair is copied into the first."""
    *others, (work, convert) = parts

    def finish(result: Any) -> None:
        if convert is not None:
            convert(result)
        with torch.no_grad():
            for target, source in pairs:
                if target is not source:
                    target.copy_(source)

    return [*others, (work, finish)]


def flat_view(array: Array) -> Array:
    """Return a contiguous array as one of one dimension, because torch compares only the number of elements between
    ranks; other arrays as they are."""
    return array.reshape(-1) if array.flags.c_contiguous else array


def reduce(comm: Communicator, tensor: torch.Tensor, op: Any, is_root: bool, name: str) -> StartedOperation:
    """Reduce a tensor into the root's tensor; the tensors of other ranks are unchanged."""
    array = flat_view(as_array(_as_real(tensor, op)))
    work, convert = _start_reduction(comm, array, op, name)
    return work, _assign(array, convert) if is_root else None


def reducescatter(
    comm: Communicator, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: Any
) -> StartedOperation:
    """Reduce the concatenated inputs; `output` becomes this rank's part. inputs: one for each rank, or one for all."""
    target = as_array(_as_real(output, op))
    arrays = [flat(as_array(_as_real(tensor, op))) for tensor in inputs]
    arena_allocator.learn(inputs)
    source = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
    sizes = [array.size for array in arrays] if len(arrays) > 1 else [target.size] * comm.size
    if sum(sizes) != source.size or len(sizes) != comm.size or sizes[comm.rank] != target.size:
        raise InputError(f"inputs of {[*map(len, arrays)]} elements do not give {target.size} to rank {comm.rank}")
    if any(array.dtype != target.dtype for array in arrays):
        raise InputError(f"the output tensor is {target.dtype}; the input tensors must have the same dtype")
    plain = len(set(sizes)) == 1 and _bitwise(op) is None and op != TorchOp.PREMUL_SUM
    plain = plain and not _is_integer_mean(op, source)
    if plain:
        part = target.reshape(-1) if target.flags.c_contiguous else np.empty(target.size, target.dtype)
        work = comm.reducescatter(source, _op_for(op, output), out=part)
        return work, None if np.shares_memory(part, target) else _assign(target, lambda result: result)
    name = "reduce_scatter" if len(set(sizes)) == 1 else f"reduce_scatter into tensors of {sizes} elements"
    work, convert = _start_reduction(comm, source, op, name)
    start = sum(sizes[: comm.rank])
    return work, _assign(target, lambda result: convert(result)[start : start + target.size])


def _assign(target: Array, convert: Callable[[Array], Array]) -> Callable[[Array], None]:
    def finish(result: Array) -> None:
        target[...] = convert(result).reshape(target.shape)

    return finish


def _start_reduction(
    comm: Communicator, array: Array, op: Any, name: str = ""
) -> tuple[Work[Array], Callable[[Array], Array]]:
    """Return the operation and the function that converts its result to the reduced array. name: of an operation whose
    kind is not torch's method, so that ranks in different methods differ."""
    if (ufunc := _bitwise(op)) is not None:
        if array.dtype.kind not in "iub":
            raise InputError(f"{_op_name(op)} is for integers and bools, got {array.dtype}")
        name = f"{name or 'allreduce'}, {_op_name(op)}"
        rows = np.empty((comm.size, array.size), array.dtype)  # with `out`, ranks with other sizes are an error
        work = comm.allgather(flat(array), name, out=rows.reshape(-1))
        return work, lambda _: np.asarray(ufunc.reduce(rows, axis=0))
    if op == TorchOp.PREMUL_SUM:
        array = (array * np.asarray(_factor(op), array.dtype)).astype(array.dtype)
    if _is_integer_mean(op, array):
        name = f"{name or 'allreduce'}, AVG"  # to differ from a sum
        return comm.allreduce(array, ReduceOp.SUM, name), lambda total: _quotient(total, comm.size)
    return comm.allreduce(array, _op_for(op, array), name), lambda result: result


def _is_integer_mean(op: Any, array: Array) -> bool:
    return op == TorchOp.AVG and array.dtype.kind in "iu"


def _quotient(total: Array, size: int) -> Array:
    """Divide integers, rounding toward zero."""
    wide = total if total.dtype.itemsize == 8 else total.astype(np.int64)
    return np.asarray(wide // size + ((wide < 0) & (wide % size != 0)))


def _sparse_sum(comm: Communicator, tensor: torch.Tensor, op: Any) -> list[StartedOperation]:
    """Sum sparse tensors over the ranks in place: allgather indices and values, then coalesce."""
    if op != TorchOp.SUM or tensor.layout is not torch.sparse_coo:
        raise InputError(f"{_op_name(op)} of a {str(tensor.layout)[6:]} tensor: only SUM of COO tensors is available")
    mine = tensor.detach().coalesce()
    found: list[Array] = []

    def finish(values: Array) -> None:
        indices = as_tensor(found.pop()).t()
        with torch.no_grad(), torch.sparse.check_sparse_tensor_invariants(False):
            tensor.copy_(torch.sparse_coo_tensor(indices, as_tensor(values), tensor.shape).coalesce())

    indices, values = as_array(mine.indices().t()), as_array(mine.values())
    return [
        (comm.allgather(indices, "indices of a sparse allreduce"), found.append),
        (comm.allgather(values, "values of a sparse allreduce"), finish),
    ]


def _as_real(tensor: torch.Tensor, op: Any) -> torch.Tensor:
    """Return a view of a complex tensor as real numbers; other tensors as they are."""
    if not tensor.is_complex():
        return tensor
    check_host(tensor)
    if not any(op == each for each in (TorchOp.SUM, TorchOp.AVG)):  # op may be an object that equals these
        raise InputError(f"{_op_name(op)} of complex numbers is not defined; use SUM or AVG")
    return torch.view_as_real(tensor.detach())


def _op_for(op: Any, values: Any) -> ReduceOp:
    """Return allred's operator. values: the tensor or array. As in NCCL, the sum of bools is `any`."""
    found = next((ours for theirs, ours in _OPS if op == theirs), None)
    if found is None:
        raise InputError(f"the reduction {_op_name(op)} is not available")
    is_bool = values.dtype in (torch.bool, np.dtype(bool))
    return ReduceOp.MAX if is_bool and found is ReduceOp.SUM else found


def _bitwise(op: Any) -> np.ufunc | None:
    return next((ufunc for theirs, ufunc in _BITWISE if op == theirs), None)


def _factor(op: Any) -> Any:
    """Return the factor of PREMUL_SUM, a number or a tensor."""
    factor = getattr(op, "factor", None)
    if factor is None:
        raise InputError("PREMUL_SUM needs a version of torch with ReduceOp.factor")
    return factor


def _op_name(op: Any) -> str:
    return str(getattr(op, "op", op)).rpartition(".")[2]


# Operations that move tensors.

Tensors = Sequence[torch.Tensor]


def allgather(comm: Communicator, outputs: Tensors, tensor: torch.Tensor) -> StartedOperation:
    """Gather the tensors of all ranks on all ranks. outputs: a tensor for each rank, or one for all."""
    targets, source = [as_raw_array(each) for each in outputs], flat(as_raw_array(tensor))
    arena_allocator.learn([tensor])
    sizes = [target.size for target in targets]
    if len(targets) != 1:
        _check_sizes(comm, [source] * comm.size, targets)
    elif sizes[0] != source.size * comm.size:
        raise InputError(
            f"the output tensor has {sizes[0]} elements; expected {source.size} for each of {comm.size} ranks"
        )
    _check_dtypes(targets, source)
    if len(set(sizes)) > 1:  # the name lets the ranks compare the sizes
        return comm.allgather(source, f"into tensors of {sizes} elements"), functools.partial(_split, targets)
    if len(targets) == 1 and targets[0].flags.c_contiguous:
        return comm.allgather(source, out=targets[0].reshape(-1)), None
    out = np.empty(source.size * comm.size, source.dtype)  # with `out`, ranks with other sizes are an error
    return comm.allgather(source, out=out), functools.partial(_split, targets)


def gather(comm: Communicator, outputs: Tensors, tensor: torch.Tensor, root: int, name: str) -> StartedOperation:
    """Gather the tensors of all ranks on the root. outputs: on the root a tensor for each rank; ignored elsewhere."""
    is_root, source = root == comm.rank, flat(as_raw_array(tensor))
    targets = [as_raw_array(each) for each in outputs] if is_root else []
    if is_root:
        _check_sizes(comm, [source] * comm.size, targets)
        _check_equal(targets, "output", source)
    return _exchange(comm, source[np.newaxis], _one(root, comm.size), targets, [int(is_root)] * comm.size, name)


def scatter(comm: Communicator, output: torch.Tensor, inputs: Tensors, root: int, name: str) -> StartedOperation:
    """Send one tensor of the root to each rank. inputs: on the root a tensor for each rank; ignored elsewhere."""
    is_root, target = root == comm.rank, as_raw_array(output)
    rows = np.empty((0, target.size), target.dtype)
    if is_root:
        sources = [flat(as_raw_array(each)) for each in inputs]
        _check_sizes(comm, sources, [target] * comm.size)
        _check_equal(sources, "input", target)
        rows = np.stack(sources)
    return _exchange(comm, rows, [int(is_root)] * comm.size, [target], _one(root, comm.size), name)


def alltoall(comm: Communicator, outputs: Tensors, inputs: Tensors) -> StartedOperation:
    """Send inputs[r] to rank r; outputs[r] is the tensor from rank r. Their sizes may differ."""
    targets, sources = [as_raw_array(each) for each in outputs], [flat(as_raw_array(each)) for each in inputs]
    _check_sizes(comm, sources, targets)
    _check_dtypes(sources, sources[0])
    sent, expected = [source.size for source in sources], [target.size for target in targets]
    return _exchange(comm, np.concatenate(sources), sent, targets, expected)


def alltoall_single(
    comm: Communicator, output: torch.Tensor, tensor: torch.Tensor, received: Sequence[int], sent: Sequence[int]
) -> StartedOperation:
    """Send sent[r] rows to rank r, and receive received[r] rows from rank r. An empty list: the rows divide evenly."""
    target, source = np.atleast_1d(as_raw_array(output)), np.atleast_1d(as_raw_array(tensor))
    expected = list(received) or [len(target) // comm.size] * comm.size
    if len(expected) != comm.size or sum(expected) != len(target):
        raise InputError(
            f"the output tensor has {len(target)} rows; expected the sum of {comm.size} splits, {expected}"
        )
    if math.prod(source.shape[1:]) != math.prod(target.shape[1:]):
        raise InputError(f"the rows of input {source.shape} and output {target.shape} have different sizes")
    counts = [int(count) for count in splits_of(len(source), list(sent) or None, comm.size)]
    return _exchange(comm, source, counts, [target], expected)


def _exchange(
    comm: Communicator, rows: Array, sent: list[int], targets: list[Array], expected: list[int], name: str = ""
) -> StartedOperation:
    """Start an alltoall of sent[r] rows to rank r. targets: for the expected[r] rows from rank r, in rank order."""
    if sent[comm.rank] != expected[comm.rank]:
        raise InputError(f"this rank sends itself {sent[comm.rank]} rows, but expects {expected[comm.rank]}")
    _check_dtypes(targets, rows)

    def finish(result: tuple[Array, Array]) -> None:
        arrived, counts = result
        if counts.tolist() != expected:
            raise InputError(f"alltoall: {counts.tolist()} rows were received, but {expected} were expected")
        _split(targets, arrived.reshape(-1))

    return comm.alltoall(rows, sent, name), finish


def _split(targets: list[Array], result: Array) -> None:
    """Copy consecutive parts of a flat array into arrays."""
    start = 0
    for target in targets:
        target[...] = result[start : start + target.size].reshape(target.shape)
        start += target.size


def _one(root: int, size: int) -> list[int]:
    return [int(rank == root) for rank in range(size)]


def _check_sizes(comm: Communicator, sources: list[Array], targets: list[Array]) -> None:
    """Raise InputError unless there is a source and a target for every rank, and this rank's two have the same size."""
    if not len(sources) == len(targets) == comm.size:
        raise InputError(
            f"expected a tensor for each of {comm.size} ranks, got {len(sources)} inputs and {len(targets)} outputs"
        )
    if sources[comm.rank].size != targets[comm.rank].size:
        raise InputError(
            f"this rank sends itself {sources[comm.rank].size} elements, but the output tensor for them has "
            f"{targets[comm.rank].size}"
        )


def _check_equal(arrays: list[Array], what: str, like: Array) -> None:
    """Raise InputError unless the arrays have the size and dtype of `like`."""
    _check_dtypes(arrays, like)
    if any(array.size != like.size for array in arrays):
        sizes = [array.size for array in arrays]
        raise InputError(f"the {what} tensors have {sizes} elements; expected {like.size} each")


def _check_dtypes(arrays: list[Array], like: Array) -> None:
    for array in arrays:
        if array.dtype != like.dtype:
            raise InputError(f"input and output tensors must have one dtype, got {like.dtype} and {array.dtype}")
