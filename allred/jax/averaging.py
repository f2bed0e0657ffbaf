"""Averaged gradients in programs of JAX: the operation `JaxAveraging`, and `average_gradients`.

The operation calls mode sync (allred/modes/sync.py) on the memory of the gradients, with an optimizer that makes no
update. So gradients of JAX have the same checks, weights, compression and timeline as those of numpy and torch.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from allred import world
from allred.arrays import Array
from allred.comm.ops import Compression, ReduceOp
from allred.comm.process_set import ProcessSet
from allred.errors import InputError
from allred.jax.custom_call import Function
from allred.jax.jax_collectives import copy
from allred.jax.primitive import JaxCollective, bind, check_dtype
from allred.jax.trees import names_of
from allred.modes.gradient_averager import GradientAverager, GradientReceiver


@dataclasses.dataclass(frozen=True)
class JaxAveraging(JaxCollective):
    """The operands: gradients, then parameters if `has_params`, then the number of samples if `has_samples`. The
    results: averaged gradients, then whether they are used if `tells_use`."""

    averager: GradientAverager
    names: tuple[str, ...]
    has_params: bool
    has_samples: bool
    tells_use: bool

    def results(self, operands: Sequence[Any]) -> list[Any]:
        used = [jax.core.ShapedArray((), jnp.dtype(bool))] if self.tells_use else []
        return [*operands[: len(self.names)], *used]

    def function(self, title: str) -> Function:
        def run(sources: list[Array], targets: list[Array], operation: Any) -> None:
            count = len(self.names)
            copy(sources[:count], targets[:count])
            params = dict(zip(self.names, sources[count : 2 * count], strict=True)) if self.has_params else None
            samples = int(sources[-1]) if self.has_samples else None
            used = self.averager.average(title, dict(zip(self.names, targets[:count], strict=True)), params, samples)
            if self.tells_use:
                targets[-1][...] = used
            elif not used:
                raise InputError(
                    f"{title}: a step is skipped, but the function was compiled for nonfinite='raise'; set "
                    "nonfinite='skip' before it is compiled"
                )

        return run

    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        raise InputError(f"{self.name}: averaged gradients have no derivative; use allred.jax.allreduce")

    def batch(self, operands: Sequence[Any], axes: Sequence[Any]) -> tuple[list[Any], Sequence[Any]]:
        raise InputError(f"{self.name}: gradients are averaged once for a whole batch; call it outside of jax.vmap")


def average(averager: GradientAverager, grads: Any, params: Any, samples: Any, ordered: bool) -> tuple[Any, Any]:
    """Return the averaged gradients; and whether they are used, or None if always."""
    name = averager.name
    if (mode := world.config().mode) != "sync":
        raise InputError(
            f"{name}: gradients are averaged in mode sync, and this job is in mode {mode}; use the method `step` of "
            "allred.jax.distributed(...)"
        )
    leaves, structure = jax.tree_util.tree_flatten(grads)
    operands = [jnp.asarray(leaf) for leaf in leaves]
    for operand in operands:
        check_dtype(operand)
    if not operands:
        return grads, None
    if params is not None:
        values, own = jax.tree_util.tree_flatten(params)
        if own != structure:
            raise InputError(f"{name}: parameters and gradients differ in structure: {own} and {structure}")
        operands += [jnp.asarray(value) for value in values]
    if samples is not None:
        given = samples if isinstance(samples, jax.Array) else np.asarray(samples)
        is_integer = given.shape == () and jnp.issubdtype(given.dtype, jnp.integer)
        if not is_integer or (isinstance(given, np.ndarray) and not 0 <= given < 2**31):
            raise InputError(f"{name}: samples={samples!r} must be an integer from 0 to 2**31 - 1, with shape ()")
        operands.append(jnp.asarray(given))
    collective = JaxAveraging(
        name, None, ordered, averager, tuple(names_of(grads)), params is not None, samples is not None, averager.skips
    )
    results = bind(collective, operands)
    mean = jax.tree_util.tree_unflatten(structure, results[: len(leaves)])
    return mean, results[-1] if averager.skips else None


_AVERAGERS = world.Slot(dict[Any, GradientAverager])  # of `average_gradients`, by arguments


def _averager(names: tuple[str, ...], **options: Any) -> GradientAverager:
    known = _AVERAGERS.of(world.current())
    key = names, *options.values()
    if key not in known:
        known[key] = GradientAverager("JAX", GradientReceiver(), **options)
    return known[key]


def average_gradients(
    grads: Any,
    samples: Any = None,
    *,
    params: Any = None,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str = "gradients",
    nonfinite: str | None = None,
    compression: Compression = Compression.none,
    process_set: ProcessSet | None = None,
    ordered: bool = True,
) -> Any:
    """Average a pytree of gradients over all ranks, as one operation, inside or outside of `jax.jit`. Returns a pytree
    of the same structure, shapes and dtypes. Collective, in mode sync.

    Arguments:
        grads: a pytree of arrays of float16, bfloat16, float32 or float64.
        samples: the number of samples of this rank's gradients, an integer or an array of integers of shape (): ranks
            are weighted by it. Default: the size of the latest batch of `allred.data.batches` or `stream`. If no rank
            has one, all count equally.
        params: the parameters, a pytree like `grads`: 1024 of their elements are compared between ranks in each step.
        op: allred.Average or Sum.
        nonfinite: what happens if a gradient has NaN or infinity, "raise" or "ignore"; default: ALLRED_NONFINITE.
        name, compression, process_set: see `allred.distributed`.
        ordered: see `allred.jax.allreduce`.

    Raises InputError; MismatchError if ranks differ; NonFiniteError, which names the path in the pytree; DriftError if
    `params` differ. In a compiled function see `raise_allred_errors`.

    Example: on 2 ranks, `average_gradients({"w": jnp.full(2, float(allred.rank()))})` returns `{"w": [0.5, 0.5]}`.
    """
    averager = _averager(
        tuple(names_of(grads)), op=op, name=name, nonfinite=nonfinite, compression=compression, process_set=process_set
    )
    if averager.skips:
        raise InputError(
            f"{name}: with nonfinite='skip' the update must be skipped too; use allred.jax.distributed(transformation)"
        )
    return average(averager, grads, params, samples, ordered)[0]
