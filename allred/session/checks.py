"""Numbers and paths that users give."""

import operator
import os
from typing import Any

from allred.errors import InputError


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
