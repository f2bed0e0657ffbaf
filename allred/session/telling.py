"""Hooks that tell how training goes: lines for a person, numbers for TensorBoard. Only the chief's speak."""

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, TextIO

from allred import nest
from allred.arrays import as_host_array
from allred.cluster import report
from allred.errors import InputError
from allred.session.checks import whole
from allred.session.hooks import Hook, Outcome, StopAtStep
from allred.session.progress import Display, PlainDisplay, display
from allred.session.summary import SummaryWriter

if TYPE_CHECKING:
    from allred.session.session import Session


def with_own(hooks: Hook | Iterable[Hook] | None, log_steps: int | None, max_steps: int | None) -> list[Hook]:
    """A session's hooks: those that it was given, and those for its arguments log_steps and max_steps. Raises
    InputError for what is no hook."""
    found = [hooks] if isinstance(hooks, Hook) else [*(hooks or ())]
    if odd := [hook for hook in found if not isinstance(hook, Hook)]:
        raise InputError(f"Session: {odd[0]!r} is no hook; subclass allred.session.Hook")
    found += [] if log_steps is None else [Logging(log_steps)]
    return found + ([] if max_steps is None else [StopAtStep(max_steps)])


class Logging(Hook):
    """A progress line on a terminal; elsewhere a line every so many steps:

        step 20, loss = 37.97 (18758.3 examples/sec; 0.005 sec/batch)

    stream: default stderr. Raises InputError.
    """

    def __init__(self, every_steps: int = 100, stream: TextIO | None = None) -> None:
        self._steps, self._stream = whole("Logging: every_steps", every_steps, 1), stream
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
        self._steps, self._told = whole("StepCounter: every_steps", every_steps, 1), 0

    def after_step(self, session: "Session", values: dict[str, float]) -> None:
        pace = session.rates.s_per_batch
        if session.step // self._steps > self._told // self._steps and pace:
            self._told = session.step
            examples = session.rates.examples_per_s
            rate = "" if examples is None else f", {examples:.1f} examples/sec"
            report.inform(f"step {session.step}: {1 / pace:.2f} steps/sec{rate}")


class Summary(Hook):
    """What was logged, and the pace, into files that TensorBoard reads (where it is installed), and JSON lines.

    directory: of the files. every_steps: between scalars; or every_secs, seconds by the chief's clock.
    histogram_steps: between histograms of the parameters and of what `session.watch` was given; None: none.
    Raises InputError.
    """

    def __init__(
        self,
        directory: str,
        every_steps: int = 100,
        histogram_steps: int | None = None,
        every_secs: float | None = None,
    ) -> None:
        self._directory, self._steps = directory, whole("Summary: every_steps", every_steps, 1)
        if every_secs is not None and not every_secs > 0:
            raise InputError(f"Summary: every_secs must be a positive number of seconds, but is {every_secs!r}")
        self._secs, self._next_at = every_secs, 0.0
        self._histogram_steps = (
            None if histogram_steps is None else whole("Summary: histogram_steps", histogram_steps, 1)
        )
        self._writer: SummaryWriter | None = None
        self._before = 0

    def begin(self, session: "Session") -> None:
        self._before, self._next_at = session.step, time.monotonic() + (self._secs or 0.0)
        if session.is_chief:
            self._writer = SummaryWriter(self._directory, session.step)

    def after_step(self, session: "Session", values: dict[str, float]) -> None:
        before, step = self._before, session.step
        self._before = step
        if self._writer is None:
            return
        now = time.monotonic()
        due = step // self._steps > before // self._steps if self._secs is None else now >= self._next_at
        if due:
            self._next_at = now + (self._secs or 0.0)
            rates = session.rates
            pace = {"examples_per_sec": rates.examples_per_s, "communication_share": rates.communication_share}
            known = {name: value for name, value in pace.items() if value is not None}
            self._writer.scalars(step, {**values, **known})
        if self._histogram_steps and step // self._histogram_steps > before // self._histogram_steps:
            for title, tree in {"parameters": session.params, **session.watched}.items():
                for name, leaf in nest.leaves(tree):
                    if leaf is not None:
                        self._writer.histogram(step, f"{title}/{name}", as_host_array(leaf))

    def end(self, session: "Session", outcome: Outcome) -> None:
        if self._writer is not None:
            self._writer.close()
