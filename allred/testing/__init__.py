"""Tools for tests of training programs: mpirun with a time limit and cleanup, faults at a rank and step, thread ranks.

docs/testing.md has an example. Any test runner can run these tests; pytest is not required. `threads(2, function)` runs
a function as 2 ranks of this process, without mpirun. Importing this package does not start MPI.
"""

from allred.testing.faults import Fault, exit_at, fail_at, kill_at, slow, stop_at
from allred.testing.job_runner import Result, mpirun, run
from allred.testing.thread_ranks import threads

__all__ = ["Fault", "Result", "exit_at", "fail_at", "kill_at", "mpirun", "run", "slow", "stop_at", "threads"]
