"""`opt.summary()` says why gradients were not reduced in place."""

import numpy as np
import pytest

import allred
from allred import arena, optim

pytestmark = pytest.mark.mpi

LARGE = 30_011  # elements; not a size of other tests, whose arrays the arena would serve from then on


def foreign():
    return np.frombuffer(bytearray(4 * LARGE), "f4")


def test_summary_names_the_reasons(rank, size):
    if size == 1:
        pytest.skip("one rank reduces nothing")
    last = size - 1
    params = {name: np.zeros(LARGE, "f4") for name in ("shared", "foreign", "mixed")} | {"small": np.zeros(10, "f4")}
    grads = {"shared": allred.empty(LARGE, "f4"), "foreign": foreign(), "small": np.zeros(10, "f4")}
    grads["mixed"] = foreign() if rank == last else allred.empty(LARGE, "f4")
    for grad in grads.values():
        grad[:] = 1
    opt = allred.distributed(optim.SGD())
    opt.step(params, grads)
    found = [line for line in opt.summary().splitlines() if line.startswith("not in place")]
    if arena.refusal():
        assert found == [f"not in place: {arena.refusal()}"]
        return
    not_numpy = "memory that numpy did not allocate (torch without ALLRED_TORCH_ARENA=1, np.frombuffer, unpickled)"
    expected = ["1 tensor, 40 B: smaller than 16384 bytes"]
    if rank == last:
        expected += [f"2 tensors, 240.09 kB: {not_numpy}"]
    else:
        expected += [f"1 tensor, 120.04 kB: {not_numpy}", f"1 tensor, 120.04 kB: not in the arena of rank {last}"]
    assert sorted(found) == sorted(f"not in place, step 1: {text}" for text in expected)
    for _ in range(2):  # only steps 1, 2, 4, ... are examined
        opt.step(params, {name: grads[name] for name in params})
    assert opt.summary().count("not in place, step 2: ") == len(expected)
