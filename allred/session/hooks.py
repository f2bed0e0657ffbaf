"""Hooks: what is to happen around the steps of a session. The methods are called on every rank."""

import dataclasses
import json
import math
import subprocess
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from allred.cluster import report, topology
from allred.errors import InputError, NonFiniteError
from allred.session.average import MovingAverage
from allred.session.checks import whole

if TYPE_CHECKING:
    from allred.session.session import Session


_TELL_AFTER = 20  # steps without a value that a hook looks at


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a session ended. reason: "max_steps", "end of data", "stopped", the name of a signal, or of an exception;
    failed: whether it is the latter, `text` its words. checkpoint: the path of the last one that is complete, if any.
    """

    reason: str
    failed: bool
    text: str
    step: int
    seconds: float
    checkpoint: str | None


class Hook:
    """Does nothing; to be subclassed. One with `state_dict` and `load_state_dict` is part of the checkpoints.

    Several ranks: in mode sync `values` are the averages of all, so what follows from them alone follows on all ranks.
    """

    def begin(self, session: "Session") -> None:
        """Training begins: parameters and optimizer are restored, or those to start from."""

    def before_step(self, session: "Session") -> None:
        """A step begins."""

    def after_step(self, session: "Session", values: dict[str, float]) -> None:
        """A step has ended. values: what was logged in it."""

    def end(self, session: "Session", outcome: Outcome) -> None:
        """Training has ended, the last checkpoint is written. After a failure in `track` it comes without `begin`."""


class StopAtStep(Hook):
    """Stop when the global step is `last_step`, or has got beyond it; Session(max_steps=...) is the same."""

    def __init__(self, last_step: int) -> None:
        self.last_step = whole("StopAtStep: last_step", last_step, 1)

    def begin(self, session: "Session") -> None:
        self.after_step(session, {})

    def after_step(self, session: "Session", values: dict[str, float]) -> None:
        if session.step >= self.last_step:
            session.request_stop("max_steps", everywhere=True)


class Named:
    """A value of what is logged, by its name. `who` is the hook that looks at it, and tells if it never comes."""

    def __init__(self, who: str, name: str) -> None:
        self.name, self._who = name, who
        self._seen, self._missed = False, 0

    def of(self, values: dict[str, float]) -> float | None:
        """It, if it was logged in this step."""
        self._seen = self._seen or self.name in values
        self._missed += not self._seen
        if self._missed == _TELL_AFTER and not self._seen:
            logged = ", ".join(values) or "nothing"
            report.say(
                f"{self._who}: in {_TELL_AFTER} steps no '{self.name}' was logged; in this one there is {logged}"
            )
        return values.get(self.name)


class NanLoss(Hook):
    """Raise NonFiniteError, or stop, when a value that was logged is not finite. Raises InputError for an odd name."""

    def __init__(self, name: str = "loss", fail: bool = True) -> None:
        self._value, self._fail = Named("NanLoss", name), fail

    def after_step(self, session: "Session", values: dict[str, float]) -> None:
        value = self._value.of(values)
        if value is None or math.isfinite(value):
            return
        if self._fail:
            raise NonFiniteError(
                f"session: {self._value.name} is {value} after step {session.step}; lower the learning rate, or look "
                "for the sample that does it. NanLoss(fail=False) stops instead"
            )
        session.request_stop(f"{self._value.name} is {value}", everywhere=True)


class EarlyStopping(Hook):
    """Stop when a value has not got better for `patience` steps that logged it.

    min_delta: what counts as better. mode: "min" or "max". Its memory is part of the checkpoints.
    Raises InputError for what cannot be.
    """

    def __init__(self, name: str = "loss", patience: int = 10, min_delta: float = 0.0, mode: str = "min") -> None:
        if mode not in ("min", "max") or patience < 1 or min_delta < 0:
            raise InputError(
                f"EarlyStopping(mode={mode!r}, patience={patience!r}, min_delta={min_delta!r}): expected mode 'min' or "
                "'max', patience >= 1, min_delta >= 0"
            )
        self._value, self._patience, self._delta = Named("EarlyStopping", name), patience, min_delta
        self._sign = 1 if mode == "min" else -1
        self.best, self.since = math.inf, 0  # of the value times the sign; steps without a better one

    def begin(self, session: "Session") -> None:
        self._judge(session)

    def after_step(self, session: "Session", values: dict[str, float]) -> None:
        found = self._value.of(values)
        if found is None:
            return
        value = self._sign * found
        if value < self.best - self._delta:
            self.best, self.since = value, 0
        else:
            self.since += 1
        self._judge(session)

    def _judge(self, session: "Session") -> None:
        if self.since >= self._patience:
            session.request_stop(f"no better {self._value.name} for {self.since} steps", everywhere=True)

    def state_dict(self) -> dict[str, Any]:
        """Its memory."""
        return {"best": self.best, "since": self.since}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the memory that state_dict gave."""
        self.best, self.since = state["best"], state["since"]


