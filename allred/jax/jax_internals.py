"""The parts of JAX beyond its public interface that allred.jax uses: ordered effects, and when programs run.

JAX has no public way to give the operations of a program an order. Its own ordered callbacks use the same effects: a
program passes a token from one operation to the next one, through control flow and nested functions. JAX 0.6 to 0.11
were tried.
"""

import inspect
from collections.abc import Callable
from typing import Any

import jax
from jax._src import core, effects, xla_bridge
from jax.interpreters import mlir


class OrderedEffect(effects.Effect):
    """The effect of operations that all ranks must run in one order."""

    def __str__(self) -> str:
        return "allred"


class HostEffect(effects.Effect):
    """An effect without order. The faster path on which JAX calls functions that were compiled ahead of time passes no
    tokens; with this effect JAX takes the slower one, which does."""

    def __str__(self) -> str:
        return "allred on the host"


ORDERED = OrderedEffect()
EFFECTS = {ORDERED, HostEffect()}  # of an operation that has an order
TOKEN = core.abstract_token  # the type of a token, for lowering

for _effects in (
    effects.ordered_effects,
    effects.shardable_ordered_effects,  # several devices: primitive.py refuses them
    effects.lowerable_effects,
    effects.control_flow_allowed_effects,
    effects.custom_derivatives_allowed_effects,
    effects.remat_allowed_effects,
):
    _effects.add_type(OrderedEffect)
    if _effects not in (effects.ordered_effects, effects.shardable_ordered_effects):
        _effects.add_type(HostEffect)


def disable_async_dispatch() -> bool:
    """Let each call of a program on a CPU return after the program has ended. Return False if JAX does not take the
    setting any more, because it has made its CPU client."""
    flag = "jax_cpu_enable_async_dispatch"
    if jax.config.read(flag) and xla_bridge.backends_are_initialized():
        return False
    jax.config.update(flag, False)
    return True


def device_count(axis_context: Any) -> int:
    """Return the number of devices that a program runs on. axis_context: of the module in which it is lowered."""
    mesh = getattr(axis_context, "mesh", None)
    return int(getattr(axis_context, "num_devices", None) or (1 if mesh is None else mesh.size))


def register_lowering(primitive: Any, rule: Callable[..., Any], platform: str | None = None) -> None:
    """Register a rule that JAX applies to each operation of a program. Since 0.7 it would apply it once to all equal
    operations, which would then have one number."""
    has_cache = "cacheable" in inspect.signature(mlir.register_lowering).parameters
    mlir.register_lowering(primitive, rule, platform, **({"cacheable": False} if has_cache else {}))
