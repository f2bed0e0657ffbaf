"""A mistake that shows only when a program ends."""

import pytest
from harness import mpirun

CODE = """
import numpy as np
import allred

allred.init()
sgd, params = allred.optim.SGD(lr=0.1), [np.ones(3)]
opt = allred.distributed(sgd)
opt.broadcast(params)
for _ in range(3):
    {name}.step(params, [np.full(3, float(allred.rank()))])
"""


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_a_wrapper_that_was_never_used_is_told_at_the_end(mpi):
    line = "a distributed SGD made no step, but the optimizer it wraps made 3 by itself: each rank trained alone"
    for name, told in (("sgd", 1), ("opt", 0)):
        result = mpirun(2, "-c", CODE.format(name=name), mpi=mpi)
        assert result.code == 0, result.text
        assert result.err.count(line) == told, result.text
