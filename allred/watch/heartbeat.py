"""Heartbeats between the watchers of two nodes: each sends one every second, and notices when none arrives.

A heartbeat is sent on the connection that the watchers have anyway. If a link between hosts is cut, TCP reports nothing
for minutes; heartbeats name the host after SILENT_S. This is only a message: the job continues if the link comes back.
"""

from allred import wording

PERIOD_S = 1.0
SILENT_S = 5.0


class Heartbeat:
    """The heartbeats of the connection to one watcher. It has no clock; `now` is in seconds.

    limit_s: the time limit of collectives, for the message. host: the name of the other host.
    """

    def __init__(self, now: float, limit_s: float, host: str = "") -> None:
        self.host = host
        self.ranks: set[int] = set()  # of the other host
        self._limit_s = limit_s
        self._heard_at = self._sent_at = now
        self._reported = False

    def is_due(self, now: float) -> bool:
        """Return whether a heartbeat has to be sent now. If so, it counts as sent."""
        if now < self._sent_at + PERIOD_S:
            return False
        self._sent_at = now
        return True

    def heard(self, now: float) -> str:
        """Call when anything was received. Return the message that the host answers again, or ""."""
        silent_s, self._heard_at = now - self._heard_at, now
        if not self._reported:
            return ""
        self._reported = False
        return f"{self._name()} answers again, after {silent_s:.0f} s"

    def check(self, now: float) -> str:
        """Return the message that the host is unreachable, once, or ""."""
        if self._reported or now < self._heard_at + SILENT_S:
            return ""
        self._reported = True
        return (
            f"{self._name()} has been unreachable for {now - self._heard_at:.0f} s: the host or the network to it "
            f"may have failed. The job continues if it answers within the time limit of collectives "
            f"({self._limit_s:.0f} s, ALLRED_TIMEOUT_S)"
        )

    def _name(self) -> str:
        return f"host {self.host}" + (f" ({wording.named('rank', self.ranks)})" if self.ranks else "")
