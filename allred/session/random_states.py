"""The states of random generators that a program shares with nobody: Python's `random` and numpy's global one."""

import random
from typing import Any

import numpy as np


def get() -> Any:
    """Of this process, to be pickled."""
    return random.getstate(), np.random.get_state()


def put(state: Any) -> None:
    """Go on from what `get` gave."""
    python, numpy = state
    random.setstate(python)
    np.random.set_state(numpy)
