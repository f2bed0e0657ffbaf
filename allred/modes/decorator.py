"""`allred.distributed`: what it makes of what it is given, in one table (`_FORMS`, below).

Wrapping is explicit delegation: the wrapped object keeps its class and its behaviour, the wrapper has `step`,
`broadcast`, `state_dict`, `load_state_dict` and `summary`, and nothing is forwarded by magic.
"""

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

from allred import nest
from allred.comm import functions
from allred.comm.ops import ReduceOp
from allred.comm.process_set import ProcessSet
from allred.compression import Compression
from allred.data.iterations import claim_samples
from allred.errors import InputError
from allred.modes.detect.checks import Checks
from allred.modes.optimizer import DistributedOptimizer
from allred.modes.scaler import GradScaler
from allred.ps import running
from allred.ps.consistency import Policy
from allred.ps.placement import How
from allred.reducer import Reducer, tensor_of

_NOTHING = object()  # None is something that somebody may pass by mistake


class _Distributed:
    """Make an optimizer average gradients over all ranks.

        opt = allred.distributed(allred.optim.SGD(lr=0.1))      # an object with step(params, grads)

        @allred.distributed                                     # a class with such a step: its instances are wrapped
        class Mine: ...

        @allred.distributed(op=allred.Sum, accumulate=4)        # the same with arguments
        class Mine: ...

        @allred.distributed.gradients                           # a function that returns grads, or (..., grads)
        def loss_and_grads(params, x, y): ...

    op: allred.Average (default) or allred.Sum.
    accumulate: micro-steps of a step; only the last one communicates.
    bucket_bytes: gradients travel together up to this size; default: the setting of that name.
    nonfinite: what a NaN or an infinity in a gradient of any rank does on all: "raise" NonFiniteError, "skip" the step
        (`opt.skipped` counts them), or "ignore"; default: the setting of that name.
    name: how errors call it.
    process_set: an allred.ProcessSet, the ranks that train together; all of them without. Of mode sync only.
    compression: what float32 and float64 gradients travel as: `allred.Compression.none`, `.fp16` or `.bf16`; in mode ps
        they go as they are.
    clip_norm: the norm that all gradients together may have after the reduction (and after `accumulate`); larger ones
        are scaled down to it. `opt.grad_norm` is the norm before; infinity only measures. In mode ps each worker clips
        its own gradient.
    scaler: an `allred.GradScaler`, by whose scale the gradients are divided after the reduction; steps that overflow
        are skipped on all ranks.

    Of mode ps only (docs/modes.md); each has a setting of that name:
    consistency: allred.ps.Async(), allred.ps.Bounded(staleness=...) or allred.ps.Sync(replicas_to_aggregate=...); or
        "async", "bounded", "sync", with the other numbers as in the settings.
    placement: which server has which parameters: "bytes", "round_robin", "greedy", a function from a tensor (name,
        shape, dtype) to a server's number, or a dict {name: server}.
    use_locking: whether a pull brings one version of each server's parameters.

    Raises TypeError for anything else.
    """

    def __call__(
        self,
        target: Any = _NOTHING,
        *,
        op: ReduceOp = ReduceOp.AVERAGE,
        accumulate: int = 1,
        bucket_bytes: int | str | None = None,
        nonfinite: str | None = None,
        name: str = "opt",
        process_set: ProcessSet | None = None,
        compression: Compression = Compression.none,
        clip_norm: float | None = None,
        scaler: GradScaler | None = None,
        consistency: Policy | str | None = None,
        placement: How | None = None,
        use_locking: bool | None = None,
    ) -> Any:
        options = {
            "op": op, "accumulate": accumulate, "bucket_bytes": bucket_bytes, "nonfinite": nonfinite, "name": name,
            "process_set": process_set, "compression": compression, "clip_norm": clip_norm, "scaler": scaler,
            "consistency": consistency, "placement": placement, "use_locking": use_locking,
        }  # fmt: skip
        if target is _NOTHING:
            return lambda later: _wrap(later, options)
        return _wrap(target, options)

    def gradients(
        self,
        function: Callable[..., Any] | None = None,
        *,
        op: ReduceOp = ReduceOp.AVERAGE,
        bucket_bytes: int | str | None = None,
        nonfinite: str | None = None,
        name: str = "",
        process_set: ProcessSet | None = None,
        compression: Compression = Compression.none,
    ) -> Any:
        """Make a function that returns gradients return their mean over all ranks. Collective when called.

        It returns a nest of gradients (arrays and numbers; without its parameter None has no shape), or a tuple whose
        last element is that nest; so gradients that are themselves a tuple must be returned as a list, or as
        `(grads,)`. Arrays are overwritten with the mean; what comes before the gradients (a loss, say) stays this
        rank's own. Ranks with more samples in their `allred.data.batches` share count for more. Use it on the
        function or wrap the optimizer, not both. Gradients that are not finite raise NonFiniteError, unless nonfinite
        is "ignore"; there is no step here that could be skipped. In mode ps the call raises InputError.
        """
        if function is None:
            return lambda later: self.gradients(
                later,
                op=op,
                bucket_bytes=bucket_bytes,
                nonfinite=nonfinite,
                name=name,
                process_set=process_set,
                compression=compression,
            )
        if not isinstance(function, (types.FunctionType, types.MethodType)):
            raise TypeError(f"allred.distributed.gradients takes a function, got {function!r}")
        if hasattr(function, "_averages_gradients"):
            raise TypeError(
                f"{function.__name__}() averages its gradients already; wrapping it twice would average twice"
            )
        if nonfinite == "skip":
            raise InputError(
                "nonfinite='skip' leaves out steps, and a gradient function has none; use 'raise' or 'ignore'"
            )
        title = f"{name or function.__name__}()"
        reducer = Reducer(op, bucket_bytes, title, compression=compression)
        checks = Checks(title, nonfinite, compression=compression)

        @functools.wraps(function)
        def averaged(*args: Any, **kwargs: Any) -> Any:
            if running.running():
                raise InputError(
                    f"{title} is a gradient function, which has no meaning in mode ps: the parameter servers need an "
                    "optimizer to apply gradients with. Wrap that instead: opt = allred.distributed(optimizer), then "
                    "opt.step(params, grads) with this worker's gradients; or use mode sync"
                )
            result = function(*args, **kwargs)
            *others, grads = result if isinstance(result, tuple) and result else (result,)
            with functions.within(process_set):
                mean = _reduce(reducer, checks, grads)
            return (*others, mean) if isinstance(result, tuple) and result else mean

        averaged._averages_gradients = True  # type: ignore[attr-defined]
        return averaged


