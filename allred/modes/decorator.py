"""`allred.distributed`: wraps an optimizer object or class, or a gradient function.

Wrapping is explicit delegation: the wrapped object keeps its class and behaviour, and nothing is forwarded implicitly.
"""

import functools
import inspect
import re
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from allred import arrays, native, nest, world
from allred.comm import functions
from allred.comm.communicator import Communicator
from allred.comm.ops import Compression, ReduceOp
from allred.comm.process_set import ProcessSet
from allred.data.loader import claim_samples
from allred.embeddings.embedding import Embedding
from allred.errors import AllredError, InputError, MismatchError
from allred.modes.clipping import GradScaler
from allred.modes.detect.mistake_checks import MistakeChecks
from allred.modes.optimizer import DistributedOptimizer, is_torch_optimizer
from allred.modes.options import StepInput, StepOptions
from allred.modes.reducer import Reducer, tensor_of
from allred.modes.sync import reduce_gradients
from allred.optim.base import Optimizer
from allred.ps import context
from allred.ps.consistency import Policy
from allred.ps.placement import How

_VALUES = (int, float, complex, np.generic, np.ndarray)
_ARGUMENT = "argument with the hash"
_DIFFERENT_ARGUMENTS = (
    "the ranks pass different parameters, but only gradients at the same parameters can be averaged. Start from the "
    "same parameters on all ranks (allred.broadcast); and if an optimizer such as scipy.optimize.minimize calls this "
    "function, use gradients(..., values=True), so that it compares the same values on all ranks. (If the first "
    "argument is not the parameters, pass it by keyword; ALLRED_CHECK_STEPS=0 switches this check off)"
)
_NOTHING = object()  # None may be passed by mistake


