"""The end of a session: its outcome, its last lines on stderr, and the call of `end` of its hooks."""

import contextlib
from typing import TYPE_CHECKING

from allred import checkpoint
from allred.cluster import report
from allred.errors import CheckpointError
from allred.session.hooks import Outcome
from allred.session.saver import Saver

if TYPE_CHECKING:
    from allred.session.session import Session

END_OF_DATA = "end of data"


def outcome(
    failure: BaseException | None, asked: str, step: int, seconds: float, saver: Saver, path: str | None
) -> Outcome:
    """Return the outcome, and print the statistics of the checkpoints.

    asked: why the loop ended, if nothing failed. path: the last checkpoint, if this rank wrote it.
    """
    if saver.count or saver.failures:
        report.inform(saver.text())
    if saver.directory and path is None:
        with contextlib.suppress(CheckpointError):
            path = str(checkpoint.newest(saver.directory) or "") or None
    if failure is None:
        return Outcome(asked or "stopped", False, "", step, seconds, path)
    reason = "SystemExit" if isinstance(failure, SystemExit) else type(failure).__name__
    return Outcome(reason, True, str(failure), step, seconds, path)


def tell(outcome: Outcome, max_steps: int | None, batches: int, updated: bool) -> None:
    """Print the outcome of a session that ended without an error.

    batches: the number of batches. updated: whether the session made an update.
    """
    of = f" of {max_steps}" if max_steps else ""
    kept = f"; the newest checkpoint is {outcome.checkpoint}" if outcome.checkpoint else ""
    report.inform(f"training ends at step {outcome.step}{of}: {outcome.reason}{kept}")
    if not updated and outcome.reason == END_OF_DATA:
        began = f"{batches} batches, but no update; call opt.step(...) for each batch"
        report.say(f"session: {began if batches else 'the data gave no batch'}")


def call_hooks(session: "Session", outcome: Outcome) -> None:
    """Call `end` of all hooks. Raises the first error of a hook, except after a failure of the session."""
    problem: Exception | None = None
    for hook in session.hooks:
        try:
            hook.end(session, outcome)
        except Exception as error:
            problem = problem or error
    if problem is not None and not outcome.failed:
        raise problem
