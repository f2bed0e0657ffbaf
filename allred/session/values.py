"""What the ranks tell each other at the end of a step, in one small allreduce: the values that were logged, averaged by
examples, and whether somebody asks to stop, or the chief for a checkpoint.

The ranks have to log the same names, `examples` too: these are the name of the operation, so a difference is its
MismatchError.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from allred.comm import functions
from allred.comm.ops import ReduceOp
from allred.errors import InputError
from allred.session.asked import SIGNALS


class Told(NamedTuple):
    """Of all ranks: averages of the values, examples in all, why to stop ("" if not), whether a checkpoint is due."""

    values: dict[str, float]
    examples: float
    stop: str
    save: bool


ANOTHER = "another rank asked"
_REASONS = (*(number.name for number in SIGNALS), ANOTHER)  # as the others hear of them


class Log:
    """Of one step on this rank."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}
        self._examples: float | None = None
        self._before: list[tuple[dict[str, float], float | None]] = []  # of earlier batches of this step

    def add(self, values: dict[str, Any], examples: Any) -> None:
        """Note numbers. What is noted twice in a step holds as noted last. Raises InputError for what is no number."""
        for name, value in values.items():
            self._values[name] = _number(name, value)
        if examples is not None:
            number = _number("examples", examples)
            if not 0 <= number < math.inf:
                raise InputError(f"session.log(examples={examples!r}): expected a number of at least 0")
            self._examples = number

    def go_on(self) -> None:
        """The step goes on with another batch: what holds is the mean over all of them, weighted by examples."""
        self._before.append((self._values, self._examples))
        self._values, self._examples = {}, None

    def alone(self, stop: str, save: bool) -> Told:
        """This rank's own, without the others; starts anew."""
        values, examples = self._take()
        return Told(values, examples or 0.0, stop, save)

    def together(self, stop: str, save: bool) -> Told:
        """Those of all ranks; collective. stop: why this rank would. Starts anew."""
        values, examples = self._take()
        names = sorted(values)
        weight = 1.0 if examples is None else examples
        heard_as = stop if stop in _REASONS or not stop else ANOTHER
        mine = [float(save), examples or 0.0, weight, *(float(heard_as == reason) for reason in _REASONS)]
        first = len(mine)
        mine += [values[name] * weight if weight else 0.0 for name in names]
        title = f"session.log({', '.join(['examples'] * (examples is not None) + names)})"
        total = functions.allreduce(np.array(mine), ReduceOp.SUM, name=title).tolist()
        save_votes, all_examples, all_weight, *votes = total[:first]
        means = {
            name: value / all_weight if all_weight else math.nan
            for name, value in zip(names, total[first:], strict=True)
        }
        why = stop or next((reason for reason, asked in zip(_REASONS, votes, strict=True) if asked), "")
        return Told(means, all_examples, why, save_votes > 0)

    def _take(self) -> tuple[dict[str, float], float | None]:
        self.go_on()
        batches, self._before = self._before, []
        if len(batches) == 1:
            return batches[0]
        sums: dict[str, list[float]] = {}
        for values, examples in batches:
            weight = 1.0 if examples is None else examples
            for name, value in values.items():
                total = sums.setdefault(name, [0.0, 0.0])
                total[0] += value * weight if weight else 0.0
                total[1] += weight
        counted = [examples for _, examples in batches if examples is not None]
        means = {name: value / weight if weight else math.nan for name, (value, weight) in sums.items()}
        return means, sum(counted) if counted else None


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise InputError(
            f"session.log({name}={value!r}): expected a number, or an array of one element; got {type(value).__name__}"
        ) from None