class _Distributed:
    """Make an optimizer average gradients over all ranks. Returns a `DistributedOptimizer`, or a class of them.

        opt = allred.distributed(allred.optim.SGD(lr=0.1))      # an object with step(params, grads)

        @allred.distributed                                     # a class with such a step: its instances are wrapped
        class Mine: ...

        @allred.distributed(op=allred.Sum, accumulate=4)        # the same with arguments
        class Mine: ...

        @allred.distributed.gradients                           # a function that returns grads, or (..., grads)
        def loss_and_grads(params, x, y): ...

    Arguments:
        op: allred.Average (default) or allred.Sum.
        accumulate: micro-steps per step; only the last one communicates.
        bucket_bytes: the size limit of gradients reduced together, in bytes; default: the setting of that name.
        nonfinite: what all ranks do if a gradient of any rank has a NaN or infinity: "raise" NonFiniteError, "skip" the
            step (`opt.skipped` counts them), or "ignore"; default: the setting of that name.
        name: the name of the optimizer in errors.
        process_set: an allred.ProcessSet, the ranks that train together; default: all. Mode sync only.
        compression: how gradients are sent, an `allred.Compression`; default: none. Mode local: how the changes of the
            parameters are sent. No effect in mode ps.
        error_feedback: whether the errors of compression between hosts are added to the gradients of the next step;
            default: with `int8` and `int4`. Takes 4 bytes for each element on each host.
        clip_norm: the largest norm of all gradients together after the reduction (and after `accumulate`); gradients
            with a larger norm are scaled down to it. `opt.grad_norm` is the norm before. Infinity only measures. In
            mode ps each worker clips its own gradients.
        scaler: an `allred.GradScaler`. Gradients are divided by its scale after the reduction; steps that overflow are
            skipped on all ranks.
        sharded: each rank of a node updates only its slice of the parameters and gets the rest from the others; the
            optimizer's state is in memory once per node, not once per rank. The results have the same bits. For
            elementwise optimizers of allred.optim with numpy arrays; others print one message and are not sharded. Mode
            sync only. See `opt.share`.
        tables: the `allred.Embedding` tables whose rows the steps update too (docs/embeddings.md).

    Mode ps only (docs/modes.md); each has a setting of that name:
        consistency: allred.ps.Async(), allred.ps.Bounded(staleness=...) or allred.ps.Sync(replicas_to_aggregate=...);
            or "async", "bounded", "sync", with the numbers from the settings.
        placement: which server holds which parameters: "bytes", "round_robin", "greedy", a function from a tensor
            (name, shape, dtype) to the number of a server, or a dict {name: server}.
        use_locking: whether a pull returns a consistent version of the parameters of each server.

    Mode local, and mode ps with `every` (docs/slow-links.md):
        every: steps from one round to the next; default: the setting `local_steps`, 32. In mode ps, steps from one
            exchange with the servers to the next; default: 1, mode ps without rounds, where `outer` has no effect.
        outer: the optimizer of allred.optim that applies the mean of the ranks' changes; default:
            `allred.optim.SGD(0.7, momentum=0.5, nesterov=True)`; in mode ps, policies async and bounded,
            `SGD(1 / workers)`.
        fragments: mode local: the number of parts of the parameters, whose rounds begin at different steps.
        delay: mode local: the number of steps between the beginning of an exchange and the use of its result, in which
            the ranks go on training; default 0, less than `every`.
        mix: with delay, the share of this rank's parameters after the exchange; the rest is that of all ranks.

    Raises TypeError for another target, InputError for an argument that cannot be used.
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
        error_feedback: bool | None = None,
        clip_norm: float | None = None,
        scaler: GradScaler | None = None,
        consistency: Policy | str | None = None,
        placement: How | None = None,
        use_locking: bool | None = None,
        sharded: bool = False,
        every: int | None = None,
        outer: Optimizer | None = None,
        fragments: int = 1,
        delay: int = 0,
        mix: float = 0.5,
        tables: Sequence[Embedding] = (),
    ) -> Any:
        options = StepOptions(
            name, op, accumulate, bucket_bytes, nonfinite, process_set, compression, error_feedback,
            clip_norm, scaler, consistency, placement, use_locking, sharded, every, outer, fragments, delay, mix,
            tables,
        )  # fmt: skip
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
        error_feedback: bool | None = None,
        values: bool = False,
    ) -> Any:
        """Make a function that returns gradients return their mean over all ranks. Collective when called.

        The function returns a nest of gradients (arrays and numbers), or a tuple whose last element is that nest. So
        gradients that are themselves a tuple must be returned as a list, or as `(grads,)`. Arrays are overwritten with
        the mean; the elements before the gradients (a loss, for example) stay those of this rank, unless `values` is
        True. Ranks are weighted by their samples in `allred.data.batches`. Use it on the function or wrap the
        optimizer, not both.

        An optimizer that compares values of the function, as all of scipy.optimize do, needs `values=True`: else each
        rank compares its own values, and the ranks take different steps.

            function = allred.distributed.gradients(loss_and_gradient, op=allred.Sum, values=True)
            scipy.optimize.minimize(function, x, jac=True)          # on every rank, with the same x

        Arguments: see `allred.distributed`. nonfinite: "raise" or "ignore"; there is no step that could be skipped.
        name: default: the name of the function. values: whether the elements before the gradients are reduced too, in
        the same exchange: numbers, or arrays, which are overwritten. Infinity is an error unless nonfinite="ignore".

        Raises TypeError if `function` is not a function. The call raises InputError in mode ps; and MismatchError if
        the function returns a value too and its first argument, an array like the gradient, differs between the ranks.

        Example: on 2 ranks, `allred.distributed.gradients(lambda: [float(allred.rank())])()` returns `[0.5]`.
        """
        options = StepOptions(
            name, op, bucket_bytes=bucket_bytes, nonfinite=nonfinite, process_set=process_set, compression=compression,
            error_feedback=error_feedback,
        )  # fmt: skip
        if function is None:
            return lambda later: _wrap_function(later, options, values)
        return _wrap_function(function, options, values)


def _wrap_function(function: Callable[..., Any], options: StepOptions, values: bool) -> Callable[..., Any]:
    if not isinstance(function, (types.FunctionType, types.MethodType)):
        raise TypeError(f"allred.distributed.gradients takes a function, got {function!r}")
    if hasattr(function, "_averages_gradients"):
        raise TypeError(f"{function.__name__}() averages its gradients already; wrapping it twice would average twice")
    if options.nonfinite == "skip":
        raise InputError("nonfinite='skip' skips steps, and a gradient function has none; use 'raise' or 'ignore'")
    title = f"{options.name or function.__name__}()"
    reducer = Reducer(options, title)
    checks = MistakeChecks(options, title)

    @functools.wraps(function)
    def averaged(*args: Any, **kwargs: Any) -> Any:
        if context.is_active():
            raise InputError(
                f"{title} is a gradient function, which has no meaning in mode ps: the parameter servers need an "
                "optimizer to apply gradients with. Wrap that instead: opt = allred.distributed(optimizer), then "
                "opt.step(params, grads) with this worker's gradients; or use mode sync"
            )
        if world.config().mode == "local":
            raise InputError(
                f"{title} is a gradient function; mode local averages parameters, so it needs the optimizer: opt = "
                "allred.distributed(optimizer), then opt.step(params, grads) with this rank's gradients; or use mode "
                "sync"
            )
        result = function(*args, **kwargs)
        *others, grads = result if isinstance(result, tuple) and result else (result,)
        given = {"value": others, "gradient": grads} if values else grads
        with functions.within(options.process_set):
            communicator = functions.current()
            odd = next((other for other in others if not isinstance(other, _VALUES)), None) if values else None
            problem = "" if odd is None else f"values=True takes numbers and arrays, got {type(odd).__name__}"
            step = _step_input(communicator, given, problem)
            settings = _argument(args, grads) if others else ""
            try:
                mean = reduce_gradients(communicator, reducer, checks, step, title, settings)
            except AllredError as error:
                reducer.drop_residuals()
                if isinstance(error, MismatchError) and len(set(re.findall(rf"{_ARGUMENT} (\w+)", str(error)))) > 1:
                    where = str(error).partition("\n")[2]
                    error.args = ("\n".join(filter(None, (f"{title}: {_DIFFERENT_ARGUMENTS}", where))),)
                raise
        assert mean is not None  # no step is skipped
        averages = nest.rebuild(given, mean)
        if values:
            others, averages = list(map(_as_before, others, averages["value"])), averages["gradient"]
        return (*others, averages) if isinstance(result, tuple) and result else averages

    averaged._averages_gradients = True  # type: ignore[attr-defined]
    return averaged


def _argument(args: tuple[Any, ...], grads: Any) -> str:
    """Describe the first argument of a function of a value and a gradient, if it is an array like the gradient: all
    ranks must pass the same."""
    if not (args and type(args[0]) is type(grads) is np.ndarray and args[0].shape == grads.shape):
        return ""
    if not world.config().check_steps:
        return ""
    return f"{_ARGUMENT} {native.hashes([arrays.as_bytes(args[0])])[0]:016x}"


def _as_before(before: Any, reduced: Any) -> Any:
    """Return a reduced number as it was before: a number, not an array."""
    if isinstance(before, np.ndarray):
        return reduced
    return reduced.item() if isinstance(before, (int, float, complex)) else reduced[()]


def _step_input(communicator: Communicator, grads: Any, problem: str) -> StepInput:
    named: list[nest.Leaf] = []
    samples = None
    try:
        named = nest.leaves(grads)
        tensors = [tensor_of(leaf_name, value) for leaf_name, value in named]
        samples = claim_samples()
    except InputError as error:
        tensors, problem = [], problem or str(error)
    return StepInput(
        communicator, None, grads, tensors, [], [value for _, value in named], samples, problem, plain=False
    )


def _steps(target: Any) -> bool:
    step = getattr(target, "step", None)
    if not callable(step):
        return False
    receiver = (None,) if inspect.isclass(target) and not isinstance(step, types.MethodType) else ()
    try:
        inspect.signature(step).bind(*receiver, "params", "grads")
    except (TypeError, ValueError):
        return False
    return True


def _wrap_class(target: type, options: StepOptions) -> type[DistributedOptimizer]:
    class Distributed(DistributedOptimizer):
        __wrapped__ = target

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(target(*args, **kwargs), **vars(options))

    for attribute in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(Distributed, attribute, getattr(target, attribute))
    return Distributed


def _wrap(target: Any, options: StepOptions) -> Any:
    if issubclass(target if isinstance(target, type) else type(target), DistributedOptimizer):
        raise TypeError("this optimizer is distributed already; wrapping it twice would average twice")
    if is_torch_optimizer(target):
        return DistributedOptimizer(target, **vars(options))
    if _steps(target):
        return (
            _wrap_class(target, options) if inspect.isclass(target) else DistributedOptimizer(target, **vars(options))
        )
    raise TypeError(
        f"allred.distributed cannot wrap {target!r}: it takes an object with step(params, grads); a class with such a "
        "step; an instance of torch.optim.Optimizer; and for a function that returns gradients there is "
        "@allred.distributed.gradients"
    )


distributed = _Distributed()
