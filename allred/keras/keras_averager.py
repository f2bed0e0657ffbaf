"""`KerasAverager`: averages gradients for an optimizer of Keras, and saves and restores its model."""

import os
from typing import Any

from allred import world
from allred.arrays import Array
from allred.errors import CheckpointError, InputError
from allred.keras.callback_mixins import numpy_value
from allred.keras.variable_names import names_of, numbers_of
from allred.modes.gradient_averager import GradientAverager, GradientReceiver


class KerasState(GradientReceiver):
    """The state of an optimizer of Keras: its variables."""

    kind = "keras"

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.is_reducing = False  # during the reduction of a step, in which variables of Keras cannot be read

    def step(self, params: dict[str, Array], mean: dict[str, Array]) -> None:
        self.mean = mean

    def state_dict(self) -> dict[str, Any]:
        variables = self._optimizer.variables
        return {} if self.is_reducing else {"variables": values_of(numbers_of(variables), variables)}

    def load_state_dict(self, state: Any) -> None:
        if not isinstance(state, dict) or "variables" not in state:
            raise InputError("the checkpoint was not written with allred.keras.distributed")
        variables = self._optimizer.variables
        assign_all("the state of the optimizer", numbers_of(variables), variables, state["variables"])


class KerasAverager(GradientAverager):
    """The attribute `allred` of a distributed optimizer of Keras. `save` and `restore` take the model, which must have
    been built."""

    def __init__(self, optimizer: Any, **options: Any) -> None:
        self._keras_state = KerasState(optimizer)
        super().__init__("Keras", self._keras_state, weights=False, **options)
        self._keras_optimizer = optimizer
        self._model: Any = None  # of a session
        self._raw: dict[str, Array] = {}  # see `keep_weights`
        self.ordered = True  # see keras_optimizer.distributed
        self.compares = True  # whether the ranks compare the weights; False before they are broadcast

    def average(
        self, title: str, grads: dict[str, Array], params: dict[str, Array] | None, samples: int | None
    ) -> bool:
        if world.config().mode != "sync":
            raise InputError(
                f"{self.name}: allred.keras trains in mode sync, and this job is in mode {world.config().mode}"
            )
        self._keras_state.is_reducing = True
        try:
            return super().average(title, grads, params if self.compares else None, samples)
        finally:
            self._keras_state.is_reducing = False

    def _copy_weights(self, model: Any) -> dict[str, Array]:
        """Return copies of the weights of a model, after the end of a step."""
        if not getattr(model, "built", False) or not hasattr(model, "weights"):
            raise InputError(f"{self.name}: expected a model of Keras that is built, got {model!r}; see model.build")
        if hasattr(model, "jax_state_sync"):  # during fit() on JAX the variables have old values
            model.jax_state_sync()
        if not self._keras_optimizer.built:
            self._keras_optimizer.build(model.trainable_variables)
        try:
            return values_of(names_of(model.weights), model.weights)
        except (RuntimeError, TypeError) as error:  # on JAX, after an error in fit()
            raise CheckpointError(f"{self.name}: Keras has lost the weights of the model ({error})") from error

    def keep_weights(self) -> None:
        """Keep the weights for the next checkpoint. At the end of training Keras replaces them by their moving averages
        (use_ema=True), with which a training cannot go on."""
        if getattr(getattr(self._keras_optimizer, "inner_optimizer", self._keras_optimizer), "use_ema", False):
            self._raw = self._copy_weights(self._model)

    def forget_weights(self) -> None:
        """Forget the weights of `keep_weights`."""
        self._raw = {}

    def _assign_weights(self, copies: dict[str, Array]) -> None:
        """Assign the weights of the model, which were restored or received."""
        assign_all("the model", names_of(self._model.weights), self._model.weights, copies)

    def session_parts(self, params: Any) -> tuple[Any, dict[str, Any]]:
        if world.config().mode != "sync":
            raise InputError(f"{self.name}: allred.keras has sessions and checkpoints in mode sync only")
        self._model = params
        return self._copy_weights(params), {}

    def restore_all(self, directory: Any, params: Any, others: Any = ()) -> tuple[int | None, Any]:
        result = super().restore_all(directory, params, others)
        self._assign_weights(params)
        return result

    def saving(self, params: Any, extra: Any, copy: bool = False) -> Any:
        return super().saving(self._raw or self._copy_weights(self._model), extra, copy)

    def save(self, directory: str | os.PathLike[str], params: Any) -> str | None:
        """Save a model and its optimizer; see `DistributedOptimizer.save`."""
        return super().save(directory, self.session_parts(params)[0])

    def restore(self, directory: str | os.PathLike[str], params: Any) -> int | None:
        """Restore a model and its optimizer; see `DistributedOptimizer.restore`."""
        return self.restore_all(directory, self.session_parts(params)[0])[0]

    def broadcast(self, params: Any, root: int | None = None) -> None:
        """Copy a model and the state of its optimizer; see `DistributedOptimizer.broadcast`."""
        if isinstance(params, dict):  # of `restore_all`
            return super().broadcast(params, root)
        copies = self.session_parts(params)[0]
        super().broadcast(copies, root)
        return self._assign_weights(copies)


def values_of(names: list[str], variables: Any) -> dict[str, Array]:
    """Return copies of the values of variables by name."""
    return {name: numpy_value(variable).copy() for name, variable in zip(names, variables, strict=True)}


def assign_all(what: str, names: list[str], variables: Any, values: dict[str, Array]) -> None:
    """Assign the result of `values_of`. Raises InputError if the variables are others."""
    own = {(name, tuple(variable.shape)) for name, variable in zip(names, variables, strict=True)}
    given = {(name, value.shape) for name, value in values.items()}
    if given != own:
        text = "; ".join(f"{where} {sorted(only)}" for where, only in (("here", own - given), ("there", given - own)))
        raise InputError(f"{what} has other variables than the checkpoint, {text}; restore one of the same model")
    for name, variable in zip(names, variables, strict=True):
        variable.assign(values[name])
