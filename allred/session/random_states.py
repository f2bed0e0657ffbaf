"""The states of random generators that a program shares with nobody: Python's `random` and numpy's global one."""

import random
from typing import Any

import numpy as np

from allred.cluster import topology
from allred.comm import functions


def get() -> Any:
    """Of this process, to be pickled."""
    return random.getstate(), np.random.get_state()


def gather(why: str = "") -> dict[int, Any]:
    """Of all ranks, by rank; collective. why: for the error of a rank that calls something else."""
    return dict(functions.allgather_object((topology.rank(), get()), why))


def put(state: Any) -> None:
    """Go on from what `get` gave."""
    python, numpy = state
    random.setstate(python)
    np.random.set_state(numpy)
