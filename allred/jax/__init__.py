"""allred for JAX: collectives and averaged gradients, inside and outside of `jax.jit`, on CPUs.

    import allred
    import allred.jax                       # before the first computation of JAX

    allred.init()
    optimizer = allred.jax.distributed(optax.adam(1e-3))        # an optax.GradientTransformation

Guide: docs/jax.md. Importing allred.jax does not start MPI; it switches asynchronous dispatch of JAX on CPUs off.
"""

import sys

try:
    import jax  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "jax":
        raise
    raise ModuleNotFoundError(
        f"allred.jax needs JAX, and {sys.executable} has none: pip install jax optax", name="jax"
    ) from None

from allred.jax import custom_call

custom_call.install()

from typing import Any  # noqa: E402

from allred.jax.averaging import average_gradients  # noqa: E402
from allred.jax.jax_collectives import allgather, allreduce, broadcast, broadcast_params, grouped_allreduce  # noqa: E402
from allred.jax.training_state import TrainingState  # noqa: E402
from allred.watch.framework_errors import raise_allred_errors  # noqa: E402

__all__ = [
    "TrainingState",
    "allgather",
    "allreduce",
    "average_gradients",
    "broadcast",
    "broadcast_params",
    "distributed",
    "grouped_allreduce",
    "raise_allred_errors",
]


def __getattr__(name: str) -> Any:
    """`distributed` needs optax, the rest does not."""
    if name != "distributed":
        raise AttributeError(f"module 'allred.jax' has no attribute {name!r}")
    try:
        from allred.jax.optax_optimizer import distributed
    except ModuleNotFoundError as error:
        if error.name != "optax":
            raise
        raise ModuleNotFoundError(
            f"allred.jax.distributed needs optax, and {sys.executable} has none: pip install optax", name="optax"
        ) from None

    return distributed
