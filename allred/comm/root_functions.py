"""The collectives with a root: reduce, gather, scatter. As in functions.py, every rank calls them in the same order.

They are for results that one rank needs, such as a figure that it logs. The root is a rank as returned by
allred.rank(), also with a process set.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from allred import arrays
from allred.arrays import Array
from allred.comm import ops
from allred.comm.arguments import array_descriptor, root_index, splits_of
from allred.comm.backends.backend import pickled
from allred.comm.functions import current
from allred.comm.header import OpDescriptor, own_fields, quoted
from allred.comm.host_reduce import Reduction
from allred.comm.ops import Compression, ReduceOp
from allred.comm.process_set import ProcessSet
from allred.comm.work import Steps


def reduce(
    value: Any, op: ReduceOp = ReduceOp.AVERAGE, root: int = 0, name: str = "", process_set: ProcessSet | None = None
) -> Array | None:
    """Reduce `value` over all ranks with `op`. Returns a new array of the same shape and dtype on the root, None on the
    other ranks. It takes as long as `allreduce`.

    Example: on 2 ranks, `allred.reduce([1.0, 2.0], allred.Sum)` returns `[2.0, 4.0]` on rank 0.
    """
    communicator = current(process_set)

    def steps() -> Steps[Array | None]:
        own_op, source = ops.of(op), arrays.as_host_array(value)
        here = root_index(root, communicator.ranks)
        descriptor = array_descriptor("reduce", source, name, own_op, root=communicator.ranks[here])
        group, _ = yield from communicator.agree(descriptor)
        communicator.root_in(group, here, descriptor)
        result = np.array(source, order="C")
        reduction = Reduction("reduce", [result], [result], own_op, name, Compression.none)
        yield from reduction.move(group, [arrays.flat(result)])
        return result if communicator.rank == here else None

    return communicator.start("reduce", name, steps()).wait()


def gather(value: Any, root: int = 0, name: str = "", process_set: ProcessSet | None = None) -> Array | None:
    """Concatenate the arrays of all ranks along the first dimension, in rank order. Returns a new array on the root,
    None on the other ranks. Ranks may differ in the first dimension only. A 0-d array counts as one of shape (1,).

    Example: on 2 ranks, `allred.gather([allred.rank(), 5])` returns `[0, 5, 1, 5]` on rank 0.
    """
    communicator = current(process_set)

    def steps() -> Steps[Array | None]:
        source = np.atleast_1d(arrays.as_host_array(value))
        count, rest = len(source), source.shape[1:]
        here = root_index(root, communicator.ranks)
        number = communicator.ranks[here]
        descriptor = array_descriptor("gather", source, name, root=number, shape=("any", *rest), rows=count)
        group, headers = yield from communicator.agree(descriptor)
        to = communicator.root_in(group, here, descriptor)
        rows = [own_fields(record).rows for record in headers]
        counts = np.zeros((group.size, group.size), np.int64)
        counts[:, to] = [count * arrays.size_of(rest) * source.itemsize for count in rows]
        result = np.empty((sum(rows) if communicator.rank == here else 0, *rest), source.dtype)
        yield from group.backend.alltoall(arrays.as_bytes(source), arrays.as_bytes(result), counts)
        return result if communicator.rank == here else None

    return communicator.start("gather", name, steps()).wait()


def scatter(
    value: Any = None,
    splits: Sequence[int] | None = None,
    root: int = 0,
    name: str = "",
    process_set: ProcessSet | None = None,
) -> Array:
    """Send splits[r] rows of the root's `value` to each rank r. Returns this rank's rows, a new array. Without `splits`
    the number of rows must be a multiple of the number of ranks. The `value` and `splits` of other ranks are ignored.

    Example: on 2 ranks, `allred.scatter([1, 2, 3] if allred.rank() == 0 else None, [1, 2])` returns `[1]` on rank 0 and
    `[2, 3]` on rank 1.
    """
    communicator = current(process_set)

    def steps() -> Steps[Array]:
        here = root_index(root, communicator.ranks)
        number, mine = communicator.ranks[here], communicator.rank == here
        source = np.atleast_1d(arrays.as_host_array(value)) if mine else np.empty(0, np.uint8)
        arrays.copied_code(source.dtype)  # raises
        sent = splits_of(len(source), splits, communicator.size) if mine else None
        descriptor = OpDescriptor("scatter", name, f"scatter(root={number}){quoted(name)}", root=number)
        group, _ = yield from communicator.agree(descriptor)
        communicator.require_all(group, descriptor)
        form = pickled((sent, source.dtype, source.shape[1:]))
        rows, dtype, rest = yield from group.backend.broadcast_object(form, here)
        result = np.empty((int(rows[communicator.rank]), *rest), dtype)
        counts = np.zeros((group.size, group.size), np.int64)
        counts[here] = rows * (arrays.size_of(rest) * dtype.itemsize)
        yield from group.backend.alltoall(
            arrays.as_bytes(source if mine else source[:0]), arrays.as_bytes(result), counts
        )
        return result

    return communicator.start("scatter", name, steps()).wait()
