"""`KerasAverager`: the distributed optimizer behind one of Keras, with checkpoints and sessions of a model."""

import os
from typing import Any

from allred import world
from allred.arrays import Array
from allred.errors import InputError
from allred.keras.keras_callbacks import numpy_value
from allred.keras.variable_names import names_of, numbers_of
from allred.modes.gradient_averager import GradientAverager, NoUpdate


class KerasUpdate(NoUpdate):
    """The optimizer of Keras, which makes its updates itself. Its state is that of its variables."""

    kind = "keras"

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.averages = False  # during the reduction of a step, in which variables of Keras cannot be read

    def step(self, params: dict[str, Array], mean: dict[str, Array]) -> None:
        self.mean = mean

    def state_dict(self) -> dict[str, Any]:
        return (
            {}
            if self.averages
            else {"variables": values_of(numbers_of(self._optimizer.variables), self._optimizer.variables)}
        )

    def load_state_dict(self, state: Any) -> None:
        if not isinstance(state, dict) or "variables" not in state:
            raise InputError("the state is not of allred.keras.distributed; restore a checkpoint of the same optimizer")
        variables = self._optimizer.variables
        assign_all("the state of the optimizer", numbers_of(variables), variables, state["variables"])


class KerasAverager(GradientAverager):
    """The attribute `allred` of a distributed optimizer of Keras. `save` and `restore` take the model, which must have
    been built."""

    def __init__(self, optimizer: Any, **options: Any) -> None:
        self._keras = KerasUpdate(optimizer)
        super().__init__("Keras", self._keras, weights=False, **options)
        self._keras_optimizer = optimizer
        self._model: Any = None  # of a session

    def average(
        self, title: str, grads: dict[str, Array], params: dict[str, Array] | None, samples: int | None
    ) -> bool:
        self._keras.averages = True
        try:
            return super().average(title, grads, params, samples)
        finally:
            self._keras.averages = False

    def _take(self, model: Any) -> dict[str, Array]:
        """Return copies of the weights of a model, after the end of a step."""
        if not getattr(model, "built", False) or not hasattr(model, "weights"):
            raise InputError(f"{self.name}: expected a model of Keras that is built, got {model!r}; see model.build")
        if hasattr(model, "jax_state_sync"):  # during fit() on JAX the variables have old values
            model.jax_state_sync()
        if not self._keras_optimizer.built:
            self._keras_optimizer.build(model.trainable_variables)
        return values_of(names_of(model.weights), model.weights)

    def _give(self, copies: dict[str, Array]) -> None:
        """Assign the weights of the model, which were restored or received."""
        assign_all("the model", names_of(self._model.weights), self._model.weights, copies)

    def session_parts(self, params: Any) -> tuple[Any, dict[str, Any]]:
        if world.config().mode != "sync":
            raise InputError(f"{self.name}: allred.keras has sessions and checkpoints in mode sync only")
        self._model = params
        return self._take(params), {}

    def restore_all(self, directory: Any, params: Any, others: Any = ()) -> tuple[int | None, Any]:
        result = super().restore_all(directory, params, others)
        self._give(params)
        return result

    def saving(self, params: Any, extra: Any, copy: bool = False) -> Any:
        return super().saving(self._take(self._model), extra, copy)

    def save(self, directory: str | os.PathLike[str], params: Any) -> str | None:
        """As `DistributedOptimizer.save`, of a model and its optimizer."""
        return super().save(directory, self.session_parts(params)[0])

    def restore(self, directory: str | os.PathLike[str], params: Any) -> int | None:
        """As `DistributedOptimizer.restore`, of a model and its optimizer."""
        return self.restore_all(directory, self.session_parts(params)[0])[0]

    def broadcast(self, params: Any, root: int | None = None) -> None:
        """As `DistributedOptimizer.broadcast`, of a model and its optimizer."""
        if isinstance(params, dict):  # of `restore_all`
            return super().broadcast(params, root)
        copies = self.session_parts(params)[0]
        super().broadcast(copies, root)
        return self._give(copies)


def values_of(names: list[str], variables: Any) -> dict[str, Array]:
    """Return copies of the values of variables by name."""
    return {name: numpy_value(variable).copy() for name, variable in zip(names, variables, strict=True)}


def assign_all(what: str, names: list[str], variables: Any, values: dict[str, Array]) -> None:
    """Assign the result of `values_of`. Raises InputError if the variables are others."""
    own = {name: tuple(variable.shape) for name, variable in zip(names, variables, strict=True)}
    given = {name: value.shape for name, value in values.items()}
    if given != own:
        raise InputError(f"{what} has the variables {own}, and the checkpoint {given}; restore one of the same model")
    for name, variable in zip(names, variables, strict=True):
        variable.assign(values[name])
