"""The primitive of JAX for all operations of allred, and its rules.

An operation is a `JaxCollective`, which is a parameter of the primitive. It has the shapes of its results, its
derivatives, and the function that runs.

Order. XLA runs operations of a program at the same time if none needs the result of another, so two ranks could run
two of them in different orders. So operations in a program are ordered: they pass on a token (jax_internals.py). JAX
starts programs with tokens by a slower path, which takes 0.2 ms more. A program with one operation needs no token.

Each operation in a program has a name that contains the program's name and its own number there, and ranks compare the
names: two operations of equal shapes cannot be exchanged silently.
"""

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from allred.arrays import DTYPES
from allred.comm.process_set import ProcessSet
from allred.errors import InputError
from allred.jax import custom_call
from allred.jax.custom_call import Function
from allred.jax.jax_internals import EFFECTS, ORDERED, TOKEN, device_count, register_lowering
from allred.watch.framework_errors import raise_allred_errors


@dataclasses.dataclass(frozen=True)
class JaxCollective(ABC):
    """An operation on arrays. ordered: whether it has an order among the operations of a program."""

    name: str
    process_set: ProcessSet | None
    ordered: bool

    def results(self, operands: Sequence[Any]) -> list[Any]:
        """Return the types of the results. operands: their types (`jax.core.ShapedArray`)."""
        return list(operands)

    @abstractmethod
    def function(self, title: str) -> Function:
        """Return the function that runs the operation. title: the name of one call, for messages."""

    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Return results and their tangents. For operations that are linear in each operand."""
        given = [index for index, tangent in enumerate(tangents) if not is_zero(tangent)]
        results = bind(self, primals)
        found = bind(self.derived("tangent"), [tangents[index] for index in given]) if given else []
        zeros = [ad.Zero(jax.typeof(result).to_tangent_aval()) for result in results]
        for index, tangent in zip(given, found, strict=True):
            zeros[index] = tangent
        return results, zeros

    def transpose(self, cotangents: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
        """Return the cotangents of operands, from those of results. For operations that are their own transpose."""
        given = [index for index, cotangent in enumerate(cotangents) if not is_zero(cotangent)]
        found = bind(self.derived("gradient"), [cotangents[index] for index in given]) if given else []
        results = list(cotangents)
        for index, cotangent in zip(given, found, strict=True):
            results[index] = cotangent
        return results

    def batch(self, operands: Sequence[Any], axes: Sequence[Any]) -> tuple[list[Any], Sequence[Any]]:
        """Return results and their batch axes. For operations element by element."""
        return bind(self, operands), axes

    def derived(self, what: str) -> "JaxCollective":
        return dataclasses.replace(self, name=f"{self.name}, {what}")

    def run_directly(self, operands: Sequence[Any]) -> list[Any] | None:
        """Run the operation on arrays of JAX outside of a program. None: as a program of its own."""
        return None


_collective_p = Primitive("allred")
_identity_p = Primitive("allred_identity")
_collective_p.multiple_results = _identity_p.multiple_results = True


def bind(collective: JaxCollective, operands: Sequence[Any]) -> list[Any]:
    """Add an operation to the program that JAX traces, or run it."""
    return _collective_p.bind(*operands, collective=collective, in_place=True)  # type: ignore[no-any-return]


def isolated(tree: Any) -> Any:
    """Return a pytree of equal arrays. XLA does not compile what uses them together with what makes them: on ranks with
    batches of other shapes it could round otherwise."""
    leaves, structure = jax.tree_util.tree_flatten(tree)
    return jax.tree_util.tree_unflatten(structure, _identity_p.bind(*leaves) if leaves else [])


def is_zero(tangent: Any) -> bool:
    """Whether JAX knows that a tangent or cotangent is zero, without an array."""
    return type(tangent) is ad.Zero


def check_dtype(value: Any) -> None:
    """Raise InputError for an array whose dtype no operation takes."""
    name = str(value.dtype)
    if name.startswith("complex"):
        raise InputError(f"allred.jax: arrays of dtype {name} are not supported; pass the real and the imaginary part")
    if name not in DTYPES:
        raise InputError(f"allred.jax: arrays of dtype {name} are not supported; convert the array")


@functools.lru_cache(1024)
def _program(collective: JaxCollective) -> Any:
    def operation(*operands: Any) -> list[Any]:
        alone = dataclasses.replace(collective, ordered=False)
        return _collective_p.bind(*operands, collective=alone, in_place=False)  # type: ignore[no-any-return]

    return jax.jit(operation)


def _run(*operands: Any, collective: JaxCollective, in_place: bool) -> list[Any]:
    results = collective.run_directly(operands)
    if results is None:
        with raise_allred_errors(), jax.disable_jit(False):
            results = _program(collective)(*operands)
    return results


def _abstract(*operands: Any, collective: JaxCollective, in_place: bool) -> tuple[list[Any], set[Any]]:
    return collective.results(operands), EFFECTS if collective.ordered else set()


class _Calls:
    """The number of operations in the program that is lowered. unordered: whether one has no order."""

    def __init__(self) -> None:
        self.count, self.unordered = 0, False

    @classmethod
    def of(cls, module: Any) -> "_Calls":
        for kept in module.keepalives:
            if isinstance(kept, cls):
                return kept
        module.keepalives.append(calls := cls())
        return calls

    def add(self, collective: JaxCollective, program: str) -> int:
        self.count, self.unordered = self.count + 1, self.unordered or not collective.ordered
        nested = str(_function_of(mlir.ir.InsertionPoint.current.block)) != "main"
        if self.unordered and (self.count > 1 or nested):
            raise InputError(
                f"allred.jax: program {program} has an operation with ordered=False, but it is not the only one, or it "
                "is in a jitted function that another one calls; leave ordered=False out"
            )
        return self.count


def _function_of(block: Any) -> str:
    """Return the name of the function that contains a block of a program."""
    operation = block.owner.operation
    while operation.name != "func.func":
        operation = operation.parent
    return str(mlir.ir.StringAttr(operation.attributes["sym_name"]).value)


def _lower(context: Any, *operands: Any, collective: JaxCollective, in_place: bool) -> Any:
    """in_place: let results have the memory of operands. XLA copies those that it needs later."""
    module = context.module_context
    program = str(mlir.ir.StringAttr(module.module.operation.attributes["sym_name"]).value)
    if (devices := device_count(module.axis_context)) > 1:
        raise InputError(
            f"allred.jax: program {program} runs on {devices} devices of this process, but a rank has one; start one "
            "rank for each device, and average over ranks only"
        )
    number = _Calls.of(module).add(collective, program)
    call = custom_call.new_call(collective.function(f"{collective.name} ({program}, operation {number})"))
    inputs, outputs = list(context.avals_in), list(context.avals_out)
    if collective.ordered:
        operands = (context.tokens_in.get(ORDERED), *operands)
        inputs, outputs = [TOKEN, *inputs], [TOKEN, *outputs]
    first = int(collective.ordered)
    shared = {i: i for i in range(first, len(outputs)) if i < len(inputs) and inputs[i] == outputs[i]}
    lowering = jax.ffi.ffi_lowering(
        custom_call.TARGET,
        operand_layouts=[_layout(each) for each in inputs],
        result_layouts=[_layout(each) for each in outputs],
        operand_output_aliases=shared if in_place else None,
    )
    results = lowering(context.replace(avals_in=inputs, avals_out=outputs), *operands, call=np.int64(call))
    if collective.ordered:
        token, *results = results
        context.set_tokens_out(context.tokens_in.update_tokens(mlir.TokenSet({ORDERED: token})))
    return results


def _layout(aval: Any) -> Any:
    return None if aval is TOKEN else tuple(reversed(range(aval.ndim)))


def _refuse(context: Any, *operands: Any, collective: JaxCollective, in_place: bool) -> Any:
    raise InputError(
        f"allred.jax works with JAX on CPUs; '{collective.name}' is in a program for "
        f"{', '.join(context.module_context.platforms)}. Set JAX_PLATFORMS=cpu"
    )


def _lower_identity(context: Any, *operands: Any) -> Any:
    shared = {i: i for i in range(len(operands))}
    return jax.ffi.ffi_lowering(custom_call.IDENTITY, operand_output_aliases=shared)(context, *operands)


_identity_p.def_impl(lambda *operands: list(operands))
_identity_p.def_abstract_eval(lambda *operands: list(operands))
batching.primitive_batchers[_identity_p] = lambda operands, axes: (_identity_p.bind(*operands), axes)
register_lowering(_identity_p, _lower_identity, "cpu")

_collective_p.def_impl(_run)
_collective_p.def_effectful_abstract_eval(_abstract)
ad.primitive_jvps[_collective_p] = lambda primals, tangents, collective, in_place: collective.jvp(primals, tangents)
ad.primitive_transposes[_collective_p] = lambda cotangents, *operands, collective, in_place: collective.transpose(
    cotangents, operands
)
batching.primitive_batchers[_collective_p] = lambda operands, axes, collective, in_place: collective.batch(
    operands, axes
)
register_lowering(_collective_p, _refuse)
register_lowering(_collective_p, _lower, "cpu")
