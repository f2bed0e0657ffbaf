"""`elastic.run`: calls a training function until it returns, each time with the state of the last commit.

error of an operation, after which the ranks can still communicate     all ranks restore the commit and call again
a rank has failed, died or does not answer                             the job ends; `allred run --restarts` starts
                                                                       it again
another number of ranks, or the end of the job, was requested          the program ends after a commit, code 0

RestartableJob connects it to `allred run`:

1  rank 0 reads the last commit of earlier starts
2  the session is reported to `allred run`, with the number of commits as its step: it stops sessions to resize the job,
   and ends a job that fails twice at the same commit number
3  commits are written on rank 0
4  signals and stop requests are noted, and all ranks agree on them at a commit

The newest commit is in a file. Rank 0 writes it; a process that is killed leaves the commit before intact. It is a
pickle: reading it can run any code, so the directory is created for its owner only.

Without a directory (ALLRED_ELASTIC_DIR, which `allred run` sets) commits are counted, and nothing else is done.
"""

import functools
import itertools
import os
import pathlib
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import torch

from allred import log, world
from allred.checkpoint.writing import sync_directory
from allred.cluster import topology
from allred.comm import functions
from allred.errors import AllredError, CheckpointError, MismatchError, RanksChanged
from allred.horovod import handles
from allred.horovod.horovod_errors import HorovodInternalError, HostsUpdatedInterrupt
from allred.session.coordination import StopSignals
from allred.torch.elastic.elastic_states import State
from allred.watch import wait
from allred.watch.runner_link import RESTART


class Commit(NamedTuple):
    """number: how many commits the training has made. ranks: the number of ranks that made it. state: any objects."""

    number: int
    ranks: int
    state: Any


