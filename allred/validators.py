"""Validators of numeric arguments: each returns a plain Python number or raises InputError.

Plain numbers matter: under NumPy's promotion rules a Python float takes the dtype of the array that it is combined
with, while a np.float64 would widen a float32 computation.
"""

import math
import operator
from typing import Any

from allred.errors import InputError


def non_negative(who: str, name: str, value: Any) -> float:
    """Return `value` as a float if it is finite and >= 0. who: function or class in the error text.

    >>> non_negative("SGD", "lr", 0)
    0.0
    """
    number = _as_float(value)
    if not 0.0 <= number < math.inf:
        raise InputError(f"{who}: {name} must be a finite number >= 0, but is {value!r}; pass 0 or a positive number")
    return number


def positive(who: str, name: str, value: Any) -> float:
    """Return `value` as a float if it is > 0. Infinity is valid: as a limit it means no limit."""
    number = _as_float(value)
    if not number > 0.0:
        raise InputError(f"{who}: {name} must be a number > 0, but is {value!r}; pass a positive number")
    return number


def fraction(who: str, name: str, value: Any) -> float:
    """Return `value` as a float if 0 <= value < 1, as for the decay rate of a moving average."""
    number = _as_float(value)
    if not 0.0 <= number < 1.0:
        raise InputError(f"{who}: {name} must be in [0, 1), but is {value!r}; typical values are 0.9 and 0.999")
    return number


def integer(what: str, value: Any, least: int, remedy: str = "") -> int:
    """Return `value` as an int if it is an integer >= `least`; bools are refused.

    what: start of the error text. remedy: end of the error text.

    >>> integer("batches: epochs", 2, least=0)
    2
    """
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        end = f"; {remedy}" if remedy else ""
        raise InputError(f"{what} must be an integer >= {least}, but is {value!r}{end}")
    return number


def boolean(what: str, value: Any) -> bool:
    """Return `value` if it is True or False. what: start of the error text.

    >>> boolean("batches: drop_last", False)
    False
    """
    if not isinstance(value, bool):
        raise InputError(f"{what} must be True or False, but is {value!r}")
    return value


def _as_float(value: Any) -> float:
    """Return `value` as a float, or NaN, which every validator refuses, if it is not a number."""
    if isinstance(value, (bool, str, bytes)):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan
