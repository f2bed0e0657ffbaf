"""Hooks that log: lines for a person, files for TensorBoard. They write on the chief only."""

import time
from collections.abc import Iterable
from typing import TextIO

from allred import log, nest
from allred.arrays import as_host_array
from allred.errors import InputError
from allred.session.hooks import Hook, Outcome, SessionView, StopAtStep, check_integer
from allred.session.progress import Display, PlainDisplay, display
from allred.session.summary import SummaryWriter


def all_hooks(hooks: Hook | Iterable[Hook] | None, log_steps: int | None, max_steps: int | None) -> list[Hook]:
    """Return the given hooks of a session, and those for its arguments log_steps and max_steps. Raises InputError for
    objects that are not hooks."""
    given = [hooks] if isinstance(hooks, Hook) else [*(hooks or ())]
    if wrong := [hook for hook in given if not isinstance(hook, Hook)]:
        raise InputError(f"Session: {wrong[0]!r} is not a hook; subclass allred.session.Hook")
    given += [] if log_steps is None else [Logging(log_steps)]
    return given + ([] if max_steps is None else [StopAtStep(max_steps)])


class _EveryNSteps:
    """Decides at which steps to log: the first step at or after each multiple of `every_steps`."""

    def __init__(self, title: str, every_steps: int) -> None:
        self._every = check_integer(title, every_steps, 1)
        self._last = 0

    def begin(self, step: int) -> None:
        self._last = step

    def due(self, step: int) -> bool:
        before, self._last = self._last, step
        return step // self._every > before // self._every


class Logging(Hook):
    """Shows a progress line on a terminal; elsewhere prints a line every `every_steps` steps:

        step 20, loss = 37.97 (18758.3 examples/sec; 0.005 sec/batch)

    stream: default stderr. Raises InputError unless every_steps is an integer >= 1.
    """

    def __init__(self, every_steps: int = 100, stream: TextIO | None = None) -> None:
        self._schedule, self._stream = _EveryNSteps("Logging: every_steps", every_steps), stream
        self._display: Display | None = None

    def begin(self, session: SessionView) -> None:
        self._schedule.begin(session.step)
        if session.is_chief:
            self._display = display(self._stream)

    def after_step(self, session: SessionView, values: dict[str, float]) -> None:
        due = self._schedule.due(session.step)
        if self._display is not None and (due or not isinstance(self._display, PlainDisplay)):
            self._display.show(session.step, session.max_steps, values, session.rates)

    def end(self, session: SessionView, outcome: Outcome) -> None:
        if self._display is not None:
            self._display.close()


class StepCounter(Hook):
    """Prints steps and examples per second every `every_steps` steps: hooks=[StepCounter(1000)].

    Raises InputError unless every_steps is an integer >= 1."""

    def __init__(self, every_steps: int = 100) -> None:
        self._schedule = _EveryNSteps("StepCounter: every_steps", every_steps)

    def after_step(self, session: SessionView, values: dict[str, float]) -> None:
        s_per_batch, examples = session.rates.s_per_batch, session.rates.examples_per_s
        if s_per_batch and self._schedule.due(session.step):
            rate = "" if examples is None else f", {examples:.1f} examples/sec"
            log.info(f"step {session.step}: {1 / s_per_batch:.2f} steps/sec{rate}")


class Summary(Hook):
    """Writes logged values and throughput as JSON lines, and as TensorBoard's event files where it is installed.

    directory: the directory of the files. every_steps: steps between scalars; or every_secs, seconds by the chief's
    clock. histogram_steps: steps between histograms of the parameters and of the nests given to `session.watch`; None:
    no histograms. Raises InputError for numbers < 1 and a directory that cannot be written.

        hooks=[Summary("logs", every_steps=10, histogram_steps=1000)]
    """

    def __init__(
        self,
        directory: str,
        every_steps: int = 100,
        histogram_steps: int | None = None,
        every_secs: float | None = None,
    ) -> None:
        self._directory, self._scalars = directory, _EveryNSteps("Summary: every_steps", every_steps)
        if every_secs is not None and not every_secs > 0:
            raise InputError(f"Summary: every_secs must be a positive number of seconds, but is {every_secs!r}")
        self._secs, self._next_at = every_secs, 0.0
        self._histograms = (
            None if histogram_steps is None else _EveryNSteps("Summary: histogram_steps", histogram_steps)
        )
        self._writer: SummaryWriter | None = None

    def begin(self, session: SessionView) -> None:
        self._next_at = time.monotonic() + (self._secs or 0.0)
        self._scalars.begin(session.step)
        if self._histograms is not None:
            self._histograms.begin(session.step)
        if session.is_chief:
            self._writer = SummaryWriter(self._directory, session.step)

    def after_step(self, session: SessionView, values: dict[str, float]) -> None:
        if self._writer is None:
            return
        step, now, rates = session.step, time.monotonic(), session.rates
        if self._scalars.due(step) if self._secs is None else now >= self._next_at:
            self._next_at = now + (self._secs or 0.0)
            throughput = {"examples_per_sec": rates.examples_per_s, "communication_share": rates.communication_share}
            known = {name: value for name, value in throughput.items() if value is not None}
            self._writer.scalars(step, {**values, **known})
        if self._histograms is not None and self._histograms.due(step):
            for title, tree in {"parameters": session.params, **session.watched}.items():
                for name, leaf in nest.leaves(tree):
                    if leaf is not None:
                        self._writer.histogram(step, f"{title}/{name}", as_host_array(leaf))

    def end(self, session: SessionView, outcome: Outcome) -> None:
        if self._writer is not None:
            self._writer.close()