def write_commit(path: pathlib.Path, commit: Commit) -> None:
    """Replace the file. Raises CheckpointError."""
    unfinished = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(unfinished, "wb") as file:
            torch.save(tuple(commit), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
        sync_directory(path.parent)
    except Exception as error:  # an object that cannot be pickled raises anything
        raise CheckpointError(
            f"commit {commit.number} cannot be written to {path}: {type(error).__name__}: {error}"
        ) from error


def read_commit(path: pathlib.Path) -> Commit | None:
    """Return the commit, with its tensors on the host; None without a file. Raises CheckpointError."""
    try:
        with open(path, "rb") as file:
            return Commit(*torch.load(file, map_location="cpu", weights_only=False))
    except FileNotFoundError:
        return None
    except Exception as error:  # unpickling runs code of the user
        raise CheckpointError(
            f"the commit in {path} cannot be read: {type(error).__name__}: {error}; delete the file to train from the "
            "beginning"
        ) from error


_calls = itertools.count(1)  # of `elastic.run` in this program: each has a file of its own


class RestartableJob:
    """Used in a with statement. commits: the number of commits of the training. stop_reason: why the program has to
    end; "" if it has not, the same on all ranks."""

    def __init__(self) -> None:
        directory, number = world.config().elastic_dir, next(_calls)
        self.file = None if directory == "none" else pathlib.Path(directory).absolute() / f"run-{number}.pt"
        self.commits, self.stop_reason = 0, ""
        self.write_error: CheckpointError | None = None  # of the newest commit
        self.signals = StopSignals()

    def load(self, load_state: Callable[[Any], None]) -> int:
        """Read the newest commit on rank 0, and pass its state to `load_state`. Collective. Returns the number of ranks
        that made the commit; 0 if there is none. Raises CheckpointError, on all ranks."""
        if self.file is None:
            return 0
        found: tuple[int, int] | str = self._load(load_state, self.file) if topology.rank() == 0 else ""
        found = functions.broadcast_object(found, name="elastic.run: commit")
        if isinstance(found, str):
            raise CheckpointError(found)
        self.commits, ranks = found
        if ranks:
            log.info(f"elastic: continues from commit {self.commits} in {self.file}")
        return ranks

    def _load(self, load_state: Callable[[Any], None], file: pathlib.Path) -> tuple[int, int] | str:
        """Return the number of commits and of ranks, or a problem."""
        try:
            commit = read_commit(file)
            if commit is None:
                return 0, 0
            load_state(commit.state)
        except CheckpointError as error:
            return str(error)
        except Exception as error:  # torch and objects of the user raise anything for a state that does not fit
            return f"the commit in {file} is not of this program's state: {type(error).__name__}: {error}"
        return commit.number, commit.ranks

    def __enter__(self) -> Self:
        if self.file is not None:
            self.signals.install()
            self._report(self.signals.stop)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.file is not None:
            self.signals.restore()
            self._report(None)

    def _report(self, on_stop: Callable[[str], None] | None) -> None:
        if (watcher := world.watcher()) is not None:
            watcher.report_session(self.commits, on_stop)

    def write(self, get_state: Callable[[], Any]) -> None:
        """Count a commit, and write it on rank 0. If that fails, a line says so, and training continues."""
        self.commits += 1
        if (recovery := world.current().recovery) is not None:
            recovery.commit_state()
        if self.file is None:
            return
        state = get_state()  # an error of the state's class is an error on all ranks
        if topology.rank() != 0:
            return
        commit = Commit(self.commits, topology.size(), state)
        self.write_error = None
        try:
            with wait.busy():
                write_commit(self.file, commit)
        except CheckpointError as error:
            self.write_error = error
            log.rank_warning(f"elastic: {error}; the commit is in memory only, training continues")

    def must_stop(self) -> bool:
        """Return whether a rank has received a signal or a stop request. Collective."""
        if self.file is not None and not self.stop_reason:
            reasons = functions.allgather_object(self.signals.reason, "commit() or check_host_updates()")
            self.stop_reason = next(filter(None, reasons), "")
        return bool(self.stop_reason)


# The training function.

R = TypeVar("R")


def run(func: Callable[..., R]) -> Callable[..., R]:
    """Decorator of a training function, whose first argument is a State. Call it on all ranks after hvd.init().

    Before each call all ranks get the same state: the newest commit, or rank 0's state if there is no commit. After a
    restart of the job with another number of ranks, all ranks then call the reset callbacks of the state.

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
        job, recovery = RestartableJob(), world.current().recovery
        if recovery is None:
            ranks = job.load(state.load_committed_state)
        else:
            ranks = 0
            recovery.begin_commits(_CommittedState(state, job), lambda: job.load(state.load_committed_state))
        with job:
            state.elastic_job = job
            try:
                return _call_until_it_returns(lambda: func(state, *args, **kwargs), state, job, ranks)
            finally:
                state.elastic_job = None

    return wrapper


class _CommittedState:
    """The committed state of a training, for membership/recovery.py."""

    name, interrupted, checks_operations = "hvd.elastic.run", False, False
    trains_in_rounds, defers_changes, steps_made = False, False, 0

    def __init__(self, state: State, job: RestartableJob) -> None:
        self._state, self._job = state, job

    @property
    def global_step(self) -> int:
        return self._job.commits

    def refusal(self) -> str:
        return ""

    def complete_round(self, params: Any, has_state: bool) -> None:
        """The ranks make no rounds."""

    def keep_settings(self) -> None:
        """There is nothing to keep: `restore` loads the settings of the commit."""

    def begin_world(self) -> None:
        """There is nothing to forget."""

    def copy_state(self, params: Any, root: int) -> None:
        """Copy the commit of rank `root` to rank 0, from which `sync` copies it to all. Collective."""
        commit = self._job.commits, self._state.committed_state() if root and topology.rank() == root else None
        self._job.commits, committed = functions.broadcast_object(commit, root, name="elastic.run: commit of a rank")
        if root and topology.rank() == 0:
            self._state.load_committed_state(committed)
        self._state.sync()


def _recover(state: State, failure: AllredError) -> None:
    """Return to the last commit, and form the next world, if the ranks of an elastic job change. Else raise."""
    recovery = world.current().recovery
    if recovery is None or not recovery.is_due:
        raise failure
    log.warning(f"elastic: returns to the last commit: {failure}")
    handles.forget_all()
    state.restore()
    recovery.form()


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
        except RanksChanged as error:
            _recover(state, error)
        except (HorovodInternalError, MismatchError) as error:
            if (recovery := world.current().recovery) is not None and recovery.is_due:
                _recover(state, error)
                state.on_reset()
                continue
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
