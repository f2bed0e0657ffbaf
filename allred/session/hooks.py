"""Hooks: methods that a session calls on every rank before and after its steps. The base class, and common hooks."""

import dataclasses
import json
import math
import operator
import subprocess
import time
from collections.abc import Sequence
from typing import Any, Protocol

from allred import log
from allred.cluster import topology
from allred.errors import InputError, NonFiniteError
from allred.modes.optimizer import DistributedOptimizer
from allred.session.progress import Rates

_WARN_AFTER_STEPS = 20  # without the value that a hook needs


def check_integer(title: str, value: Any, least: int) -> int:
    """Return `value` as an int. Raises InputError, which begins with `title`, unless it is an integer >= `least`.

    >>> check_integer("Session: keep", 5, 1)
    5
    """
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise InputError(f"{title} must be an integer >= {least}, but is {value!r}")
    return number


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


class SessionView(Protocol):
    """The part of `allred.Session` that hooks use.

    step: the global step. params: the nest of parameters. rates: the throughput. watched: the nests given to `watch`.
    """

    step: int
    max_steps: int | None
    params: Any
    rates: Rates
    watched: dict[str, Any]

    @property
    def optimizer(self) -> DistributedOptimizer:
        """The optimizer given to `track`."""

    @property
    def is_chief(self) -> bool:
        """Whether this is rank 0."""

    @property
    def asked(self) -> str:
        """The reason why the loop is about to end, or ""."""

    def request_stop(self, reason: str = "stopped", everywhere: bool = False) -> None:
        """End the loop. everywhere: all ranks call this after the same step."""

    def save_by(self, saver: Any) -> None:
        """Write a checkpoint of the current state with this saver.Saver. Only on the chief, after a step."""


class Hook:
    """Base class of hooks. The methods do nothing. The state of a hook with `state_dict` and `load_state_dict` is part
    of the checkpoints.

    In mode sync `values` are averages over all ranks: a hook that decides by them decides the same on all ranks.

        class Best(allred.session.Hook):
            loss = float("inf")

            def after_step(self, session, values):
                self.loss = min(self.loss, values["loss"])
    """

    def begin(self, session: SessionView) -> None:
        """Called when training begins, after parameters and optimizer are restored or initialized."""

    def before_step(self, session: SessionView) -> None:
        """Called before each step."""

    def after_step(self, session: SessionView, values: dict[str, float]) -> None:
        """Called after each step. values: the values logged in it, by name."""

    def end(self, session: SessionView, outcome: Outcome) -> None:
        """Called at the end, after the last checkpoint. After a failure in `track`, `begin` has not been called."""


class StopAtStep(Hook):
    """Stops at the global step `last_step`, as Session(max_steps=...) does: hooks=[StopAtStep(10_000)].

    Raises InputError unless last_step is an integer >= 1."""

    def __init__(self, last_step: int) -> None:
        self.last_step = check_integer("StopAtStep: last_step", last_step, 1)

    def begin(self, session: SessionView) -> None:
        self.after_step(session, {})

    def after_step(self, session: SessionView, values: dict[str, float]) -> None:
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

    def after_step(self, session: SessionView, values: dict[str, float]) -> None:
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

    def begin(self, session: SessionView) -> None:
        self._stop_if_due(session)

    def after_step(self, session: SessionView, values: dict[str, float]) -> None:
        found = self._value.of(values)
        if found is None:
            return
        value = self._sign * found
        if value < self.best - self._delta:
            self.best, self.since = value, 0
        else:
            self.since += 1
        self._stop_if_due(session)

    def _stop_if_due(self, session: SessionView) -> None:
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

    def begin(self, session: SessionView) -> None:
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

    def end(self, session: SessionView, outcome: Outcome) -> None:
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
