"""Hooks under TensorFlow's names, and what its arguments need besides `allred.session`."""

from typing import TYPE_CHECKING

from allred.errors import InputError
from allred.session.hooks import Hook, Outcome, StopAtStep

if TYPE_CHECKING:
    from allred.session.session import Session


class StopAtStepHook(Hook):
    """End the training after `num_steps` more steps, or at the global step `last_step`: one of the two.

    Raises InputError for both, or none.
    """

    def __init__(self, num_steps: int | None = None, last_step: int | None = None) -> None:
        if (num_steps is None) == (last_step is None):
            raise InputError(f"StopAtStepHook(num_steps={num_steps!r}, last_step={last_step!r}): give one of the two")
        self._more = num_steps
        self._hook = StopAtStep(last_step if num_steps is None else num_steps)  # type: ignore[arg-type]

    def begin(self, session: "Session") -> None:
        if self._more is not None:
            self._hook = StopAtStep(session.step + self._more)
        self._hook.begin(session)

    def after_step(self, session: "Session", values: dict[str, float]) -> None:
        self._hook.after_step(session, values)


class OnChief(Hook):
    """A hook that only the chief calls, whose state is not in checkpoints."""

    def __init__(self, hook: Hook) -> None:
        self._hook = hook

    def begin(self, session: "Session") -> None:
        if session.is_chief:
            self._hook.begin(session)

    def before_step(self, session: "Session") -> None:
        if session.is_chief:
            self._hook.before_step(session)

    def after_step(self, session: "Session", values: dict[str, float]) -> None:
        if session.is_chief:
            self._hook.after_step(session, values)

    def end(self, session: "Session", outcome: Outcome) -> None:
        if session.is_chief:
            self._hook.end(session, outcome)
