"""Checks of hyper-parameters, with one wording of the error for all optimizers, schedules and clipping functions.

Each check returns a plain Python number. That matters: under NumPy's promotion rules a Python float takes the dtype of
the array it meets, while a np.float64 would widen a float32 computation.
"""

import math
import operator
from typing import Any

from allred.errors import InputError


def non_negative(who: str, name: str, value: Any) -> float:
    """`value` as a float, if it is finite and at least 0.

    >>> non_negative("SGD", "lr", 0)
    0.0
    """
    number = _as_float(value)
    if not 0.0 <= number < math.inf:
        raise InputError(f"{who}: {name} must be a finite number >= 0, but is {value!r}; pass 0 or a positive number")
    return number


def positive(who: str, name: str, value: Any) -> float:
    """`value` as a float, if it is larger than 0. Infinity is allowed: as a limit it means none."""
    number = _as_float(value)
    if not number > 0.0:
        raise InputError(f"{who}: {name} must be a number > 0, but is {value!r}; pass a positive number")
    return number


def fraction(who: str, name: str, value: Any) -> float:
    """`value` as a float, if 0 <= value < 1: the share of an average that is kept at each step."""
    number = _as_float(value)
    if not 0.0 <= number < 1.0:
        raise InputError(f"{who}: {name} must be in [0, 1), but is {value!r}; typical values are 0.9 and 0.999")
    return number


def whole(who: str, name: str, value: Any, least: int) -> int:
    """`value` as an int, if it is a whole number of steps and at least `least`."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise InputError(f"{who}: {name} must be an integer >= {least}, but is {value!r}; it counts steps")
    return number


def _as_float(value: Any) -> float:
    """`value` as a float; what is no number becomes NaN, which every check above refuses."""
    if isinstance(value, (str, bytes)):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan
