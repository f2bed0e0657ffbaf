"""Detects workers that make no request while others wait for them, and reports them to the watcher of the server.

While a server holds answers back, it sends every second the workers that cause this, and the seconds since the last
request of each (event `holds` of watch/job.py). The watcher computes the time limits of the other workers from these.
A worker that waits at its end cannot warn or end the job itself, so the server does both for it.
"""

from collections.abc import Callable, Collection

from allred import world
from allred.errors import CollectiveTimeout
from allred.ps.running import Running

TICK_S = 1.0  # the longest interval between two checks
_TELL_S = 1.0  # time without a request before the server reports it to the watcher


class Stalls:
    """Stall detection of one server. now: the current time of one clock, in seconds."""

    def __init__(self, running: Running, now: float) -> None:
        self._ranks = range(running.servers, running.servers + running.workers)
        self._server, self._timeout_s = running.rank, float(running.config.timeout_s)
        self._last = [now] * running.workers  # when each worker made its last request
        self._last_of_all = now  # time of the last request of any worker
        self._ended_at: float | None = None  # when the first worker began to wait at its end
        self._told = ""  # the wait that was reported to the watcher; "" for none
        self._told_of: list[int] = []  # the silent workers of that report; none: a wait for any request
        self._holds = False  # whether the last event `holds` named a worker
        self._next = now  # time of the next check

    def heard(self, worker: int, now: float) -> None:
        """Record a request of a worker."""
        self._last[worker] = self._last_of_all = now
        if self._told and (not self._told_of or worker in self._told_of):
            self._tell_going()

    def silent_s(self, now: float) -> float:
        """Return the seconds since the last request of any worker."""
        return now - self._last_of_all

    def idle(self, words: Callable[[], str], now: float) -> None:
        """Report that there is no request. words: returns which workers wait for which, or ""."""
        watcher = world.watcher()
        tell_s = _TELL_S if watcher is None else min(_TELL_S, watcher.warn_s / 2)
        if not self._told and self.silent_s(now) > tell_s:
            who = words()
            what = f"service: {who}" if who else "service, without a request"
            self._tell_waiting(what, self.silent_s(now), [], quiet=True)

    def due(self, now: float) -> bool:
        """Whether it is time for `look`."""
        return now >= self._next

    def look(self, awaited: Collection[int], ended: Collection[int], waits_here: bool, now: float) -> None:
        """Report the workers that others wait for, and end the job at the time limit.

        awaited: the workers that others wait for. ended: the workers that wait at their end while others train.
        waits_here: False during another wait of this server, which has its own report and time limit. Raises
        CollectiveTimeout at the time limit if there is no watcher."""
        watcher = world.watcher()
        warn_s = TICK_S if watcher is None else watcher.warn_s
        self._next = now + min(TICK_S, warn_s / 4, self._timeout_s / 8)
        self._tell_holds(awaited, now)
        if not waits_here:
            self._told, self._told_of = "", []
            return
        if not ended or not awaited:
            self._ended_at = None
            if self._told_of:
                self._tell_going()
            return
        self._ended_at = now if self._ended_at is None else self._ended_at
        silent = {worker: now - max(self._last[worker], self._ended_at) for worker in sorted(awaited)}
        late = [worker for worker, for_s in silent.items() if for_s > min(_TELL_S, warn_s / 2, self._timeout_s / 2)]
        if not late:
            return
        has, its, waits = ("has", "its", "waits") if len(ended) == 1 else ("have", "their", "wait")
        what = f"service: {named(sorted(ended))} {has} made {its} last step, and {waits} for {named(late)}"
        if late != self._told_of:
            self._tell_waiting(what, max(silent.values()), late, quiet=False)
        if max(silent.values()) >= self._timeout_s:
            self._ask(what, late)

    def _ask(self, what: str, late: list[int]) -> None:
        if (watcher := world.watcher()) is not None and watcher.watched():
            watcher.ask_for_verdict(what, self._timeout_s, [self._server])
            return
        raise CollectiveTimeout(
            f"{what}: {named(late)} made no request for {self._timeout_s:g} s; it is late, stopped or dead. If such a "
            "pause is intended, increase ALLRED_TIMEOUT_S"
        )

    def _tell_holds(self, awaited: Collection[int], now: float) -> None:
        watcher = world.watcher()
        if watcher is not None and (awaited or self._holds):
            silent = {self._ranks[worker]: round(now - self._last[worker], 1) for worker in awaited}
            watcher.tell("holds", silent=silent)
            watcher.read()
            if watcher.pending():
                raise watcher.error()
        self._holds = bool(awaited)

    def _tell_waiting(self, what: str, since_s: float, late: list[int], quiet: bool) -> None:
        if (watcher := world.watcher()) is not None:
            self._told, self._told_of = what, late
            watcher.tell("waiting", what=self._told, since_s=since_s, peers=False, quiet=quiet)

    def _tell_going(self) -> None:
        if (watcher := world.watcher()) is not None:
            watcher.tell("going")
        self._told, self._told_of = "", []


def named(workers: list[int]) -> str:
    """
    >>> named([0, 2])
    'workers 0,2'
    """
    return f"worker{'s' * (len(workers) > 1)} {','.join(map(str, workers))}"
