"""A hook that writes checkpoints of its own, beside the session's."""

import math
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from allred import checkpoint
from allred.cluster import report
from allred.errors import InputError
from allred.session.checks import path
from allred.session.hooks import Hook, Named
from allred.session.saver import Saver

if TYPE_CHECKING:
    from allred.session.session import Session


def check_directories(hooks: Iterable[Hook], directory: str) -> None:
    """Raise InputError if two writers of checkpoints share a directory. directory: that of the session, or ""."""
    places = [hook.directory for hook in hooks if isinstance(hook, Checkpoint)]
    places = [os.path.realpath(place) for place in [*places, directory] if place]
    if twice := next((place for place in places if places.count(place) > 1), None):
        raise InputError(
            f"Session: two writers of checkpoints share the directory {twice}, and would delete each other's "
            "checkpoints; give each Checkpoint hook its own directory"
        )


class Checkpoint(Hook):
    """Checkpoints in a directory of their own, which any session restores: every so many steps, or of the best value.

    every_steps: steps between them. best: the name of what is logged, of which a better value than ever is kept; mode:
    "min" or "max" is better. One of the two. keep: how many stay. The chief writes them, as the session does.
    Raises InputError for what cannot be.
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
                f"Checkpoint(every_steps={every_steps!r}, best={best!r}, mode={mode!r}): give one of the first two; "
                "mode is 'min' or 'max'"
            )
        self._saver = Saver(
            path("Checkpoint: directory", directory), None, 1 if every_steps is None else every_steps, keep, 0
        )
        self.directory = self._saver.directory
        self._value = None if best is None else Named("Checkpoint", best)
        self._sign = 1 if mode == "min" else -1
        self.best = self._before = math.inf  # so far, and the one before, times the sign

    def begin(self, session: "Session") -> None:
        self._saver.begin(session.step)
        newest = checkpoint.newest(self._saver.directory) if session.is_chief else None
        if newest is not None and checkpoint.read_manifest(newest).step > session.step:
            report.say(
                f"Checkpoint: {newest} is of a later step than this training, which begins at step {session.step}; it "
                "is left alone, but whoever restores from there gets it"
            )

    def after_step(self, session: "Session", values: dict[str, float]) -> None:
        if self._value is None:
            due = self._saver.due(session.step)
        else:
            if self._saver.failed:
                self.best = self._before
            found = self._value.of(values)
            value = math.inf if found is None else self._sign * found
            if due := value < self.best:
                self._before, self.best = self.best, value
        if due and session.is_chief:
            session.save_by(self._saver)

    def state_dict(self) -> dict[str, Any]:
        """The best value so far."""
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what state_dict gave."""
        self.best = state["best"]

    def end(self, session: "Session", outcome: Any) -> None:
        self._saver.wait()
