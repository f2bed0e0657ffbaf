"""Hooks: methods that a session calls on every rank before and after its steps. The base class, and common hooks.

Hooks that log (lines for a person, files for TensorBoard) write on the chief only.
"""

import dataclasses
import json
import math
import subprocess
import time
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

from allred import log, nest
from allred.arrays import as_host_array
from allred.cluster import topology
from allred.errors import InputError, NonFiniteError
from allred.session.progress import Display, PlainDisplay, display
from allred.session.summary import SummaryWriter
from allred.validators import integer

_WARN_AFTER_STEPS = 20  # without the value that a hook needs


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a session ended.

    Attributes:
        reason: "max_steps", "end of data", "stopped", the name of a signal, or the name of an exception.
        failed: whether `reason` is the name of an exception.
        text: the message of the exception, or "".
        step: the global step.
        seconds: the duration of the session.
        checkpoint: the path of the newest complete checkpoint, or None.
    """

    reason: str
    failed: bool
    text: str
    step: int
    seconds: float
    checkpoint: str | None


class Hook:
    """Base class of hooks. The methods do nothing. The state of a hook with `state_dict` and `load_state_dict` is part
    of the checkpoints.

    Hooks use these attributes of the session: step, the global step; max_steps; params and optimizer, given to `track`;
    rates, the throughput; watched, the nests given to `watch`; is_chief, whether this is rank 0; asked, the reason why
    the loop is about to end, or "".

    In mode sync `values` are averages over all ranks: a hook that decides by them decides the same on all ranks.

        class Best(allred.session.Hook):
            loss = float("inf")

            def after_step(self, session, values):
                self.loss = min(self.loss, values["loss"])
    """

    def begin(self, session: Any) -> None:
        """Called when training begins, after parameters and optimizer are restored or initialized."""

    def before_step(self, session: Any) -> None:
        """Called before each step."""

    def after_step(self, session: Any, values: dict[str, float]) -> None:
        """Called after each step. values: the values logged in it, by name. In a loop inside of `allred.Join` that a
        rank leaves by `break`, the other ranks do not call it for this step: use no collective operations there."""

    def end(self, session: Any, outcome: Outcome) -> None:
        """Called at the end, after the last checkpoint. After a failure in `track`, `begin` has not been called."""


class StopAtStep(Hook):
    """Stops at the global step `last_step`, as Session(max_steps=...) does: hooks=[StopAtStep(10_000)].

    Raises InputError unless last_step is an integer >= 1."""

    def __init__(self, last_step: int) -> None:
        self.last_step = integer("StopAtStep: last_step", last_step, 1)

    def begin(self, session: Any) -> None:
        self.after_step(session, {})

    def after_step(self, session: Any, values: dict[str, float]) -> None:
        if session.step >= self.last_step:
            session.request_stop("max_steps", everywhere=True)


class LoggedValue:
    """A logged value with a name. Warns in the name of the hook `who` if the value is never logged."""

    def __init__(self, who: str, name: str) -> None:
        self.name, self._who = name, who
        self._seen, self._missed = False, 0

    def of(self, values: dict[str, float]) -> float | None:
        """Return the value of this step; None if it was not logged."""
        self._seen = self._seen or self.name in values
        self._missed += not self._seen
        if self._missed == _WARN_AFTER_STEPS and not self._seen:
            logged = ", ".join(values) or "nothing"
            log.warning(f"{self._who}: '{self.name}' was not logged in {_WARN_AFTER_STEPS} steps; logged: {logged}")
        return values.get(self.name)


class NanLoss(Hook):
    """Raises NonFiniteError if a logged value is NaN or infinite; with fail=False stops the loop instead.

    hooks=[NanLoss("loss", fail=False)]
    """

    def __init__(self, name: str = "loss", fail: bool = True) -> None:
        self._value, self._fail = LoggedValue("NanLoss", name), fail

    def after_step(self, session: Any, values: dict[str, float]) -> None:
        value = self._value.of(values)
        if value is None or math.isfinite(value):
            return
        if self._fail:
            raise NonFiniteError(
                f"session: {self._value.name} is {value} after step {session.step}; lower the learning rate, or look "
                "for the sample that causes it. NanLoss(fail=False) stops instead"
            )
        session.request_stop(f"{self._value.name} is {value}", everywhere=True)


class EarlyStopping(Hook):
    """Stops when a logged value has not improved for `patience` steps that logged it.

    min_delta: the smallest change that is an improvement. mode: "min" or "max". The best value and the number of steps
    since are part of the checkpoints. Raises InputError for other arguments.

        hooks=[EarlyStopping("loss", patience=100)]
    """

    def __init__(self, name: str = "loss", patience: int = 10, min_delta: float = 0.0, mode: str = "min") -> None:
        if mode not in ("min", "max") or patience < 1 or min_delta < 0:
            raise InputError(
                f"EarlyStopping(mode={mode!r}, patience={patience!r}, min_delta={min_delta!r}): expected mode 'min' or "
                "'max', patience >= 1, min_delta >= 0"
            )
        self._value, self._patience, self._delta = LoggedValue("EarlyStopping", name), patience, min_delta
        self._sign = 1 if mode == "min" else -1
        self.best, self.since = math.inf, 0  # the best value times the sign; steps since then

    def begin(self, session: Any) -> None:
        self._stop_if_due(session)

    def after_step(self, session: Any, values: dict[str, float]) -> None:
        found = self._value.of(values)
        if found is None:
            return
        value = self._sign * found
        if value < self.best - self._delta:
            self.best, self.since = value, 0
        else:
            self.since += 1
        self._stop_if_due(session)

    def _stop_if_due(self, session: Any) -> None:
        if self.since >= self._patience:
            session.request_stop(f"no better {self._value.name} for {self.since} steps", everywhere=True)

    def state_dict(self) -> dict[str, Any]:
        """Return the best value and the number of steps since."""
        return {"best": self.best, "since": self.since}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        self.best, self.since = state["best"], state["since"]


class GlobalStepWaiter(Hook):
    """Mode ps: delays this worker until the global step is `step`, and then pulls the parameters.

    A staggered start makes asynchronous training more stable: GlobalStepWaiter(100 * allred.rank()).
    poll_s: seconds between requests to the servers. still_s: the worker also begins if the global step has not changed
    for this many seconds: other workers have ended, or wait for this one, as policies other than async require.
    """

    def __init__(self, step: int, poll_s: float = 0.2, still_s: float = 60.0) -> None:
        self._step, self._poll_s, self._still_s = step, poll_s, still_s

    def begin(self, session: Any) -> None:
        if session.optimizer.session_support.is_lockstep:
            return
        step = min(self._step, session.max_steps or self._step)  # the other workers end at max_steps
        seen, since = session.optimizer.global_step, time.monotonic()
        while seen < step and not session.asked:
            if time.monotonic() > since + self._still_s:
                return log.rank_warning(
                    f"GlobalStepWaiter({self._step}): no update since step {seen} for {self._still_s:g} s, so worker "
                    f"{topology.rank()} begins"
                )
            time.sleep(self._poll_s)
            session.optimizer.pull(session.params)
            if session.optimizer.global_step > seen:
                seen, since = session.optimizer.global_step, time.monotonic()


class Notify(Hook):
    """Sends the outcome of training: runs a command, or calls a webhook, on the chief.

    command: a list of words; the outcome is its standard input, as JSON. url: receives the JSON in a POST request.
    only_failures: send nothing after training without an error. timeout_s: the time limit in seconds.

    After a failure of another rank the job ends about 2 s later: a command continues to run, a webhook is interrupted.
    Nothing is sent if the chief is killed, which the launcher may do when another rank dies. An error of the command or
    webhook is printed and has no other effect. Raises InputError unless one of command and url is given.

        hooks=[Notify(["mail", "-s", "training", "me@example.org"], only_failures=True)]
    """

    def __init__(
        self,
        command: Sequence[str] | None = None,
        url: str | None = None,
        only_failures: bool = False,
        timeout_s: float = 30.0,
    ) -> None:
        if (command is None) == (url is None):
            raise InputError(f"Notify(command={command!r}, url={url!r}): give one of the two")
        if isinstance(command, str):
            raise InputError(f"Notify(command={command!r}): expected a list of words, such as ['mail', '-s', 'done']")
        self._command, self._url, self._only_failures, self._timeout_s = command, url, only_failures, timeout_s

    def end(self, session: Any, outcome: Outcome) -> None:
        if not session.is_chief or (self._only_failures and not outcome.failed):
            return
        text = json.dumps(dataclasses.asdict(outcome)).encode()
        try:
            if self._command is not None:
                subprocess.run(  # in its own session, because this rank may be killed meanwhile
                    self._command, input=text, timeout=self._timeout_s, check=True, start_new_session=True
                )
            elif self._url is not None:
                import urllib.request  # a tenth of the time of `import allred`

                request = urllib.request.Request(self._url, text, {"Content-Type": "application/json"})
                urllib.request.urlopen(request, timeout=self._timeout_s).close()
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            log.warning(f"Notify could not send the outcome of training: {error}")


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
        self._every = integer(title, every_steps, 1)
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

    def begin(self, session: Any) -> None:
        self._schedule.begin(session.step)
        if session.is_chief:
            self._display = display(self._stream)

    def after_step(self, session: Any, values: dict[str, float]) -> None:
        due = self._schedule.due(session.step)
        if self._display is not None and (due or not isinstance(self._display, PlainDisplay)):
            self._display.show(session.step, session.max_steps, values, session.rates)

    def end(self, session: Any, outcome: Outcome) -> None:
        if self._display is not None:
            self._display.close()


class StepCounter(Hook):
    """Prints steps and examples per second every `every_steps` steps: hooks=[StepCounter(1000)].

    Raises InputError unless every_steps is an integer >= 1."""

    def __init__(self, every_steps: int = 100) -> None:
        self._schedule = _EveryNSteps("StepCounter: every_steps", every_steps)

    def after_step(self, session: Any, values: dict[str, float]) -> None:
        s_per_batch, examples = session.rates.s_per_batch, session.rates.examples_per_s
        if s_per_batch and self._schedule.due(session.step):
            rate = "" if examples is None else f", {examples:.1f} examples/sec"
            log.info(f"step {session.step}: {1 / s_per_batch:.2f} steps/sec{rate}")


class Summary(Hook):
    """Writes logged values and throughput as JSON lines, and as TensorBoard's event files where it is installed.

    Throughput is "time/examples_per_sec", of all ranks, and the parts of the chief's time, whose sum is 1:
    "time/computing", "time/waiting" (until other ranks arrived; mode ps: with the servers) and "time/communicating".

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
        title = "Summary: histogram_steps"
        self._histograms = None if histogram_steps is None else _EveryNSteps(title, histogram_steps)
        self._writer: SummaryWriter | None = None

    def begin(self, session: Any) -> None:
        self._next_at = time.monotonic() + (self._secs or 0.0)
        self._scalars.begin(session.step)
        if self._histograms is not None:
            self._histograms.begin(session.step)
        if session.is_chief:
            self._writer = SummaryWriter(self._directory, session.step)

    def after_step(self, session: Any, values: dict[str, float]) -> None:
        if self._writer is None:
            return
        step, now, rates = session.step, time.monotonic(), session.rates
        if self._scalars.due(step) if self._secs is None else now >= self._next_at:
            self._next_at = now + (self._secs or 0.0)
            times = {} if rates.shares is None else rates.shares._asdict()
            if rates.examples_per_s is not None:
                times["examples_per_sec"] = rates.examples_per_s
            self._writer.scalars(step, {**values, **{f"time/{name}": value for name, value in times.items()}})
        if self._histograms is not None and self._histograms.due(step):
            for title, tree in {"parameters": session.params, **session.watched}.items():
                for name, leaf in nest.leaves(tree):
                    if leaf is not None:
                        self._writer.histogram(step, f"{title}/{name}", as_host_array(leaf))

    def end(self, session: Any, outcome: Outcome) -> None:
        if self._writer is not None:
            self._writer.close()
