"""Functions and values as they travel: a pickle, and the arrays in it from where they lie, without a copy.

Where cloudpickle is installed it makes the pickle: then functions of the program itself, lambdas and closures travel by
value. Without it a function travels as its name, and has to be importable at the other end.
"""

import pickle
from collections.abc import Sequence
from typing import Any

from allred.errors import InputError

REMEDY = (
    "define it in a module that both can import, or install cloudpickle for both (pip install 'allred[client]'), which "
    "sends functions by value"
)


def pack(value: Any, what: str) -> list[Any]:
    """The parts of a message. Raises InputError if `what`, in words, cannot be sent."""
    try:
        from cloudpickle import dumps
    except ModuleNotFoundError:
        dumps = pickle.dumps
    buffers: list[pickle.PickleBuffer] = []
    try:
        data = dumps(value, protocol=5, buffer_callback=buffers.append)
    except Exception as error:  # whatever a class of the user's raises
        more = f"; {REMEDY}" if dumps is pickle.dumps else ""
        raise InputError(f"{what} cannot be sent ({type(error).__name__}: {error}){more}") from None
    return [data, *(buffer.raw() for buffer in buffers)]


def unpack(parts: Sequence[Any]) -> Any:
    """The value. Raises whatever its classes raise."""
    return pickle.loads(parts[0], buffers=parts[1:])
