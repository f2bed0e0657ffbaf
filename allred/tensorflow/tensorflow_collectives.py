"""The collectives of Horovod on tensors of TensorFlow. Differentiable; gradients are Horovod's:

allreduce      the same reduction of the gradients of all ranks
allgather      the mean over the ranks of the gradients of the result, restricted to the rows of this rank
broadcast      at the root, the mean of the gradients of the results of all ranks; zeros at other ranks
alltoall       the gradient of a row is sent back to the rank that the row came from
reducescatter  gathered from all ranks, and scaled
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from allred.arrays import Array
from allred.comm import functions
from allred.comm.communicator import Communicator
from allred.comm.ops import Compression as Encoding
from allred.comm.process_set import ProcessSet as AllredProcessSet
from allred.errors import InputError
from allred.horovod import basics
from allred.horovod.operators import Average, Sum, operator
from allred.horovod.process_sets import (
    ProcessSet,
    communicator_of,
    global_process_set,
    process_set_of,
    rank_set,
)
from allred.tensorflow.array_reductions import ArrayReduction
from allred.tensorflow.host_functions import call, copy_of, gradient_of, label, order_of_operations
from allred.tensorflow.tensor_compression import TensorCompression as Compression
from allred.tensorflow.tensor_compression import check_compression
from allred.tensorflow.tensorflow_errors import as_tensorflow_error

Tensors = Sequence[Any]
AnyProcessSet = ProcessSet | AllredProcessSet
_Gradient = Callable[[list[Any]], list[Any]]


def _operation(
    kind: str,
    name: str | None,
    process_set: AnyProcessSet,
    tensors: Tensors,
    results: Sequence[tf.TensorSpec],
    function: Callable[[Communicator, str, list[Array]], list[Array]],
) -> list[tf.Tensor]:
    """Run a function on the memory of tensors. It gets the communicator, the name of the operation, and the arrays."""
    title = label(kind, name)

    def run(arrays: list[Array]) -> list[Array]:
        with as_tensorflow_error():
            return function(communicator_of(process_set), title, arrays)

    with as_tensorflow_error():
        communicator_of(process_set)  # raises before the graph is made
    found: list[tf.Tensor] = call(run, tensors, results)
    return found


def _differentiable(run: Callable[[list[Any]], list[Any]], gradient: _Gradient, tensors: Tensors) -> list[Any]:
    if not any(tensor.dtype.is_floating or tensor.dtype.is_complex for tensor in tensors):
        return run(list(tensors))

    @tf.custom_gradient
    def operation(*arguments: Any) -> Any:
        order = order_of_operations()

        def backward(*upstream: Any) -> Any:
            with gradient_of(order):
                return gradient([tf.convert_to_tensor(each) for each in upstream])

        return run(list(arguments)), backward

    found = operation(*tensors)
    return list(found) if isinstance(found, (list, tuple)) else [found]


def tensors_of(values: Tensors) -> list[tf.Tensor]:
    """Return tensors, such as the values of variables. Raises InputError for values that have no dense array."""
    for value in values:
        if isinstance(value, (tf.RaggedTensor, tf.SparseTensor)):
            raise InputError(f"a {type(value).__name__} is not supported; pass its values, or value.to_tensor()")
    tensors = [tf.convert_to_tensor(value) for value in values]
    if any(tensor.dtype == tf.string for tensor in tensors):
        raise InputError("tensors of strings are not supported; use allgather_object or broadcast_object")
    return tensors


def _same(tensors: Tensors) -> list[tf.TensorSpec]:
    return [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors]


def _other_rows(tensors: Tensors) -> list[tf.TensorSpec]:
    """Return specs whose number of rows is not known."""
    shapes = [tf.TensorShape(None) if t.shape.rank is None else [None, *t.shape[1:]] for t in tensors]
    return [tf.TensorSpec(shape, tensor.dtype) for shape, tensor in zip(shapes, tensors, strict=True)]


# Reductions


def _reduced(
    kind: str,
    tensors: Tensors,
    reduction: ArrayReduction,
    name: str | None,
    process_set: AnyProcessSet,
    encoding: Encoding = Encoding.none,
) -> list[Any]:
    def reduce(communicator: Communicator, title: str, arrays: list[Array]) -> list[Array]:
        return reduction.reduce(communicator, arrays, title, encoding, kind != "allreduce")

    def run(tensors: list[Any]) -> list[Any]:
        return _operation(kind, name, process_set, tensors, _same(tensors), reduce)

    def gradient(upstream: list[Any]) -> list[Any]:
        return _reduced(kind, upstream, reduction, None, process_set)

    return _differentiable(run, gradient, tensors)


def gathered_slices(
    slices: Sequence[tf.IndexedSlices], reduction: ArrayReduction, process_set: AnyProcessSet, name: str | None = None
) -> list[tf.IndexedSlices]:
    """Return the rows of all ranks. Rows with the same index are not added up."""
    if reduction.op not in (Average, Sum):
        raise NotImplementedError(f"op={reduction.op!r} of tf.IndexedSlices: use hvd.Average or hvd.Sum")
    if reduction.prescale != 1.0 or reduction.postscale != 1.0:
        raise NotImplementedError("prescale_factor and postscale_factor are not available with tf.IndexedSlices")
    parts = [each.values for each in slices], [each.indices for each in slices]
    found = grouped_allgather([*parts[0], *parts[1]], name, process_set=process_set)
    values, indices = found[: len(slices)], found[len(slices) :]
    if reduction.op is Average:
        values = [value / tf.cast(communicator_of(process_set).size, value.dtype) for value in values]
    return [
        tf.IndexedSlices(value, index, dense_shape=each.dense_shape)
        for value, index, each in zip(values, indices, slices, strict=True)
    ]


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: AnyProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """Reduce a list of tensors and tf.IndexedSlices as one operation, which is faster than one by one. Returns a list.
    Arguments and errors: see `allreduce`.

    Example: `hvd.grouped_allreduce([tf.ones(2), tf.ones(3)], op=hvd.Sum)`.
    """
    reduction = ArrayReduction(operator(op, average), prescale_factor, postscale_factor).check()
    return reduced(tensors, reduction, compression, name, process_set, "grouped_allreduce")


def reduced(
    values: Tensors,
    reduction: ArrayReduction,
    compression: Any,
    name: str | None,
    process_set: AnyProcessSet,
    kind: str,
) -> list[Any]:
    """Return the results of a reduction of tensors and tf.IndexedSlices."""
    check_compression(compression)
    results: list[Any] = list(values)
    sparse = [index for index, value in enumerate(values) if isinstance(value, tf.IndexedSlices)]
    dense = [index for index in range(len(results)) if index not in set(sparse)]
    if sparse:
        for index, result in zip(
            sparse, gathered_slices([values[i] for i in sparse], reduction, process_set), strict=True
        ):
            results[index] = result
    if dense:
        pairs = [compression.compress(tensor) for tensor in tensors_of([values[index] for index in dense])]
        encoding = getattr(compression, "encoding", Encoding.none)
        # In a graph of TensorFlow 1 nothing else decides which of the two operations is first.
        with tf.control_dependencies([results[index].values for index in sparse]):
            found = _reduced(kind, [compressed for compressed, _ in pairs], reduction, name, process_set, encoding)
        for index, result, (_, context) in zip(dense, found, pairs, strict=True):
            results[index] = compression.decompress(result, context)
    return results


def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: AnyProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Reduce a tensor over the ranks. Returns a tensor of its shape and dtype. Differentiable.

    tensor: a tensor, a variable, or tf.IndexedSlices. The rows of tf.IndexedSlices of all ranks are returned.
    average: deprecated, use `op`. op: hvd.Average (default; integers are truncated), Sum, Min, Max or Product.
    prescale_factor, postscale_factor: the tensor is multiplied by them before and after the reduction.
    compression: hvd.Compression.none, .fp16, .int8 or .int4, or a class with static methods `compress` and
        `decompress`.
    device_dense, device_sparse, ignore_name_scope: without effect.

    Raises, on all ranks, hvd.HorovodInternalError, which is a tf.errors.FailedPreconditionError if the tensors or calls
    differ; ValueError, on this rank, for another `op`; NotImplementedError for hvd.Adasum. In a `tf.function` the error
    is a tf.errors.OpError with the same text; see `raise_allred_errors`.

    Example: on 2 ranks, `hvd.allreduce(tf.constant([1.0 + hvd.rank()]))` returns `[1.5]`.
    """
    reduction = ArrayReduction(operator(op, average), prescale_factor, postscale_factor).check()
    return reduced([tensor], reduction, compression, name, process_set, "allreduce")[0]


