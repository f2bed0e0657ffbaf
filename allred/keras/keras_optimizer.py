"""`distributed`: an optimizer of Keras whose gradients are averaged over the ranks, on TensorFlow, JAX and PyTorch.

The method `apply` of the instance is replaced. So the class of the optimizer stays as it is: models are saved and
loaded with and without allred. On JAX, Keras calls `stateless_apply` in its programs, which is replaced, too.
Optimizers of Keras 2 (the package tf_keras) have `apply_gradients` instead.

Keras on TensorFlow uses allred/tensorflow/gradient_averaging.py, and on JAX allred/jax/averaging.py. Gradients of torch
are averaged in their memory.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import keras

from allred.comm.ops import Compression, ReduceOp
from allred.comm.process_set import ProcessSet
from allred.errors import InputError
from allred.keras.keras_averager import KerasAverager
from allred.keras.variable_names import names_of

# Takes the names, the gradients, and the values of the variables, or None if they are not known. Returns the gradients
# to apply; and a boolean tensor, False if the update is skipped, or None if no update can be skipped.
Reduce = Callable[[list[str], list[Any], list[Any] | None], tuple[list[Any], Any]]


def distributed(
    optimizer: Any,
    op: ReduceOp = ReduceOp.AVERAGE,
    *,
    accumulate: int = 1,
    name: str = "opt",
    nonfinite: str | None = None,
    compression: Compression = Compression.none,
    process_set: ProcessSet | None = None,
    ordered: bool = True,
) -> Any:
    """Make an optimizer of Keras average gradients over all ranks before it applies them. Returns the same object.

        model.compile(allred.keras.distributed(keras.optimizers.Adam(0.001)), loss="mse")

    Every rank trains on its own batches. Gradients are averaged over the ranks, which count equally: give them batches
    of equal size. The step is one operation, in mode sync, with the checks of `allred.distributed`.

    Arguments:
        optimizer: a `keras.optimizers.Optimizer` on the backend TensorFlow, JAX or torch. For mixed precision pass a
            `keras.optimizers.LossScaleOptimizer`.
        accumulate: the number of batches whose gradients are averaged before the ranks communicate and the optimizer
            makes its update. `optimizer.iterations` counts updates, so learning rate schedules of Keras advance by
            updates. gradient_accumulation_steps of Keras must not be used.
        ordered: on JAX, False makes a step 1 to 2 ms faster; for programs whose training step has no other operation
            of allred, and with steps_per_execution=1 (see `allred.jax.allreduce`). No effect on the other backends.
        op, name, nonfinite, compression, process_set: see `allred.distributed`. With a LossScaleOptimizer, which skips
            such steps itself, `nonfinite` has no effect.

    The attribute `allred` of the optimizer is a `DistributedOptimizer`, with `summary()`, `skipped` and `global_step`.

    Raises InputError for an optimizer that is not one of Keras, or was passed before. Training raises, on all ranks,
    MismatchError, DriftError and NonFiniteError; in a compiled function see `raise_allred_errors`.

    Example: see above; `examples/keras_digits.py` is a whole program.
    """
    check(optimizer)
    scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)  # it skips steps itself
    averager = KerasAverager(
        optimizer, accumulate=accumulate, name=name, op=op, nonfinite="ignore" if scales else nonfinite,
        compression=compression, process_set=process_set,
    )  # fmt: skip
    averager.ordered = ordered
    optimizer.allred = averager
    replace_apply(optimizer, _REDUCERS[keras.backend.backend()](averager), counts=False)
    return optimizer


def check(optimizer: Any) -> None:
    """Raise InputError for an optimizer that cannot be distributed."""
    if isinstance(optimizer, type) or not callable(getattr(optimizer, "apply_gradients", None)):
        raise InputError(f"expected an optimizer of Keras, got {optimizer!r}")
    if hasattr(optimizer, "allred"):
        raise InputError(f"{type(optimizer).__name__}: this optimizer was already passed to allred.keras.distributed")
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if getattr(inner, "gradient_accumulation_steps", None):
        raise InputError(
            "gradient_accumulation_steps would communicate for every batch; pass accumulate= to "
            "allred.keras.distributed"
        )
    if (backend := keras.backend.backend()) not in _REDUCERS:
        raise InputError(f"allred.keras works on the backends {', '.join(_REDUCERS)}, and not on {backend}")


def replace_apply(optimizer: Any, reduce: Reduce, counts: bool) -> None:
    """Let an optimizer apply the gradients that `reduce` returns. counts: whether a call without an update counts in
    `iterations`; not on JAX."""
    if not hasattr(optimizer, "apply"):
        return _replace_apply_gradients(optimizer, reduce, counts)
    apply, build = optimizer.apply, optimizer.build
    trained: list[Any] = []  # the variables that the optimizer was built for
    is_reduced = False  # in a call of `apply` by `stateless_apply`
    is_checked = False  # whether the caller was looked at

    def noting_build(variables: Any) -> None:
        trained[:] = variables
        build(variables)

    def reduced_apply(grads: Sequence[Any], trainable_variables: Any = None) -> None:
        nonlocal is_checked
        variables = trained if trainable_variables is None else list(trainable_variables)
        if is_reduced or not grads:
            apply(grads, trainable_variables)
            return
        if not is_checked:
            _refuse_loss_scale_outside(optimizer)
            is_checked = True
        if not optimizer.built:
            optimizer.build(variables)
        mean, used = _reduce_present(reduce, grads, variables, [_value(variable) for variable in variables])

        def update() -> None:
            apply(mean, trainable_variables)

        def skip() -> None:
            if counts:
                optimizer.iterations.assign_add(1)

        if used is None:
            update()
        else:
            keras.ops.cond(used, update, skip)

    def reduced_stateless_apply(optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        nonlocal is_reduced
        _refuse_loss_scale_outside(optimizer)
        mean, used = _reduce_present(reduce, grads, trained, trainable_variables)
        is_reduced = True
        try:
            after = stateless_apply(optimizer_variables, mean, trainable_variables)
        finally:
            is_reduced = False
        if used is None:
            return after
        before = trainable_variables, optimizer_variables
        return tuple(
            [keras.ops.where(used, *pair) for pair in zip(new, old, strict=True)]
            for new, old in zip(after, before, strict=True)
        )

    optimizer.apply, optimizer.build = reduced_apply, noting_build
    if keras.backend.backend() == "jax":
        stateless_apply = optimizer.stateless_apply
        optimizer.stateless_apply = reduced_stateless_apply
    return None


def _replace_apply_gradients(optimizer: Any, reduce: Reduce, counts: bool) -> None:
    """As `replace_apply`, of an optimizer of Keras 2."""
    import tensorflow as tf

    apply_gradients = optimizer.apply_gradients

    def reduced_apply_gradients(grads_and_vars: Any, *arguments: Any, **options: Any) -> Any:
        pairs = list(grads_and_vars)
        variables = [variable for _, variable in pairs]
        _refuse_loss_scale_outside(optimizer)
        if hasattr(optimizer, "build"):  # before tf.cond, in which variables cannot be made
            with tf.init_scope():
                optimizer.build(variables)
        mean, used = _reduce_present(reduce, [grad for grad, _ in pairs], variables, variables)

        def update() -> Any:
            return apply_gradients(zip(mean, variables, strict=True), *arguments, **options)

        def updated() -> Any:
            done = update()  # an operation, a tensor or None
            with tf.control_dependencies([] if done is None else [done]):
                return tf.identity(optimizer.iterations)

        def skipped() -> Any:
            return tf.identity(optimizer.iterations.assign_add(1) if counts else optimizer.iterations)

        return update() if used is None else tf.cond(used, updated, skipped)

    optimizer.apply_gradients = reduced_apply_gradients


def _reduce_present(reduce: Reduce, grads: Sequence[Any], variables: Sequence[Any], values: Sequence[Any]) -> Any:
    """Return the result of `reduce`, with None where a gradient is None. values: of the variables."""
    known = len(variables) == len(grads)
    names = names_of(variables) if known else [f"gradient {number}" for number in range(len(grads))]
    present = [index for index, grad in enumerate(grads) if grad is not None]
    chosen = [values[index] for index in present] if len(values) == len(grads) else None
    found, used = reduce([names[index] for index in present], [grads[index] for index in present], chosen)
    results: list[Any] = [None] * len(grads)
    for index, grad in zip(present, found, strict=True):
        results[index] = grad
    return results, used


def _value(variable: Any) -> Any:
    return variable.value if isinstance(variable, keras.Variable) else variable


def _refuse_loss_scale_outside(optimizer: Any) -> None:
    """Raise InputError if a LossScaleOptimizer calls a distributed optimizer: it does so only on ranks whose gradients
    are finite."""
    frame: Any = sys._getframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        kinds = [kind.__name__ for kind in type(caller).__mro__]
        if caller is not optimizer and {"LossScaleOptimizer", "BaseLossScaleOptimizer"} & set(kinds):
            raise InputError(
                "mixed precision: model.compile() has wrapped the distributed optimizer in a LossScaleOptimizer. Pass "
                "allred.keras.distributed(keras.optimizers.LossScaleOptimizer(optimizer)) to it; for Horovod's names, "
                "hvd.DistributedOptimizer(tf.keras.mixed_precision.LossScaleOptimizer(optimizer))"
            )
        frame = frame.f_back


# The backends.


def _reduce_tensorflow(averager: KerasAverager) -> Reduce:
    from allred.tensorflow.gradient_averaging import average

    def reduce(names: list[str], grads: list[Any], values: list[Any] | None) -> tuple[list[Any], Any]:
        found, used = average(averager, names, grads, values)
        return found, used

    return reduce


def _reduce_jax(averager: KerasAverager) -> Reduce:
    from allred.jax.averaging import average

    def reduce(names: list[str], grads: list[Any], values: list[Any] | None) -> tuple[list[Any], Any]:
        params = None if values is None else dict(zip(names, values, strict=True))
        mean, used = average(averager, dict(zip(names, grads, strict=True)), params, None, averager.ordered)
        return [mean[name] for name in names], used

    return reduce


def _reduce_torch(averager: KerasAverager) -> Reduce:
    from allred.torch.tensors import as_array

    def reduce(names: list[str], grads: list[Any], values: list[Any] | None) -> tuple[list[Any], Any]:
        arrays = {name: as_array(grad.detach()) for name, grad in zip(names, grads, strict=True)}
        params = None
        if values is not None:
            params = {name: as_array(value.detach()) for name, value in zip(names, values, strict=True)}
        used = averager.average(averager.name, arrays, params, None)
        return grads, used if averager.skips else None

    return reduce


_REDUCERS: dict[str, Callable[[KerasAverager], Reduce]] = {
    "tensorflow": _reduce_tensorflow,
    "jax": _reduce_jax,
    "torch": _reduce_torch,
}
