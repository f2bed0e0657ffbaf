"""Tools for tests of training programs: mpirun with a time limit and cleanup, faults at a rank and step, thread ranks.

    # train.py
    import numpy as np
    import allred
    from allred import testing

    allred.init(banner=False)
    fault = testing.fail_at(rank=1, step=3, error=OSError("disk full"))
    opt = allred.distributed(fault.into(allred.optim.SGD(lr=0.1)))
    params = [np.zeros(4)]
    for _ in range(5):
        opt.step(params, [np.ones(4)])

    # test_train.py
    from allred import testing

    def test_a_rank_that_fails_ends_the_job():
        result = testing.mpirun(2, "train.py", timeout_s=30)
        assert result.code == 1, result.text
        assert "OSError: disk full" in result.err, result.text
        assert result.left == [], result.text

Any test runner can run these tests; pytest is not required. `threads(2, function)` runs a function as 2 ranks of this
process, without mpirun. Importing this package does not start MPI.
"""

from allred.testing.faults import Fault, exit_at, fail_at, kill_at, slow, stop_at
from allred.testing.job_runner import Result, mpirun, run
from allred.testing.thread_ranks import threads

__all__ = ["Fault", "Result", "exit_at", "fail_at", "kill_at", "mpirun", "run", "slow", "stop_at", "threads"]
