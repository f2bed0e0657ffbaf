"""A mistake that shows only when a program ends."""

import pytest
from harness import MPIS, mpirun

CODE = """
import numpy as np
import allred

allred.init()
sgd, params = allred.optim.SGD(lr=0.1), [np.ones(3)]
opt = allred.distributed(sgd)
opt.broadcast(params)
for _ in range(3):
    sgd.step(params, [np.full(3, float(allred.rank()))])

used, params = allred.distributed(allred.optim.SGD(lr=0.1)), [np.ones(3)]
for _ in range(3):
    used.step(params, [np.full(3, float(allred.rank()))])
"""


@pytest.mark.parametrize("mpi", MPIS)
def test_a_wrapper_that_was_never_used_is_reported_at_the_end_and_one_that_was_is_not(mpi):
    line = "a distributed SGD made no step, but the optimizer it wraps made 3 by itself: each rank trained alone"
    result = mpirun(2, "-c", CODE, mpi=mpi)
    assert result.code == 0, result.text
    assert result.err.count(line) == result.err.count("made no step") == 1, result.text