# Rows of all ranks


def grouped_allgather(
    tensors: Tensors,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: AnyProcessSet = global_process_set,
) -> list[Any]:
    """As `allgather`, of each tensor of a list. Returns a list.

    Example: `hvd.grouped_allgather([tf.ones(1), tf.ones(2)])`.
    """
    return _gathered("grouped_allgather", tensors, name, process_set) if tensors else []


def _gathered(kind: str, values: Tensors, name: str | None, process_set: AnyProcessSet) -> list[Any]:
    tensors = [tf.reshape(each, [1]) if each.shape.rank == 0 else each for each in tensors_of(values)]

    def gather(communicator: Communicator, title: str, arrays: list[Array]) -> list[Array]:
        works = [communicator.allgather(array, title) for array in arrays]
        return [work.wait() for work in works]

    def run(tensors: list[Any]) -> list[Any]:
        return _operation(kind, name, process_set, tensors, _other_rows(tensors), gather)

    def gradient(upstream: list[Any]) -> list[Any]:
        mean = ArrayReduction(Average)
        means = _reduced("grouped_allreduce", upstream, mean, None, process_set)
        own = tf.stack([tf.shape(tensor)[0] for tensor in tensors])
        with tf.control_dependencies(means):  # one after the other, also in a graph of TensorFlow 1
            rows = _gathered("allgather", [own[tf.newaxis]], None, process_set)[0]
        starts = tf.reduce_sum(rows[: communicator_of(process_set).rank], axis=0)
        return [means[i][starts[i] : starts[i] + own[i]] for i in range(len(tensors))]

    return _differentiable(run, gradient, tensors)