class Averaging(Hook):
    """Keeps a MovingAverage of the parameters up to date; it is part of the checkpoints. If it is not restored from
    one, it begins with the parameters that training begins with.

    average = MovingAverage(params, decay=0.999)
    with allred.Session(..., hooks=[Averaging(average)]) as session: ...
    with average.swapped(): evaluate(params)
    """

    def __init__(self, average: MovingAverage) -> None:
        self._average = average
        self._loaded = False

    def begin(self, session: "Session") -> None:
        if not self._loaded:  # the average was made of parameters before they were restored, or received from the chief
            self._average.reset()

    def after_step(self, session: "Session", values: dict[str, float]) -> None:
        self._average.update(session.step)

    def state_dict(self) -> Any:
        """Of the average."""
        return self._average.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Go on from what state_dict gave."""
        self._average.load_state_dict(state)
        self._loaded = True


class GlobalStepWaiter(Hook):
    """Mode ps: this worker begins when the others have made so many updates, with fresh parameters. A slow start of
    the later workers makes asynchronous training stabler: GlobalStepWaiter(100 * allred.rank()).

    poll_s: seconds between looks at the servers. still_s: it begins as well when there was no update for so many
        seconds: the others have ended before, or wait for this worker, as other policies than async have it.
    """

    def __init__(self, step: int, poll_s: float = 0.2, still_s: float = 60.0) -> None:
        self._step, self._poll_s, self._still_s = step, poll_s, still_s

    def begin(self, session: "Session") -> None:
        if session.optimizer.session_support.is_lockstep:
            return
        step = min(self._step, session.max_steps or self._step)  # then the others are at their end
        seen, since = session.optimizer.global_step, time.monotonic()
        while seen < step and not session.asked:
            if time.monotonic() > since + self._still_s:
                return report.say_here(
                    f"GlobalStepWaiter({self._step}): no update since step {seen} for {self._still_s:g} s, so worker "
                    f"{topology.rank()} begins"
                )
            time.sleep(self._poll_s)
            session.optimizer.pull(session.params)
            if session.optimizer.global_step > seen:
                seen, since = session.optimizer.global_step, time.monotonic()


class Notify(Hook):
    """Tell somebody how it ended: run a command, or call a webhook. The chief does.

    command: a list of words; the outcome goes to its input, as JSON. url: gets that JSON by POST.
    only_failures: nothing is told of a good end. timeout_s: longest time it may take, in seconds.
    When another rank has failed, the job ends about 2 s later: a command goes on by itself, a webhook has to be
    quicker. Nobody is told when the chief is killed, which the launcher may do as soon as another rank was.
    What goes wrong with it is said, and ends nothing. Raises InputError if neither or both are given.
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

    def end(self, session: "Session", outcome: Outcome) -> None:
        if not session.is_chief or (self._only_failures and not outcome.failed):
            return
        text = json.dumps(dataclasses.asdict(outcome)).encode()
        try:
            if self._command is not None:
                subprocess.run(  # apart from this rank, which may be ended meanwhile
                    self._command, input=text, timeout=self._timeout_s, check=True, start_new_session=True
                )
            elif self._url is not None:
                import urllib.request  # with what it needs, a tenth of the time of `import allred`

                request = urllib.request.Request(self._url, text, {"Content-Type": "application/json"})
                urllib.request.urlopen(request, timeout=self._timeout_s).close()
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            report.say(f"Notify could not tell how training ended: {error}")
