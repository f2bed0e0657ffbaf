"""Tools for tests of training programs: mpirun with a time limit and cleanup, and faults at a chosen rank and step.

docs/testing.md has an example. Any test runner can run these tests; pytest is not required. Importing this package does
not start MPI.
"""

from allred.testing.faults import Fault, exit_at, fail_at, kill_at, slow, stop_at
from allred.testing.job_runner import Result, mpirun, run

__all__ = ["Fault", "Result", "exit_at", "fail_at", "kill_at", "mpirun", "run", "slow", "stop_at"]
