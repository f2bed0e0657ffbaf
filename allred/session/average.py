"""Exponential moving average of the parameters, for evaluation and export; and the hook that updates it."""

import contextlib
import operator
from collections.abc import Iterator
from typing import Any

import numpy as np

from allred import nest
from allred.arrays import Array, view_as_real
from allred.errors import InputError
from allred.optim.base import check_writable, compute_dtype, describe, is_inexact_tensor
from allred.session.hooks import Hook
from allred.validators import fraction


class MovingAverage:
    """Averages every parameter of a nest: average = decay_t * average + (1 - decay_t) * parameter.

    With warmup decay_t = min(decay, (1 + t) / (10 + t)), where t is the global step. Without it decay_t = decay, and
    the random initial values have weight for about 1 / (1 - decay) steps. tf.train.ExponentialMovingAverage is the
    same, with and without num_updates. Averages start as copies of the parameters. Averages of 16-bit floats are
    float32, because 16 bits cannot represent the change of a step.

    B. T. Polyak and A. B. Juditsky, Acceleration of Stochastic Approximation by Averaging, SIAM J. Control Optim.
    30(4), 1992.

    Arguments:
        params: nest of float arrays that the optimizer updates in place, or replaces in the nest. Other leaves
            (numbers, integer arrays, None) have no average.
        decay: 0 <= decay < 1; 0.999 averages about 1000 steps.
        warmup: see above.

    Raises InputError: decay is out of range, or a parameter is read-only.

    >>> params = {"w": np.array([0.0])}
    >>> average = MovingAverage(params, decay=0.75, warmup=False)
    >>> params["w"][:] = 8.0
    >>> average.update(step=1)
    >>> with average.swapped():
    ...     print(params)
    {'w': array([2.])}
    >>> print(params)
    {'w': array([8.])}
    """

    def __init__(self, params: Any, decay: float = 0.999, warmup: bool = True) -> None:
        self._params = params
        self._decay = fraction("MovingAverage", "decay", decay)
        self._warmup = warmup
        self._averages: dict[str, Array] = {}
        self._scratch: dict[Any, Array] = {}  # one array per dtype
        self._swapped = False
        for name, param in self._leaves():
            check_writable("MovingAverage", nest.quoted(name, "parameter"), param)
            self._averages[name] = np.array(param, dtype=compute_dtype(param), like=param)

    def decay_at(self, step: int) -> float:
        """Return decay_t of a global step.

        >>> average = MovingAverage([], decay=0.5)
        >>> average.decay_at(2), average.decay_at(8), average.decay_at(10**6)
        (0.25, 0.5, 0.5)
        """
        return min(self._decay, (1 + step) / (10 + step)) if self._warmup else self._decay

    def update(self, step: int) -> None:
        """Update the averages with the current parameters.

        step: the global step, the number of updates of the parameters so far.
        Raises InputError: the parameters are swapped, or not those of the constructor.
        """
        decay = self.decay_at(operator.index(step))
        for param, average in self._pairs("update"):
            numbers, average = view_as_real(param), view_as_real(average)
            scratch = self._scratch_for(average)
            np.multiply(numbers, 1.0 - decay, out=scratch, dtype=scratch.dtype)
            np.multiply(average, decay, out=average)
            np.add(average, scratch, out=average)

    def reset(self) -> None:
        """Set the averages to the current parameters. Raises InputError as `update` does."""
        for param, average in self._pairs("reset"):
            average[...] = param

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """Replace the parameters by the averages, in place; restore them, bit for bit, at the end of the block.

        Needs memory for a copy of the parameters. Changes of the parameters within the block are lost.
        Raises InputError: the parameters are swapped already, or not those of the constructor.
        """
        pairs = self._pairs("swapped")
        kept = [(param, param.copy()) for param, _ in pairs]
        self._swapped = True
        try:
            for param, average in pairs:
                param[...] = average.astype(param.dtype, copy=False)
            yield
        finally:
            for param, before in kept:
                param[...] = before
            self._swapped = False

    def state_dict(self) -> dict[str, Any]:
        """Return {"averages": {parameter name: array}}, as copies; float32 for 16-bit parameters."""
        return {"averages": {name: average.copy() for name, average in self._averages.items()}}

    def load_state_dict(self, state: Any) -> None:
        """Restore the result of `state_dict`, as a copy. Arrays may have another float dtype.

        Raises InputError: another format, or other parameters; nothing has changed.
        """
        who = "MovingAverage.load_state_dict"
        loaded = state.get("averages") if isinstance(state, dict) else None
        if not isinstance(loaded, dict):
            raise InputError(
                f"{who}: expected a dict with 'averages', but got {state!r:.80}; pass the result of state_dict()"
            )
        _check_names(who, set(self._averages), set(loaded))
        for name, average in self._averages.items():
            if not (
                is_inexact_tensor(loaded[name])
                and loaded[name].shape == average.shape
                and np.can_cast(loaded[name].dtype, average.dtype, "same_kind")
            ):
                raise InputError(
                    f"{who}: the average of {nest.quoted(name)} must be an array of floats of shape {average.shape}, "
                    f"but is {describe(loaded[name])}; load the state of the same model"
                )
        for name, average in self._averages.items():
            average[...] = np.asarray(loaded[name], dtype=average.dtype, like=average)

    def _leaves(self) -> list[nest.Leaf]:
        return [(name, leaf) for name, leaf in nest.leaves(self._params) if is_inexact_tensor(leaf)]

    def _pairs(self, what: str) -> list[tuple[Array, Array]]:
        """Return each parameter with its average, after checking all."""
        who, leaves = f"MovingAverage.{what}", self._leaves()
        if self._swapped:
            raise InputError(f"{who}: the parameters are swapped inside `with average.swapped()`; call it outside")
        _check_names(who, set(self._averages), {name for name, _ in leaves})
        for name, param in leaves:
            average = self._averages[name]
            if param.shape != average.shape or compute_dtype(param) != average.dtype:
                raise InputError(
                    f"{who}: {nest.quoted(name, 'parameter')} is {describe(param)}, but its average is "
                    f"{describe(average)}; create a new MovingAverage for another model"
                )
        return [(param, self._averages[name]) for name, param in leaves]

    def _scratch_for(self, average: Array) -> Array:
        """Return memory of the average's shape and dtype, reused for all tensors because new memory is slow."""
        held = self._scratch.get(average.dtype)
        if held is None or held.size < average.size:
            held = self._scratch[average.dtype] = np.empty_like(average, shape=(average.size,))
        return held[: average.size].reshape(average.shape)


def _check_names(who: str, expected: set[str], got: set[str]) -> None:
    if expected != got:
        missing, surplus = sorted(expected - got)[:3], sorted(got - expected)[:3]
        raise InputError(
            f"{who}: expected the {len(expected)} parameters of the averages, but got {len(got)}; missing: "
            f"{missing or 'none'}, unknown: {surplus or 'none'}; both must be of the same model"
        )


class Averaging(Hook):
    """Updates a MovingAverage after each step. The averages are part of the checkpoints; if they are not restored, they
    start as the initial parameters of the training.

        average = MovingAverage(params, decay=0.999)
        with allred.Session(..., hooks=[Averaging(average)]) as session: ...
        with average.swapped(): evaluate(params)
    """

    def __init__(self, average: MovingAverage) -> None:
        self._average = average
        self._loaded = False

    def begin(self, session: Any) -> None:
        if not self._loaded:  # the average was created before the parameters were restored or received
            self._average.reset()

    def after_step(self, session: Any, values: dict[str, float]) -> None:
        self._average.update(session.step)

    def state_dict(self) -> Any:
        """Return the state of the average."""
        return self._average.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Restore the result of `state_dict`."""
        self._average.load_state_dict(state)
        self._loaded = True
