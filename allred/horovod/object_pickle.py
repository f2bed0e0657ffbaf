"""Pickles of objects that ranks send to each other."""

import pickle
from typing import Any

from allred.errors import InputError


def dumps(value: Any) -> bytes:
    """Return the pickle of an object, by cloudpickle if it is installed. Raises InputError if there is none."""
    try:
        import cloudpickle as pickler
    except ModuleNotFoundError:
        pickler = pickle
    try:
        data: bytes = pickler.dumps(value)
    except Exception as error:  # of any class: objects say how they are pickled
        raise InputError(f"{type(value).__name__} cannot be pickled ({type(error).__name__}: {error})") from error
    return data
