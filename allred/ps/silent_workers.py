"""Detects workers that make no request while others wait for them, and reports them to the watcher of the server.

While a server holds answers back, it sends every second the workers that cause this, and the seconds since the last
request of each (event `holds` of watch/job.py). The watcher computes the time limits of the other workers from these.
A worker that waits at its end cannot warn or end the job itself, so the server does both for it.
"""

from collections.abc import Callable, Collection

from allred.errors import CollectiveTimeout
from allred.ps.context import Context
from allred.watch import line
from allred.watch.wait import watched

TICK_S = 1.0  # the longest interval between two checks
_REPORT_S = 1.0  # time without a request before the server reports it to the watcher


class SilentWorkers:
    """Detection of silent workers at one server. now: the current time of one clock, in seconds."""

    def __init__(self, context: Context, now: float) -> None:
        self._ranks = range(context.servers, context.servers + context.workers)
        self._server, self._timeout_s = context.rank, float(context.config.timeout_s)
        self._last = [now] * context.workers  # when each worker made its last request
        self._last_of_all = now  # time of the last request of any worker
        self._ended_at: float | None = None  # when the first worker began to wait at its end
        self._reported = ""  # the wait that was reported to the watcher; "" for none
        self._reported_workers: list[int] = []  # the silent workers of that report; none: a wait for any request
        self._holds = False  # whether the last event `holds` named a worker
        self._next = now  # time of the next check

    def heard(self, worker: int, now: float) -> None:
        """Record a request of a worker."""
        self._last[worker] = self._last_of_all = now
        if self._reported and (not self._reported_workers or worker in self._reported_workers):
            self._report_end()

    def idle_s(self, now: float) -> float:
        """Return the seconds since the last request of any worker."""
        return now - self._last_of_all

    def report_idle(self, describe_waits: Callable[[], str], now: float) -> None:
        """Report that there is no request. describe_waits: returns which workers wait for which, or ""."""
        report_s = _REPORT_S if line.current is None else min(_REPORT_S, line.current.warn_s / 2)
        if not self._reported and self.idle_s(now) > report_s:
            who = describe_waits()
            what = f"service: {who}" if who else "service, without a request"
            self._report_wait(what, self.idle_s(now), [], quiet=True)

    def due(self, now: float) -> bool:
        """Whether it is time for `check`."""
        return now >= self._next

    def check(self, awaited: Collection[int], ended: Collection[int], waits_here: bool, now: float) -> None:
        """Report the workers that others wait for, and end the job at the time limit.

        awaited: the workers that others wait for. ended: the workers that wait at their end while others train.
        waits_here: False during another wait of this server, which has its own report and time limit. Raises
        CollectiveTimeout at the time limit if there is no watcher."""
        warn_s = line.current.warn_s if line.current is not None else TICK_S
        self._next = now + min(TICK_S, warn_s / 4, self._timeout_s / 8)
        self._report_holds(awaited, now)
        if not waits_here:
            self._reported, self._reported_workers = "", []
            return
        if not ended or not awaited:
            self._ended_at = None
            if self._reported_workers:
                self._report_end()
            return
        self._ended_at = now if self._ended_at is None else self._ended_at
        silent = {worker: now - max(self._last[worker], self._ended_at) for worker in sorted(awaited)}
        late = [worker for worker, for_s in silent.items() if for_s > min(_REPORT_S, warn_s / 2, self._timeout_s / 2)]
        if not late:
            return
        has, its, waits = ("has", "its", "waits") if len(ended) == 1 else ("have", "their", "wait")
        what = f"service: {named(sorted(ended))} {has} made {its} last step, and {waits} for {named(late)}"
        if late != self._reported_workers:
            self._report_wait(what, max(silent.values()), late, quiet=False)
        if max(silent.values()) >= self._timeout_s:
            self._end_job(what, late)

    def _end_job(self, what: str, late: list[int]) -> None:
        if watched() and line.current is not None:
            line.current.ask_for_verdict(what, self._timeout_s, [self._server])
            return
        raise CollectiveTimeout(
            f"{what}: {named(late)} made no request for {self._timeout_s:g} s; it is late, stopped or dead. If such a "
            "pause is intended, increase ALLRED_TIMEOUT_S"
        )

    def _report_holds(self, awaited: Collection[int], now: float) -> None:
        if line.current is not None and (awaited or self._holds):
            silent = {self._ranks[worker]: round(now - self._last[worker], 1) for worker in awaited}
            line.current.tell("holds", silent=silent)
            line.current.read()
            if line.current.pending():
                raise line.current.error()
        self._holds = bool(awaited)

    def _report_wait(self, what: str, since_s: float, late: list[int], quiet: bool) -> None:
        if line.current is not None:
            self._reported, self._reported_workers = what, late
            line.current.tell("waiting", what=self._reported, since_s=since_s, peers=False, quiet=quiet)

    def _report_end(self) -> None:
        if line.current is not None:
            line.current.tell("going")
        self._reported, self._reported_workers = "", []


def named(workers: list[int]) -> str:
    """
    >>> named([0, 2])
    'workers 0,2'
    """
    return f"worker{'s' * (len(workers) > 1)} {','.join(map(str, workers))}"