def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: AnyProcessSet = global_process_set,
) -> Any:
    """Concatenate the tensors of all ranks along the first dimension, in rank order. Ranks may differ in the first
    dimension only. Differentiable.

    The gradient is Horovod's, the mean over the ranks. If parameter gradients are averaged afterwards, multiply the
    part of the loss that depends on the result by `hvd.size()` for the gradient of the mean of the losses.

    Errors: see `allreduce`.

    Example: on 2 ranks, `hvd.allgather(tf.constant([hvd.rank()]))` returns `[0, 1]`.
    """
    return _gathered("allgather", [tensor], name, process_set)[0]


# Copies of one rank's tensors


def broadcast_tensors(values: Tensors, root_rank: int, names: Sequence[str], process_set: AnyProcessSet) -> list[Any]:
    """Return the tensors of rank `root_rank`. names: of the tensors; [] if they have none. Differentiable."""
    tensors = tensors_of(values)

    def broadcast(communicator: Communicator, title: str, arrays: list[Array]) -> list[Array]:
        copies = [copy_of(array) for array in arrays]
        pairs = zip(copies, names or [title], strict=True)
        works = [communicator.broadcast(copy, root_rank, own, in_place=True) for copy, own in pairs]
        for work in works:
            work.wait()
        return copies

    def run(tensors: list[Any]) -> list[Any]:
        return _operation("broadcast", None, process_set, tensors, _same(tensors), broadcast)

    def gradient(upstream: list[Any]) -> list[Any]:
        means = _reduced("grouped_allreduce", upstream, ArrayReduction(Average), None, process_set)
        with tf.control_dependencies(means):  # else a graph of TensorFlow 1 leaves the reduction out where it has zeros
            is_root = communicator_of(process_set).number == root_rank
            return means if is_root else [tf.zeros_like(mean) for mean in means]

    return _differentiable(run, gradient, tensors)


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: AnyProcessSet = global_process_set,
) -> Any:
    """Return the tensor of rank `root_rank`. Differentiable.

    root_rank: a number `hvd.rank()`, also with a process set. Errors: see `allreduce`.

    Example: on 2 ranks, `hvd.broadcast(tf.constant([hvd.rank()]), root_rank=1)` returns `[1]`.
    """
    return broadcast_tensors([tensor], root_rank, [name] if name else [], process_set)[0]


# alltoall


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: AnyProcessSet = global_process_set,
) -> Any:
    """Send splits[r] rows of a tensor to each rank r. Returns the rows received, in rank order; with `splits` also the
    received splits, a 1-d tensor of int32 whose entry r is the number of rows from rank r. Differentiable.

    splits: integers. Without it the rows must divide evenly. Errors: see `allreduce`.

    Example: on 2 ranks, `hvd.alltoall(tf.constant([hvd.rank(), 5]))` returns `[0, 1]` on rank 0.
    """
    (source,) = tensors_of([tensor])
    counts = [] if splits is None else [tf.convert_to_tensor(splits)]
    if counts and not counts[0].dtype.is_integer:
        raise InputError(f"alltoall: splits must be integers, but is {counts[0].dtype.name}")
    counts = [tf.cast(each, tf.int64) for each in counts]
    received: list[Any] = []

    def exchange(communicator: Communicator, title: str, arrays: list[Array]) -> list[Array]:
        given = arrays[1].tolist() if len(arrays) > 1 else None
        rows, sizes = communicator.alltoall(arrays[0], given, title).wait()
        return [rows, sizes.astype(np.int32)]

    def run(tensors: list[Any]) -> list[Any]:
        specs = [*_other_rows(tensors), tf.TensorSpec([None], tf.int32)]
        rows, sizes = _operation("alltoall", name, process_set, [*tensors, *counts], specs, exchange)
        received.append(sizes)
        return [rows]

    def gradient(upstream: list[Any]) -> list[Any]:
        rows, _ = alltoall(upstream[0], received[0], process_set=process_set)
        return [tf.reshape(rows, tf.shape(source))]

    (result,) = _differentiable(run, gradient, [source])
    return result if splits is None else (result, received[0])


