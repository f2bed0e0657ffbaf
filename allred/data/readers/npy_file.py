"""numpy's .npy files, mapped into memory: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html"""

import os

import numpy as np

from allred.arrays import Array
from allred.errors import DataError


def npy(path: str | os.PathLike[str]) -> Array:
    """The array in a .npy file, read-only and not read yet: of the file only what is used is read, when it is used.

    Any shape, any dtype but object. Ranks of a node share the memory. A file that is made shorter while it is in use
    ends the process (SIGBUS).
    Raises OSError if the file cannot be opened, DataError if it is no .npy file, holds objects, or is too short.
    """
    name = os.fspath(path)
    try:
        array = np.lib.format.open_memmap(name, mode="r")
    except OSError:
        raise
    except Exception as error:  # ValueError as a rule; a damaged header is read as Python, and may be anything
        nbytes = os.path.getsize(name)
        raise DataError(f"{name}: expected an array in numpy's .npy format, got {nbytes} bytes: {error}") from None
    return array
