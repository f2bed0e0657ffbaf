"""A hook that writes checkpoints into a directory of its own, in addition to those of the session."""

import math
import os
from collections.abc import Iterable
from typing import Any

from allred import checkpoint
from allred.cluster import report
from allred.errors import InputError
from allred.session.hooks import Hook, LoggedValue, Outcome, SessionView
from allred.session.saver import Saver, check_path


def check_directories(hooks: Iterable[Hook], directory: str) -> None:
    """Raise InputError if two writers of checkpoints share a directory. directory: that of the session, or ""."""
    used = [hook.directory for hook in hooks if isinstance(hook, Checkpoint)]
    used = [os.path.realpath(path) for path in [*used, directory] if path]
    if shared := next((path for path in used if used.count(path) > 1), None):
        raise InputError(
            f"Session: two writers of checkpoints share the directory {shared}, and would delete each other's "
            "checkpoints; give each Checkpoint hook its own directory"
        )


class Checkpoint(Hook):
    """Writes checkpoints into its own directory: every `every_steps` steps, or when a logged value is the best so far.

    every_steps: steps between checkpoints. best: the name of the logged value; mode: "min" or "max" is better. Give
    every_steps or best. keep: the number of checkpoints to keep. The chief writes. Any session can restore them.
    Raises InputError.

        hooks=[Checkpoint("best", best="accuracy", mode="max")]
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        every_steps: int | None = None,
        best: str | None = None,
        mode: str = "min",
        keep: int = 1,
    ) -> None:
        if (every_steps is None) == (best is None) or mode not in ("min", "max"):
            raise InputError(
                f"Checkpoint(every_steps={every_steps!r}, best={best!r}, mode={mode!r}): give every_steps or best; "
                "mode is 'min' or 'max'"
            )
        self.directory = check_path("Checkpoint: directory", directory)
        self._saver = Saver(self.directory, None, 1 if every_steps is None else every_steps, keep, 0)
        self._value = None if best is None else LoggedValue("Checkpoint", best)
        self._sign = 1 if mode == "min" else -1
        self.best = self._previous_best = math.inf  # times the sign

    def begin(self, session: SessionView) -> None:
        self._saver.begin(session.step)
        newest = checkpoint.newest(self.directory) if session.is_chief else None
        if newest is not None and checkpoint.read_manifest(newest).step > session.step:
            report.say(
                f"Checkpoint: {newest} is of a later step than this training, which begins at step {session.step}; it "
                "is not deleted, and a restore from this directory uses it"
            )

    def after_step(self, session: SessionView, values: dict[str, float]) -> None:
        if self._value is None:
            due = self._saver.due(session.step)
        else:
            if self._saver.failed:
                self.best = self._previous_best
            found = self._value.of(values)
            value = math.inf if found is None else self._sign * found
            if due := value < self.best:
                self._previous_best, self.best = self.best, value
        if due and session.is_chief:
            session.save_by(self._saver)

    def state_dict(self) -> dict[str, Any]:
        """Return the best value so far."""
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        self.best = state["best"]

    def end(self, session: SessionView, outcome: Outcome) -> None:
        self._saver.wait()
