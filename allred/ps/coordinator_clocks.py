"""Async and bounded staleness: every gradient is applied as it comes; what differs is how far a worker may run ahead.

The clock of a worker is the number of its gradients that have been applied. Bounded(s): a worker with clock c may go on
when c - m <= s, m the smallest clock of the live workers. So clocks of live workers differ by at most s + 1, and by
that much only while the one ahead waits; the slowest can always go on, hence there is no deadlock.

It bounds the age of gradients too. A worker that has pulled at clock c found every other at c - s or more, and until
its own gradient is applied none gets beyond c + s + 1: at most (n - 1)(2s + 1) updates of others lie between, n workers
in all. Ho et al., More effective distributed ML via a stale synchronous parallel parameter server, NIPS 2013.
"""

from allred.ps.coordinator import Coordinator


class AsyncCoordinator(Coordinator):
    """A worker goes on at once: it has permission from `done` on, whether `ready` is called or not."""

    waits = False

    def ready(self) -> list[tuple[int, int]]:
        """Those that were done since the last call, with their clocks."""
        go, self._waiting = self._waiting, []
        return [(worker, self.accepted[worker]) for worker in go]

    def _wait(self, worker: int) -> None:
        if worker not in self._waiting:  # nobody may ask: the list must not grow
            self._waiting.append(worker)


class BoundedCoordinator(Coordinator):
    """No worker starts a step while it is more than `staleness` clocks ahead of the slowest live one.

    max_lead: the largest lead, in clocks, with which a worker was let go on so far.
    """

    def __init__(self, workers: int, staleness: int) -> None:
        super().__init__(workers)
        self.max_lead = 0
        self._staleness = staleness

    def ready(self) -> list[tuple[int, int]]:
        """Those whose clocks are near enough to the slowest one, with their clocks."""
        slowest = min((self.accepted[worker] for worker in self.live), default=0)
        go = [worker for worker in self._waiting if self.accepted[worker] - slowest <= self._staleness]
        for worker in go:
            self._waiting.remove(worker)
            self._phase[worker] = "computing"
            self.max_lead = max(self.max_lead, self.accepted[worker] - slowest)
        return [(worker, self.accepted[worker]) for worker in go]
