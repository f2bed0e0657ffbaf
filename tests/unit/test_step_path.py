"""The path of a steady step: the Python files it visits, and its exchanges between the ranks."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from call_path import files_of, path_of

import allred
from allred import testing
from allred.comm.header import KINDS

FILES = 12
STEADY = 10  # steps before those that are looked at; the first three have checks
REPEATS = 500  # at most: if a rank waits for another for a millisecond, the path is longer
FORMS: dict[str, Callable[[int], Any]] = {
    "one bare array": lambda rank: np.full(64, rank + 1, np.float32),
    "a 0-d array": lambda rank: np.full((), rank + 1, np.float64),
    "a list with an empty array": lambda rank: [np.full((3, 2), rank + 1, np.float32), np.zeros(0, np.float32)],
    "a nest of two dtypes": lambda rank: {"a": [np.full(5, rank + 1.0)], "b": (np.full(7, rank, np.float32),)},
    "many": lambda rank: [np.full(256, rank + 1, np.float32) for _ in range(161)],
}


def operations() -> int:
    return allred.world.current().communicator.operations


def steady_step(make: Callable[[int], Any], samples: Callable[[int], int | None]) -> tuple[list[str], int]:
    """Return the calls of a steady step, the shortest of several, and the number of operations in it. Several: until
    the ranks have not waited for each other."""
    rank = allred.rank()
    params, opt = make(0), allred.distributed(allred.optim.SGD(0.01))
    opt.broadcast(params)
    for _ in range(STEADY):
        opt.step(params, make(rank), samples(rank))
    grads, shortest = make(rank), ([""] * 10**6, 0)
    for _ in range(REPEATS):
        before = operations()
        calls = path_of(lambda: opt.step(params, grads, samples(rank)))
        shortest = min(shortest, (calls, operations() - before), key=lambda path: len(path[0]))
        if allred.allreduce(np.array(len(files_of(shortest[0])) <= FILES), op=allred.Min):
            break
    return shortest


SAMPLES: dict[str, Callable[[int], int | None]] = {
    "no samples": lambda rank: None,
    "equal batches": lambda rank: 32,
    "other batches on each rank": lambda rank: 10 + rank,
}


@pytest.mark.parametrize("samples", SAMPLES)
@pytest.mark.parametrize("form", FORMS)
def test_a_steady_step_has_a_short_path_and_one_exchange(form, samples):
    for calls, exchanges in testing.threads(2, steady_step, FORMS[form], SAMPLES[samples]):
        assert exchanges == 1, "\n".join(calls)
        assert len(files_of(calls)) <= FILES, "\n".join([f"{sorted(files_of(calls))}", *calls])


def test_the_kind_of_a_step_is_that_of_c():
    assert KINDS.index("step_allreduce") == 13  # ALLRED_KIND_STEP_ALLREDUCE in csrc/header.h
