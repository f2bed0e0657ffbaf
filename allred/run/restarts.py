"""Decides after each start of a job whether it starts again, and when. It has no clock, process or socket."""

import dataclasses

from allred.runtime.timings import LONGEST_RESTART_DELAY_S, RESTART_DELAY_S


@dataclasses.dataclass(frozen=True)
class End:
    """How a start of the job ended.

    code: the exit code of the job; 0 only if every rank that called init reported success. text: what happened, for
    messages. exception: the exception that a rank reported, such as "ValueError: x", or "". step: the step of the
    session at that time, or None. joined: whether a rank called init. restored: the step from which the session
    resumed, or None.
    """

    code: int
    text: str = ""
    exception: str = ""
    step: int | None = None
    joined: bool = True
    restored: int | None = None


@dataclasses.dataclass(frozen=True)
class Decision:
    """delay_s: seconds until the next start; None if the job ends. reason: for the message."""

    delay_s: float | None
    reason: str = ""


class RestartPolicy:
    """restarts: how often the job may start again after a failure."""

    def __init__(self, restarts: int) -> None:
        self._restarts, self.made = restarts, 0
        self._before: End | None = None  # the failure before
        self._unsuccessful = 0  # restarts in a row after which the job did not get beyond its step of before

    def decide(self, end: End) -> Decision:
        """Return what follows a start that failed.

        >>> RestartPolicy(restarts=3).decide(End(137, "rank 1 was killed"))
        Decision(delay_s=0.5, reason='')
        """
        before, self._before = self._before, end
        if self.made >= self._restarts:
            return Decision(None, f"--restarts {self._restarts} is used up" if self._restarts else "")
        if before is not None and end.exception and (end.exception, end.step) == (before.exception, before.step):
            where = "" if end.step is None else f" at step {end.step}"
            return Decision(None, f"the same exception occurred twice{where}")
        if before is not None and not end.joined and not before.joined:
            return Decision(None, "the program ended twice before allred.init()")
        progress = before is None or (end.restored or 0) > (before.restored or 0)
        self._unsuccessful = 0 if progress else self._unsuccessful + 1
        self.made += 1
        return Decision(min(RESTART_DELAY_S * 2**self._unsuccessful, LONGEST_RESTART_DELAY_S))


def size(slots: int, target: int, min_np: int) -> int | None:
    """Return the number of ranks of the next start; None if there are too few slots.

    slots: of the hosts that are left; 0: no limit. target: the number of ranks that the user wants.

    >>> size(slots=3, target=4, min_np=2), size(slots=1, target=4, min_np=2), size(slots=0, target=4, min_np=2)
    (3, None, 4)
    """
    found = min(target, slots) if slots else target
    return found if found >= min_np else None
