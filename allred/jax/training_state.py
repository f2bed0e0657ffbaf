"""`TrainingState`: the pytrees of a training, for checkpoints and sessions."""

from typing import Any

import numpy as np

from allred.errors import InputError
from allred.jax.trees import arrays_of


class TrainingState:
    """The pytrees of a training as attributes, which a session saves and restores.

        training = allred.jax.TrainingState(params=params, state=optimizer.init(params), key=jax.random.key(0))
        session.track(params=training, optimizer=optimizer, data=batches)
        for x, y in session.steps(batches):
            training.params, training.state = train_step(training.params, training.state, x, y)

    params: the parameters, which are saved under their paths, such as "hidden.w": programs with numpy and torch and
        the same names can read them.
    state: the state of the optimizer.
    trees: any others, such as random keys, batch statistics, and counters.

    Arrays, numbers, bools and random keys are saved; other leaves, such as functions, stay as they are.
    """

    def __init__(self, *, params: Any, state: Any = None, **trees: Any) -> None:
        self.params, self.state = params, state
        self._others = tuple(trees)
        for name, tree in trees.items():
            setattr(self, name, tree)

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return the arrays of all trees except parameters and state, by the names of tree and leaf."""
        return {name: arrays_of(getattr(self, name), numbers=True).to_numpy() for name in self._others}

    def load_state_dict(self, state: dict[str, dict[str, Any]]) -> None:
        """Restore a result of `state_dict`. Raises InputError for trees of another structure."""
        loaded = {name: with_arrays(f"tree '{name}'", getattr(self, name), state.get(name)) for name in self._others}
        for name, tree in loaded.items():
            setattr(self, name, tree)


def with_arrays(what: str, tree: Any, values: dict[str, Any] | None) -> Any:
    """Return a pytree with other arrays, which are given by name. Raises InputError if they do not fit it."""
    own = arrays_of(tree, numbers=True)
    shapes = {name: np.shape(value) for name, value in zip(own.names, own.values, strict=True)}
    given = None if values is None else {name: np.shape(value) for name, value in values.items()}
    if given != shapes:
        raise InputError(f"{what} has the arrays {shapes}, but the checkpoint has {given}; restore the same program's")
    assert values is not None
    return own.from_numpy(values)
