"""An exponential moving average of parameters, to evaluate and to save instead of the last ones."""

import contextlib
import operator
from collections.abc import Iterator
from typing import Any

import numpy as np

from allred import nest
from allred.arrays import Array
from allred.errors import InputError
from allred.optim.tensors import check_writable, compute_dtype, describe, is_float_tensor
from allred.validators import fraction


class MovingAverage:
    """Keeps average = decay_t * average + (1 - decay_t) * parameter for every parameter of a nest.

    decay_t = min(decay, (1 + t) / (10 + t)) with warmup, where t is the global step; without it decay, and then the
    first values, which are random, weigh for about 1 / (1 - decay) steps. tf.train.ExponentialMovingAverage does the
    same, with num_updates and without. Averages start as copies of the parameters. Those of 16-bit floats are kept and
    formed in float32, since they cannot hold what a step adds.

    The idea: B. T. Polyak and A. B. Juditsky, Acceleration of Stochastic Approximation by Averaging, SIAM J. Control
    Optim. 30(4), 1992.

    Arguments:
        params: nest of float arrays that the optimizer updates in place, or replaces in the nest. Leaves that are no
            float arrays (numbers, integer arrays, None) have no average.
        decay: 0 <= decay < 1; 0.999 remembers about 1000 steps.
        warmup: see above.

    Raises:
        InputError: a decay that cannot be, or a parameter that is read-only.

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
        self._scratch: dict[Any, Array] = {}  # one for each dtype
        self._swapped = False
        for name, param in self._leaves():
            check_writable("MovingAverage", f"parameter {name!r}", param)
            self._averages[name] = np.array(param, dtype=compute_dtype(param), like=param)

    def decay_at(self, step: int) -> float:
        """The decay of the update of this global step.

        >>> average = MovingAverage([], decay=0.5)
        >>> average.decay_at(2), average.decay_at(8), average.decay_at(10**6)
        (0.25, 0.5, 0.5)
        """
        return min(self._decay, (1 + step) / (10 + step)) if self._warmup else self._decay

    def update(self, step: int) -> None:
        """Take the parameters as they are now into the averages.

        Arguments:
            step: the global step, the number of updates of the parameters so far.

        Raises:
            InputError: the parameters are swapped, or others than at first.
        """
        self._check_not_swapped("update")
        decay = self.decay_at(operator.index(step))
        for param, average in list(self._pairs("update")):  # all are checked before one is changed
            scratch = self._scratch_for(average)
            np.multiply(param, 1.0 - decay, out=scratch, dtype=scratch.dtype)
            np.multiply(average, decay, out=average)
            np.add(average, scratch, out=average)

    def reset(self) -> None:
        """Begin anew, from the parameters as they are now. Raises InputError as `update` does."""
        self._check_not_swapped("reset")
        for param, average in list(self._pairs("reset")):
            average[...] = param

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """Within it the parameters are the averages, in the same arrays; after it, bit for bit what they were.

        Needs memory for one more copy of the parameters. What is done to the parameters within it is lost.

        Raises:
            InputError: they are swapped already, or others than at first.
        """
        self._check_not_swapped("swapped")
        pairs = list(self._pairs("swapped"))
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
        """{"averages": {parameter name: array}}, as copies; float32 for 16-bit parameters."""
        return {"averages": {name: average.copy() for name, average in self._averages.items()}}

    def load_state_dict(self, state: Any) -> None:
        """Continue from what `state_dict` returned; copies it. Arrays may be of another float dtype.

        Raises:
            InputError: it has another format, or is of other parameters; nothing has changed then.
        """
        who = "MovingAverage.load_state_dict"
        loaded = state.get("averages") if isinstance(state, dict) else None
        if not isinstance(loaded, dict):
            raise InputError(
                f"{who}: expected a dict with 'averages', but got {state!r:.80}; pass what state_dict() returned"
            )
        _check_names(who, set(self._averages), set(loaded))
        for name, average in self._averages.items():
            if not is_float_tensor(loaded[name]) or loaded[name].shape != average.shape:
                raise InputError(
                    f"{who}: the average of {name!r} must be an array of floats of shape {average.shape}, but is "
                    f"{describe(loaded[name])}; load the state of the same model"
                )
        for name, average in self._averages.items():
            average[...] = np.asarray(loaded[name], dtype=average.dtype, like=average)

    def _leaves(self) -> list[nest.Leaf]:
        return [(name, leaf) for name, leaf in nest.leaves(self._params) if is_float_tensor(leaf)]

    def _pairs(self, what: str) -> Iterator[tuple[Array, Array]]:
        """Each parameter with its average."""
        who, leaves = f"MovingAverage.{what}", self._leaves()
        _check_names(who, set(self._averages), {name for name, _ in leaves})
        for name, param in leaves:
            average = self._averages[name]
            if param.shape != average.shape or compute_dtype(param) != average.dtype:
                raise InputError(
                    f"{who}: parameter {name!r} is {describe(param)} now, and its average {describe(average)}; "
                    "make a new MovingAverage for another model"
                )
            yield param, average

    def _scratch_for(self, average: Array) -> Array:
        """Memory in the average's shape and dtype, the same for all tensors: new memory is slow."""
        held = self._scratch.get(average.dtype)
        if held is None or held.size < average.size:
            held = self._scratch[average.dtype] = np.empty_like(average, shape=(average.size,))
        return held[: average.size].reshape(average.shape)

    def _check_not_swapped(self, what: str) -> None:
        if self._swapped:
            raise InputError(
                f"MovingAverage.{what}: the parameters are the averages here, within `with average.swapped()`; "
                "call it outside"
            )


def _check_names(who: str, expected: set[str], got: set[str]) -> None:
    if expected != got:
        missing, surplus = sorted(expected - got)[:3], sorted(got - expected)[:3]
        raise InputError(
            f"{who}: averages are kept of {len(expected)} parameters, but {len(got)} are given; missing: "
            f"{missing or 'none'}, unknown: {surplus or 'none'}; they must be of the same model"
        )
