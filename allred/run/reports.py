"""The reports of the ranks of a job to `allred run`, which pass through the watcher of the chief's node."""

from typing import Any

from allred.wording import named


class Reports:
    """The reports of the ranks of one world, from init() to shutdown() or the end of the program.

    size: the number of ranks. sessions: {rank: step} of those whose session is open. lost_hosts: hosts that were
    unreachable until the time limit.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.sessions: dict[int, int] = {}
        self.restored: int | None = None  # the step from which the session resumed
        self.lost_hosts: set[str] = set()
        self.code, self.text, self.exception = 0, "", ""  # of the failure that ended the job
        self.step: int | None = None  # of the session of the rank that failed
        self._hosts: dict[int, str] = {}
        self._left: set[int] = set()
        self._exceptions: dict[int, str] = {}
        self._steps: dict[int, int] = {}

    def handle(self, event: dict[str, Any]) -> None:
        """Handle an event of the watcher (watch/job_state.py lists them), or `verdict`."""
        kind, rank = event["event"], event["rank"]
        if kind == "joined":
            self._hosts[rank] = event["host"]
        elif kind == "left":
            self._left.add(rank)
        elif kind == "failed":
            self._exceptions[rank] = event["words"]
        elif kind == "session":
            self._handle_session(rank, event["step"], event["is_open"])
        elif kind == "unreachable":
            self.lost_hosts |= {self._hosts[each] for each in event["ranks"] if each in self._hosts}
        elif kind == "verdict":
            self.code, self.text = event["code"] or 1, event["text"].partition("\n")[0]
            self.exception = self._exceptions.get(rank, "")
            self.step = self._steps.get(rank)

    def lose_chief(self) -> None:
        """The connection to the host of rank 0 has failed. No effect if the end of the job was reported before."""
        if not self.code and not self.is_success and 0 in self._hosts:
            self.lost_hosts.add(self._hosts[0])
            self.code, self.text = 1, f"host {self._hosts[0]} (rank 0) is unreachable"

    def _handle_session(self, rank: int, step: int, is_open: bool) -> None:
        self._steps[rank] = step
        if is_open:
            self.restored = step
            self.sessions[rank] = step
        else:
            self.sessions.pop(rank, None)

    @property
    def have_joined(self) -> bool:
        """Whether all ranks are watched, or have been."""
        return len(self._hosts) == self.size

    @property
    def is_success(self) -> bool:
        """Whether every rank has reported success."""
        return not self.code and len(self._left) == len(self._hosts) == self.size

    @property
    def missing(self) -> str:
        """The ranks that have reported neither success nor failure, for messages."""
        ranks = [rank for rank in range(self.size) if rank not in self._left]
        return f"{named('rank', ranks)} ended without a report"
