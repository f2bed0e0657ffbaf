"""`elastic.run`: calls a training function until it returns, each time with the state of the last commit.

error of an operation, after which the ranks can still communicate     all ranks restore the commit and call again
a rank has failed, died or does not answer                             the job ends; `allred run --restarts` starts
                                                                       it again
another number of ranks, or the end of the job, was requested          the program ends after a commit, code 0
"""

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from allred import log, world
from allred.cluster import topology
from allred.comm import functions
from allred.errors import MismatchError
from allred.torch.elastic.elastic_states import State
from allred.torch.elastic.restartable_job import RestartableJob
from allred.torch.horovod import handles
from allred.torch.horovod.handles import HorovodInternalError, HostsUpdatedInterrupt
from allred.watch.records import RESTART

R = TypeVar("R")


def run(func: Callable[..., R]) -> Callable[..., R]:
    """Decorator of a training function, whose first argument is a State. Call it on all ranks after hvd.init().

    Before each call the state is synchronized: it is that of the newest commit, or at first that of rank 0. After a
    restart of the job with another number of ranks the reset callbacks of the state are called, on all ranks and after
    the synchronization.

    If the function raises HorovodInternalError and the ranks can still communicate, all ranks return to the last
    commit, call the reset callbacks, and call the function again. The error is raised if the function fails twice with
    the same text, or twice without a commit between.

    Under `allred run` commits are written to the directory ALLRED_ELASTIC_DIR, default NAME.commits of the working
    directory, which is deleted after the job was successful. Without `allred run` and without this variable they are in
    memory.

    Raises CheckpointError, on all ranks, if a commit cannot be read.

    Example: see `allred.torch.elastic`.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> R:
        job = RestartableJob()
        ranks = job.load(state.load_committed_state)
        with job:
            state.elastic_job = job
            try:
                return _call_until_it_returns(lambda: func(state, *args, **kwargs), state, job, ranks)
            finally:
                state.elastic_job = None

    return wrapper


def _call_until_it_returns(func: Callable[[], R], state: State, job: RestartableJob, ranks: int) -> R:
    """ranks: the number of ranks that made the restored commit; 0 without one."""
    is_resized, skip_sync, failure = ranks not in (0, topology.size()), False, ("", -1)
    while True:
        try:
            if not skip_sync:
                state.sync()
            if is_resized:
                is_resized = False
                state.on_reset()
            return func()
        except (HorovodInternalError, MismatchError) as error:
            previous, failure = failure, (str(error), job.commits)
            is_usable = world.error() is None and not functions.current().queue.poisoned
            if not is_usable or previous[0] == failure[0] or previous[1] == failure[1]:
                raise
            log.warning(f"elastic: all ranks return to the last commit: {error}")
            handles.forget_all()
            state.restore()
            skip_sync = False
        except HostsUpdatedInterrupt as interrupt:
            if job.stop_reason:
                _end_program(job)
            skip_sync = interrupt.skip_sync
        state.on_reset()


def _end_program(job: RestartableJob) -> None:
    """End the program after the last commit. Raises SystemExit; CheckpointError if the commit is not in the file."""
    if job.write_error is not None:
        raise job.write_error
    what = "the job starts again" if job.stop_reason == RESTART else "the job ends"
    log.info(f"elastic: {job.stop_reason}: commit {job.commits} is in {job.file}; {what}")
    sys.exit(0)