def _reduce(reducer: Reducer, checks: Checks, grads: Any) -> Any:
    named: list[nest.Leaf] = []
    problem, samples = "", None
    try:
        named = nest.leaves(grads)
        tensors = [tensor_of(leaf_name, value) for leaf_name, value in named]
        samples = claim_samples()
    except InputError as error:
        tensors, problem = [], str(error)
    mean = reducer.reduce(tensors, [value for _, value in named], samples, problem, checks)
    assert mean is not None  # without an optimizer there is no step to skip
    return nest.rebuild(grads, mean)


def _steps(target: Any) -> bool:
    """Whether it has a method step(params, grads)."""
    step = getattr(target, "step", None)
    if not callable(step):
        return False
    receiver = (None,) if inspect.isclass(target) and not isinstance(step, types.MethodType) else ()
    try:
        inspect.signature(step).bind(*receiver, "params", "grads")
    except (TypeError, ValueError):
        return False
    return True


def _wrap_class(target: type, options: dict[str, Any]) -> type[DistributedOptimizer]:
    class Distributed(DistributedOptimizer):
        __wrapped__ = target

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(target(*args, **kwargs), **options)

    for attribute in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(Distributed, attribute, getattr(target, attribute))
    return Distributed


# What `distributed` takes: a test, in order, what to do, and the words for it.
_FORMS: list[tuple[Callable[[Any], bool], Callable[[Any, dict[str, Any]], Any], str]] = [
    (lambda t: not inspect.isclass(t) and _steps(t), lambda t, options: DistributedOptimizer(t, **options),
     "an object with step(params, grads)"),
    (lambda t: inspect.isclass(t) and _steps(t), _wrap_class, "a class with such a step"),
]  # fmt: skip


def _wrap(target: Any, options: dict[str, Any]) -> Any:
    DistributedOptimizer(None, **options)  # a wrong option is an error here, not when a class is first used
    if issubclass(target if isinstance(target, type) else type(target), DistributedOptimizer):
        raise TypeError("this optimizer is distributed already; wrapping it twice would average twice")
    for fits, wrap, _ in _FORMS:
        if fits(target):
            return wrap(target, options)
    torch = type(target).__module__.startswith("torch.")
    raise TypeError(
        f"allred.distributed cannot wrap {target!r}: it takes {'; '.join(words for *_, words in _FORMS)}; "
        "and for a function that returns gradients there is @allred.distributed.gradients"
        + (". An adapter for torch optimizers comes in a later version" if torch else "")
    )


distributed = _Distributed()
