"""The end of a session: its final checkpoint, and its outcome.

1  Without an error: all ranks are at the end of the same step (mode ps: of their own). The chief writes, and all ranks
   receive the result.
2  After an exception: the rank that raised it writes. In mode sync its parameters equal those of all ranks, unless an
   update was interrupted. If the failure comes after the update and before all hooks have run, nothing is written: a
   resumed training would lack the calls of the hooks. If several ranks fail at once, one of them writes, and the others
   wait for it.
3  Ranks that wait for the writing rank, in a collective or because they have failed too, wait without a time limit; so
   does the end of the job (allred.watch.wait.busy). The same holds for a periodic checkpoint that is being written.
4  In allred.join(): the rank that joined last writes, if it has made updates that the chief lacks, with its position in
   the data. Then the chief gets these updates.
"""

import contextlib
import os
import time
from collections.abc import Iterable
from typing import Any

from allred import checkpoint, log
from allred.cluster import topology
from allred.comm import functions
from allred.errors import (
    AllredError,
    CheckpointError,
    CollectiveTimeout,
    DriftError,
    InputError,
    RemoteRankError,
)
from allred.modes.optimizer import DistributedOptimizer
from allred.session.coordination import extended_timeout, raise_on_all
from allred.session.hooks import Hook, Outcome
from allred.session.saver import Capture, Saver
from allred.watch import wait

END_OF_DATA = "end of data"

# Errors that another rank caused, or after which ranks differ: this rank writes no checkpoint.
_NOT_SAVED = (RemoteRankError, CollectiveTimeout, DriftError, GeneratorExit)
_WAIT_FOR_WRITER_S = 600.0
_FIRST_POLL_S, _LAST_POLL_S = 0.05, 1.0


def directory_error(saver: Saver) -> AllredError | None:
    """Return the error of a directory that cannot be written, before training begins; else None."""
    try:
        if saver.directory:
            checkpoint.abandon(checkpoint.begin(saver.directory, 0))
    except CheckpointError as error:
        return CheckpointError(f"Session: no checkpoint can be written to {saver.directory}: {error}")
    return None


def write(saver: Saver, optimizer: DistributedOptimizer, step: int, capture: Capture) -> str | None:
    """Write the final checkpoint on the chief after training without an error. Collective. Returns the path on the
    chief; None on other ranks, without a directory, and if this training has saved this step. Raises CheckpointError on
    all ranks."""
    path: str | None = None
    failure: AllredError | None = None
    if saver.directory and topology.rank() == 0:
        try:
            with wait.busy():
                if not checkpoint.has(saver.directory, step, optimizer.training_id):
                    path = saver.save_final(step, capture)
        except (CheckpointError, InputError) as error:
            newest = _newest(saver.directory)
            there = f"the newest one is {newest}" if newest else "there is none"
            failure = CheckpointError(f"the last checkpoint was not written: {error}; {there}")
    raise_on_all(optimizer, failure)
    return path


def _newest(directory: str) -> str | None:
    with contextlib.suppress(CheckpointError):
        return str(checkpoint.newest(directory) or "") or None
    return None


def write_after_join(saver: Saver, optimizer: DistributedOptimizer, writer: int, capture: Capture) -> int:
    """Write a checkpoint after all ranks have joined and before `join` copies parameters, if rank `writer`, which
    joined last, has made updates that the chief lacks. Collective. Returns the global step of rank `writer`. If the
    checkpoint cannot be written, the chief prints a warning and training continues."""
    steps = functions.allgather_object(optimizer.global_step)
    step = int(steps[writer])
    if not saver.directory or step == steps[0]:
        return step
    path, failure = None, ""
    if topology.rank() == writer:
        try:
            path = saver.save_final(step, capture)
        except (CheckpointError, InputError) as error:
            failure = str(error)
    with extended_timeout():
        path, failure = functions.broadcast_object((path, failure), writer)
    if failure:
        log.warning(
            f"rank {writer}, which joined last, could not write the checkpoint of step {step}: {failure}. The next "
            "one, which rank 0 writes, has the updates too"
        )
        return step
    saver.begin(step)
    log.info(f"checkpoint {path}, written by rank {writer}, which joined last")
    return step