# reducescatter


def _scattered(
    kind: str,
    values: Tensors,
    compression: Any,
    reduction: ArrayReduction,
    name: str | None,
    process_set: AnyProcessSet,
) -> list[Any]:
    check_compression(compression)
    pairs = [compression.compress(tensor) for tensor in tensors_of(values)]

    def scatter(communicator: Communicator, title: str, arrays: list[Array]) -> list[Array]:
        return [reduction.scatter(communicator, array, title) for array in arrays]

    def run(tensors: list[Any]) -> list[Any]:
        return _operation(kind, name, process_set, tensors, _other_rows(tensors), scatter)

    def gradient(upstream: list[Any]) -> list[Any]:
        factor = reduction.prescale * reduction.postscale
        factor *= communicator_of(process_set).size if reduction.op is Sum else 1
        scaled = [each * tf.cast(factor, each.dtype) for each in upstream]
        return _gathered("grouped_allgather", scaled, None, process_set)

    found = _differentiable(run, gradient, [compressed for compressed, _ in pairs])
    return [compression.decompress(result, context) for result, (_, context) in zip(found, pairs, strict=True)]


def grouped_reducescatter(
    tensors: Tensors,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: Any = Average,
    name: str | None = None,
    process_set: AnyProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """As `reducescatter`, of each tensor of a list. Returns a list.

    Example: `hvd.grouped_reducescatter([tf.ones(4), tf.ones(2)])`.
    """
    reduction = ArrayReduction(operator(op), prescale_factor, postscale_factor).check()
    return _scattered("grouped_reducescatter", tensors, compression, reduction, name, process_set) if tensors else []


def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: Any = Average,
    name: str | None = None,
    process_set: AnyProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduce a tensor over the ranks, and return this rank's rows of the result. If the rows do not divide evenly, the
    first ranks get one more. Differentiable. Arguments and errors: see `allreduce`.

    Example: on 2 ranks, `hvd.reducescatter(tf.constant([1.0, 3.0]))` returns `[1.0]` on rank 0.
    """
    reduction = ArrayReduction(operator(op), prescale_factor, postscale_factor).check()
    return _scattered("reducescatter", [tensor], compression, reduction, name, process_set)[0]


# Without tensors


def join() -> int:
    """Take part in the allreduces of the other ranks with zeros, until all ranks have called `join`. Returns the rank
    that joined last, the same on all ranks. Averages are divided by the number of all ranks, as in Horovod.
    Variables of the ranks that joined earlier are outdated: then call `broadcast_variables(variables, root_rank=last)`
    on all ranks.

    Example: after a loop over batches whose number differs between ranks, `last = hvd.join()`.
    """
    communicator_of(global_process_set)  # raises before init()
    with as_tensorflow_error():
        return functions.join(rank_set(global_process_set))


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks have called this function.

    Example: `hvd.barrier()`.
    """
    with as_tensorflow_error():
        communicator_of(process_set).barrier().wait()


# Numbers of ranks, read when a graph runs


def _number(value: Callable[[], Any]) -> Any:
    return call(lambda _: [np.array(value(), np.int32)], [], [tf.TensorSpec([], tf.int32)])[0]


def rank_op(name: str | None = None) -> Any:
    """Return `hvd.rank()` as a tensor of int32 with shape (). name: without effect.

    Example: `hvd.rank_op()`.
    """
    return _number(basics.rank)


def local_rank_op(name: str | None = None) -> Any:
    """As `rank_op`, of `hvd.local_rank()`.

    Example: `hvd.local_rank_op()`.
    """
    return _number(basics.local_rank)


def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """As `rank_op`, of the number of ranks of a process set.

    Example: `hvd.size_op()`.
    """
    return _number(lambda: process_set_of(process_set_id).size())


def local_size_op(name: str | None = None) -> Any:
    """As `rank_op`, of `hvd.local_size()`.

    Example: `hvd.local_size_op()`.
    """
    return _number(basics.local_size)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """As `rank_op`: 1 if this rank is in a process set, else 0.

    Example: `hvd.process_set_included_op(evens.process_set_id)`.
    """
    return _number(lambda: process_set_of(process_set_id).included())
