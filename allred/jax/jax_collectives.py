"""The collectives of allred on arrays of JAX, inside and outside of `jax.jit`.

Derivatives are of the sum of the losses of all ranks, as in `allred.torch.differentiable`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from allred.arrays import Array
from allred.comm import functions, ops
from allred.comm.ops import ReduceOp
from allred.comm.process_set import ProcessSet
from allred.errors import InputError
from allred.jax.custom_call import Function
from allred.jax.primitive import JaxCollective, bind, check_dtype, is_zero
from allred.jax.trees import arrays_of

_LINEAR = ReduceOp.AVERAGE, ReduceOp.SUM


@dataclasses.dataclass(frozen=True)
class JaxReduction(JaxCollective):
    op: ReduceOp

    def function(self, title: str) -> Function:
        def run(sources: list[Array], targets: list[Array], operation: Any) -> tuple[Any, ...] | None:
            communicator = functions.current(self.process_set)
            if operation is not None:
                communicator.complete_grouped(operation, targets, self.op, title)
            else:
                copy(sources, targets)
                communicator.grouped_allreduce_blocking(targets, True, self.op, title)
            if communicator.fast_path is None or communicator.checks_places:
                return None
            return communicator.fast_path, communicator.queue, self.op, title

        return run

    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        if self.op not in _LINEAR:
            raise InputError(f"{self.name}: op={self.op!r} has no derivative; use allred.Average or allred.Sum")
        return super().jvp(primals, tangents)


@dataclasses.dataclass(frozen=True)
class JaxAllgather(JaxCollective):
    """allgather: concatenates one array of all ranks along its first dimension."""

    ranks: int
    rank: int

    def results(self, operands: Sequence[Any]) -> list[Any]:
        (operand,) = operands
        return [operand.update(shape=(operand.shape[0] * self.ranks, *operand.shape[1:]))]

    def function(self, title: str) -> Function:
        def run(sources: list[Array], targets: list[Array], operation: Any) -> None:
            functions.current(self.process_set).allgather(sources[0], title, targets[0]).wait()

        return run

    def run_directly(self, operands: Sequence[Any]) -> list[Any]:
        """Ranks may differ in the first dimension here."""
        return [jnp.asarray(functions.current(self.process_set).allgather(np.asarray(operands[0]), self.name).wait())]

    def transpose(self, cotangents: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
        (cotangent,) = cotangents
        rows = cotangent.aval.shape[0] // self.ranks
        reduction = JaxReduction(f"{self.name}, gradient", self.process_set, self.ordered, ReduceOp.SUM)
        (total,) = bind(reduction, [cotangent])
        return [jax.lax.slice_in_dim(total, self.rank * rows, (self.rank + 1) * rows)]

    def batch(self, operands: Sequence[Any], axes: Sequence[Any]) -> tuple[list[Any], Sequence[Any]]:
        (axis,) = axes
        last = operands[0].ndim - 1
        return bind(self, [jnp.moveaxis(operands[0], axis, last)]), [last]


@dataclasses.dataclass(frozen=True)
class JaxBroadcast(JaxCollective):
    root: int

    def function(self, title: str) -> Function:
        def run(sources: list[Array], targets: list[Array], operation: Any) -> None:
            copy(sources, targets)
            communicator = functions.current(self.process_set)
            for index, target in enumerate(targets):
                name = title if len(targets) == 1 else f"{title}, array {index + 1} of {len(targets)}"
                communicator.broadcast(target, self.root, name, in_place=True).wait()

        return run

    def transpose(self, cotangents: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
        given = [cotangent for cotangent in cotangents if not is_zero(cotangent)]
        total = JaxReduction(f"{self.name}, gradient", self.process_set, self.ordered, ReduceOp.SUM)
        is_root = functions.current(self.process_set).number == self.root
        sums = iter(bind(total, given) if given else [])
        found = [cotangent if is_zero(cotangent) else next(sums) for cotangent in cotangents]
        return found if is_root else [each if is_zero(each) else jnp.zeros_like(each) for each in found]


def copy(sources: list[Array], targets: list[Array]) -> None:
    """Copy arguments of a custom call to results. XLA has done so where both have one memory."""
    for source, target in zip(sources, targets, strict=True):
        if source.ctypes.data != target.ctypes.data:
            target[...] = source


def _usable(value: Any) -> Any:
    value = jnp.asarray(value)
    check_dtype(value)
    return value


def allreduce(
    value: Any,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str = "",
    process_set: ProcessSet | None = None,
    ordered: bool = True,
) -> jax.Array:
    """Reduce an array over all ranks. Returns an array of the same shape and dtype.

    value: an array of floats, integers or bools, of the same shape and dtype on all ranks.
    op: allred.Average (of floats), Sum, Min, Max or Product. Average and Sum have derivatives of any order.
    name: appears in messages; must be the same on all ranks.
    process_set: the ranks that take part; None: all.
    ordered: whether the operation has a place in the order of all operations of a compiled function. Pass False if it
        is the only one, and not in a jitted function that another one calls: a call takes 0.2 ms less (docs/jax.md).

    Collective. Inside of `jax.jit` the functions of all ranks must have the same name, and make the same operations in
    the same order; other arrays, such as the batch, may have other shapes. Works under grad, jvp, vmap, scan,
    while_loop, cond and checkpoint. Raises InputError, or MismatchError if name, shape, dtype or op differ; in a
    compiled function see `allred.jax.raise_allred_errors`.

    Example: on 2 ranks, `jax.jit(allreduce)(jnp.full(3, float(allred.rank())))` returns `[0.5, 0.5, 0.5]`.
    """
    return grouped_allreduce([value], op, name or "allreduce", process_set, ordered)[0]


def grouped_allreduce(
    values: Sequence[Any],
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str = "",
    process_set: ProcessSet | None = None,
    ordered: bool = True,
) -> list[jax.Array]:
    """Reduce a list of arrays of any shapes and dtypes as one operation, which is faster than one for each. Arguments:
    see `allreduce`.

    Example: on 2 ranks, `grouped_allreduce([jnp.ones(2), jnp.ones((), int)], allred.Sum)` returns `[[2.0, 2.0], 2]`.
    """
    op = ops.of(op)
    values = [_usable(value) for value in values]
    if op is ReduceOp.AVERAGE:
        for value in values:
            if not jnp.issubdtype(value.dtype, jnp.floating):
                raise InputError(
                    f"allred.jax: op=allred.Average needs floats, got {value.dtype}; use allred.Sum, or convert the "
                    "array"
                )
    if functions.current(process_set).size == 1 or not values:
        return values
    return bind(JaxReduction(name or "grouped_allreduce", process_set, ordered, op), values)


def allgather(value: Any, name: str = "", process_set: ProcessSet | None = None, ordered: bool = True) -> jax.Array:
    """Concatenate the arrays of all ranks along the first dimension, in rank order: shape (n, ...) gives (N * n, ...)
    on N ranks. An array of shape () counts as one of shape (1,). Arguments: see `allreduce`.

    Inside of `jax.jit` the shapes must be the same on all ranks; outside, they may differ in the first dimension.

    Example: on 2 ranks, `allgather(jnp.array([allred.rank()]))` returns `[0, 1]`.
    """
    value = jnp.atleast_1d(_usable(value))
    communicator = functions.current(process_set)
    if communicator.size == 1:
        return value
    gathering = JaxAllgather(name or "allgather", process_set, ordered, communicator.size, communicator.rank)
    return bind(gathering, [value])[0]


def broadcast(
    value: Any, root: int = 0, name: str = "", process_set: ProcessSet | None = None, ordered: bool = True
) -> jax.Array:
    """Return the array of rank `root`. Shape and dtype must be the same on all ranks. Arguments: see `allreduce`.

    Example: `broadcast(jnp.array(allred.rank()), root=1)` returns `1` on all ranks.
    """
    return broadcast_arrays([value], root, name or "broadcast", process_set, ordered)[0]


def broadcast_arrays(
    values: Sequence[Any], root: int, name: str, process_set: ProcessSet | None = None, ordered: bool = True
) -> list[jax.Array]:
    """As `broadcast`, of several arrays."""
    values = [_usable(value) for value in values]
    if functions.current(process_set).size == 1 or not values:
        return values
    return bind(JaxBroadcast(name, process_set, ordered, root), values)


def broadcast_params(tree: Any, root: int = 0, name: str = "parameters", process_set: ProcessSet | None = None) -> Any:
    """Return a pytree of the same structure with the arrays and random keys of rank `root`. numpy arrays become arrays
    of JAX. Other leaves, such as Python's numbers and functions, stay.

    Shapes and dtypes must be the same on all ranks. Collective; inside and outside of `jax.jit`.

    Example: `params = broadcast_params(params)` after each rank has made its own; the state of an optimizer likewise.
    """
    own = arrays_of(tree)
    return own.rebuild(broadcast_arrays(own.values, root, name, process_set))
