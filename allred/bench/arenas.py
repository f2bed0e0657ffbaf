"""`--arena on,off`: the same calls with and without reductions in place, interleaved in the same processes.

on    arrays of `allred.empty`, from 16 KiB, and the communicator of `allred.init`
off   arrays of numpy, and a communicator of the same ranks that has no arenas, as with ALLRED_ARENA=0
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

import allred
from allred import arena, arrays, world
from allred.arrays import Array
from allred.bench import baselines
from allred.bench.measure import Call
from allred.bench.verify import Shape
from allred.comm import functions
from allred.comm.communicator import Communicator
from allred.comm.process_set import dedicated
from allred.errors import ConfigError

CHOICES = ("on", "off")
Calls = dict[str, tuple[Call, list[Array]]]  # by name: a call, and the arrays that it reduces


def parse(text: str) -> list[str]:
    """Return the words of the argument. Raises ValueError.

    >>> parse("on,off")
    ['on', 'off']
    """
    words = text.split(",")
    if not set(words) <= set(CHOICES) or len(set(words)) < len(words):
        raise ValueError(f"--arena: expected on, off, or on,off; got {text!r}")
    return words


def communicators(names: Sequence[str]) -> dict[str, Communicator]:
    """Return a communicator of all ranks for each name, in order. Collective. Raises ConfigError without arenas."""
    if reason := arena.refusal():
        raise ConfigError(f"--arena: this job has no arenas: {reason}")
    return {name: functions.current() if name == "on" else _without_arenas() for name in names}


def _without_arenas() -> Communicator:
    size = functions.current().size
    arena.disable("--arena off")
    try:
        return dedicated(range(size), "the benchmark without arenas")
    finally:
        arena.enable(world.config().arena, size)


def allocate(name: str, shapes: Sequence[Shape], dtype: np.dtype[Any]) -> list[Array]:
    """Return arrays of zeros for the communicator of this name."""
    return baselines.allocate(shapes, dtype, empty if name == "on" else np.empty)


def empty(shape: Shape, dtype: np.dtype[Any]) -> Array:
    """Return an array in the arena if it is large enough to be reduced in place, as gradients of numpy are."""
    large = arrays.size_of(shape) * dtype.itemsize >= arena.MIN_BYTES
    return (allred.empty if large else np.empty)(shape, dtype)


def variant(name: str, names: Sequence[str]) -> str:
    """Return the name of a variant in the results: the first one is `allred`."""
    return "allred" if name == names[0] else f"arena {name}"


def calls(found: dict[str, Communicator], shapes: Sequence[Shape], dtype: np.dtype[Any], single: bool) -> Calls:
    """Return an allreduce of each communicator, of one array or of all arrays in one call, by `variant`."""
    made: Calls = {}
    for name, communicator in found.items():
        group = allocate(name, shapes, dtype)
        call: Call = functools.partial(communicator.grouped_allreduce_blocking, group, True, allred.Sum, "")
        if single:
            call = functools.partial(communicator.allreduce_blocking, group[0], True, allred.Sum, "")
        made[variant(name, list(found))] = call, group
    return made
