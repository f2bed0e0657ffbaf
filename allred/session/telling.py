"""Hooks that tell how training goes: lines for a person, numbers for TensorBoard. Only the chief's speak."""

from typing import TYPE_CHECKING, Any, TextIO

from allred.cluster import report
from allred.errors import InputError
from allred.session.hooks import Hook, Outcome
from allred.session.progress import Display, PlainDisplay, display

if TYPE_CHECKING:
    from allred.session.session import Session


def _every(who: str, steps: Any) -> int:
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise InputError(f"{who}: every_steps must be an integer >= 1, but is {steps!r}")
    return steps


class Logging(Hook):
    """A progress line on a terminal; elsewhere a line every so many steps:

        step 20, loss = 37.97 (18758.3 examples/sec; 0.005 sec/batch)

    stream: default stderr. Raises InputError.
    """

    def __init__(self, every_steps: int = 100, stream: TextIO | None = None) -> None:
        self._steps, self._stream = _every("Logging", every_steps), stream
        self._display: Display | None = None
        self._shown = 0

    def begin(self, session: "Session") -> None:
        if session.is_chief:
            self._display, self._shown = display(self._stream), session.step

    def after_step(self, session: "Session", values: dict[str, float]) -> None:
        if self._display is None:
            return
        due = session.step // self._steps > self._shown // self._steps
        if due or not isinstance(self._display, PlainDisplay):
            self._display.show(session.step, session.max_steps, values, session.rates)
            self._shown = session.step

    def end(self, session: "Session", outcome: Outcome) -> None:
        if self._display is not None:
            self._display.close()


class StepCounter(Hook):
    """A line with steps and examples in a second, every so many steps. Raises InputError."""

    def __init__(self, every_steps: int = 100) -> None:
        self._steps, self._told = _every("StepCounter", every_steps), 0

    def after_step(self, session: "Session", values: dict[str, float]) -> None:
        pace = session.rates.s_per_batch
        if session.step // self._steps > self._told // self._steps and pace:
            self._told = session.step
            examples = session.rates.examples_per_s
            rate = "" if examples is None else f", {examples:.1f} examples/sec"
            report.inform(f"step {session.step}: {1 / pace:.2f} steps/sec{rate}")
