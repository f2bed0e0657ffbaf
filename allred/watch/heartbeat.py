"""Heartbeats between the watchers of two nodes: each sends two every second, and notices when none arrives.

A heartbeat is sent on the connection that the watchers have anyway. If a link between hosts is cut, TCP reports nothing
for minutes; heartbeats name the host after SILENT_HOST_S. The job continues if the host answers within the time limit
of collectives. Else each side ends its own ranks, and the launcher (process.py).
"""

from allred import wording
from allred.runtime.timings import LEAST_LOST_HOST_S, SILENT_HOST_S


class Heartbeat:
    """The heartbeats of the connection to one watcher. It has no clock; `now` is in seconds.

    limit_s: the time limit of collectives. host: the name of the other host.
    """

    def __init__(self, now: float, limit_s: float, host: str = "") -> None:
        self.host = host
        self.ranks: set[int] = set()  # of the other host
        self._limit_s = max(limit_s, LEAST_LOST_HOST_S)
        self._heard_at = now
        self.is_silent = False  # and that was reported

    def heard(self, now: float) -> str:
        """Call when anything was received. Return the message that the host answers again, or ""."""
        silent_s, self._heard_at = now - self._heard_at, now
        if not self.is_silent:
            return ""
        self.is_silent = False
        return f"{self._name()} answers again, after {silent_s:.0f} s"

    def check(self, now: float) -> str:
        """Return the message that the host is unreachable, once, or ""."""
        if self.is_silent or now < self._heard_at + SILENT_HOST_S:
            return ""
        self.is_silent = True
        return (
            f"{self._name()} has been unreachable for {now - self._heard_at:.0f} s: the host or the network to it "
            f"may have failed. The job continues if it answers within {self._limit_s:.0f} s "
            f"(ALLRED_TIMEOUT_S, at least {LEAST_LOST_HOST_S:.0f})"
        )

    def is_lost(self, now: float) -> bool:
        """Return whether the host has been silent until the time limit."""
        return now >= self._heard_at + self._limit_s

    def lost(self, now: float) -> str:
        """Return the message that the job ends, because this host is unreachable."""
        return (
            f"{self._name()} has been unreachable for {now - self._heard_at:.0f} s: the host or the network to it has "
            "failed"
        )

    def _name(self) -> str:
        return f"host {self.host}" + (f" ({wording.named('rank', self.ranks)})" if self.ranks else "")