def write_after_error(
    error: BaseException,
    is_unfinished: bool,
    saver: Saver,
    optimizer: DistributedOptimizer,
    token: str,
    capture: Capture,
) -> str | None:
    """Write the final checkpoint on the rank that raised `error`, if its parameters are those of a complete step.

    is_unfinished: whether the current step has updated the parameters, or its end has begun, and not all hooks have
    run. token: identifies the session, equal on all ranks. Returns the path if this rank has written it, else
    None.
    """
    with wait.busy():
        saver.wait()  # the checkpoint that is being written may be the newest
        if isinstance(error, _NOT_SAVED):
            return None
        reason = "the current step failed after its update, or in a hook" if is_unfinished else ""
        if not optimizer.session_support.can_save:
            interrupted = optimizer.session_support.update_interrupted
            reason = "an update was interrupted" if interrupted else "the ranks were between two rounds"
        if reason:
            _report_no_checkpoint(f"{reason}; the newest checkpoint is of an earlier step")
            return None
        try:
            step = optimizer.session_support.latest_step()
            return _write_once(saver, step, optimizer.training_id, token, capture)
        except AllredError as failure:
            _report_no_checkpoint(str(failure))
    return None


def _write_once(saver: Saver, step: int, training: str, token: str, capture: Capture) -> str | None:
    """Write the checkpoint of `step`, or wait for the rank that writes it. Raises AllredError. training: identifier of
    this training. A checkpoint of the same step that another training wrote is replaced, for example a damaged one."""
    if checkpoint.has(saver.directory, step, training):
        return None
    claim = os.path.join(saver.directory, f".step-{step:08d}.{token}.0.tmp")
    if _claim(claim):
        try:
            path = saver.save_final(step, capture)
            if path is None:
                _report_no_checkpoint(f"no update has been made since step {step}, where training began")
            else:
                log.rank_warning(f"the last checkpoint is {path}")
            return path
        finally:
            with contextlib.suppress(OSError):  # without a checkpoint the other ranks must not wait
                os.rmdir(claim)
    deadline, poll_s = time.monotonic() + _WAIT_FOR_WRITER_S, _FIRST_POLL_S
    while os.path.exists(claim) and not checkpoint.has(saver.directory, step, training) and time.monotonic() < deadline:
        time.sleep(poll_s)  # if the writing rank is killed, the job ends
        poll_s = min(2 * poll_s, _LAST_POLL_S)  # thousands of ranks may poll the same file system
    return None


def _claim(claim: str) -> bool:
    """Return whether this rank writes: it is the first to create the directory `claim`. The directory is named like an
    unfinished checkpoint, so that commits delete it only when it is old."""
    try:
        os.makedirs(os.path.dirname(claim), exist_ok=True)
        os.mkdir(claim)
    except FileExistsError:
        return False
    except OSError:  # writing the checkpoint gives a better error
        pass
    return True


def _report_no_checkpoint(reason: str) -> None:
    log.rank_warning(f"no checkpoint was written at the end: {reason}")


def outcome(
    failure: BaseException | None, stop_reason: str, step: int, seconds: float, saver: Saver, path: str | None
) -> Outcome:
    """Return the outcome, and print the summary of the checkpoints.

    stop_reason: why the loop ended without a failure. path: the final checkpoint, if this rank wrote it.
    """
    if saver.count or saver.failures:
        log.info(saver.summary())
    if saver.directory and path is None:
        path = _newest(saver.directory)
    if failure is None:
        return Outcome(stop_reason or "stopped", False, "", step, seconds, path)
    reason = "SystemExit" if isinstance(failure, SystemExit) else type(failure).__name__
    return Outcome(reason, True, str(failure), step, seconds, path)


def report_outcome(outcome: Outcome, max_steps: int | None, batches: int, updated: bool) -> None:
    """Print the outcome of a session that ended without an error.

    batches: the number of batches. updated: whether the session made an update.
    """
    of = f" of {max_steps}" if max_steps else ""
    newest = f"; the newest checkpoint is {outcome.checkpoint}" if outcome.checkpoint else ""
    log.info(f"training ends at step {outcome.step}{of}: {outcome.reason}{newest}")
    if not updated and outcome.reason == END_OF_DATA:
        no_update = f"{batches} batches, but no update; call opt.step(...) for each batch"
        log.warning(f"session: {no_update if batches else 'the data has no batch'}")


def call_end(hooks: Iterable[Hook], session: Any, outcome: Outcome) -> None:
    """Call `end` of all hooks. Raises the first error of a hook, but not after a failure of the session."""
    first: Exception | None = None
    for hook in hooks:
        try:
            hook.end(session, outcome)
        except Exception as error:
            first = first or error
    if first is not None and not outcome.failed:
        raise first
