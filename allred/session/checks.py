"""Numbers, paths and optimizers that users give."""

import operator
import os
from typing import Any

from allred.errors import InputError
from allred.modes.optimizer import DistributedOptimizer


def whole(what: str, value: Any, least: int) -> int:
    """A whole number of any kind, as an int. Raises InputError, which begins with `what`.

    >>> whole("Session: keep", 5, 1)
    5
    """
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise InputError(f"{what} must be an integer >= {least}, but is {value!r}")
    return number


def path(what: str, value: Any) -> str:
    """A path of any kind, as text. Raises InputError, which begins with `what`.

    >>> path("Session: checkpoint_dir", "ckpt")
    'ckpt'
    """
    try:
        found = os.fspath(value)
    except TypeError:
        found = ""
    if not found or not isinstance(found, str):
        raise InputError(f"{what}={value!r} is no path")
    return found


def optimizer(what: str, value: Any) -> None:
    """Check an optimizer: from allred.distributed, without process set. Raises InputError, which begins with `what`."""
    if not isinstance(value, DistributedOptimizer):
        raise InputError(f"{what}: optimizer={value!r}: expected the result of allred.distributed(...)")
    if value.process_set is not None:
        raise InputError(
            f"{what}: a session trains on all ranks, but this optimizer has a process set; use optimizer.save and "
            "optimizer.restore instead of a session"
        )
