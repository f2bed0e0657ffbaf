"""`TrainingState`: the pytrees of a training, for checkpoints and sessions."""

from typing import Any

import numpy as np

from allred.errors import InputError
from allred.jax.trees import arrays_of


class TrainingState:
    """The pytrees of a training run as attributes, which a session saves and restores.

        training = allred.jax.TrainingState(params=params, opt_state=opt_state, key=jax.random.key(0))
        session.track(params=training, optimizer=optimizer, data=batches)
        for x, y in session.steps(batches):
            training.params, training.opt_state = train_step(
                training.params, training.opt_state, x, y
            )

    params: the parameters, which are saved under their paths, such as "hidden.w": programs with numpy and torch and
        the same names can read them.
    opt_state: the state of the optimizer.
    trees: others, such as a random key, batch statistics and counters. They must be equal on all ranks: a checkpoint
        has the values of rank 0, and all ranks get them when it is restored.

    Arrays, numbers, bools and random keys are saved; other leaves, such as functions, stay as they are.
    """

    def __init__(self, *, params: Any, opt_state: Any = None, **trees: Any) -> None:
        self.params, self.opt_state = params, opt_state
        self._others = tuple(trees)
        for name, tree in trees.items():
            setattr(self, name, tree)

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Internal: return the arrays of the other trees, by the names of tree and leaf. A checkpoint also has the
        parameters and the state of the optimizer."""
        return {name: arrays_of(getattr(self, name), numbers=True).to_numpy() for name in self._others}

    def load_state_dict(self, state: dict[str, dict[str, Any]]) -> None:
        """Internal: restore a result of `state_dict`. Raises InputError for trees of another structure."""
        loaded = {name: with_arrays(f"tree '{name}'", getattr(self, name), state.get(name)) for name in self._others}
        for name, tree in loaded.items():
            setattr(self, name, tree)


def with_arrays(what: str, tree: Any, values: dict[str, Any] | None) -> Any:
    """Return a pytree with other arrays, which are given by name. Raises InputError if they do not fit it."""
    own = arrays_of(tree, numbers=True)
    shapes = {name: np.shape(value) for name, value in zip(own.names, own.values, strict=True)}
    given = None if values is None else {name: np.shape(value) for name, value in values.items()}
    if given != shapes:
        raise InputError(
            f"{what} has the arrays {shapes}, but the checkpoint has {given}; restore a checkpoint of the same model "
            "and optimizer"
        )
    assert values is not None
    return own.from_numpy(values)
