"""What a server does for a step: takes gradients, applies them, gives parameters, lets workers go on.

With use_locking a pull brings one version: while a worker still copies what it pulled, no cell that it has not copied
is changed.
"""

from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from allred.comm.work import Steps
from allred.errors import AllredError
from allred.ps.account import Account
from allred.ps.boxes import BoxPort
from allred.ps.record import (
    ABSENT,
    BEGIN,
    DONE,
    DRAIN,
    DRAINING,
    DROPPED,
    INIT,
    PULL,
    PUSH,
    Request,
    pack_answer,
)
from allred.ps.shard import Shard


class Service:
    """Of one server. `coordinator`: the policy's machine; on servers other than 0 it only knows who lives.

    later: called with a worker and steps that are to be done after the request at hand.
    started: called when worker 0 has given parameters to start from.
    """

    def __init__(
        self, number: int, policy: Any, workers: int, locking: bool, later: Callable[[int, Steps[None]], None],
        started: Callable[[], None],
    ) -> None:  # fmt: skip
        self.account = Account(number)
        self.coordinator = policy.coordinator(workers)
        self.shard: Shard | None = None
        self.draining = False
        self._averages = bool(self.coordinator.asks)
        self._locking, self._later, self._started = locking, later, started
        self._workers = set(range(workers))  # that have not left
        self._aggregate = getattr(policy, "replicas_to_aggregate", None)
        self._begun: set[int] = set()  # workers whose gradient is on its way to all servers
        self._in_sum: set[int] = set()  # workers that have a gradient in the sum
        self._readers: dict[int, BoxPort] = {}  # that copy what they pulled
        self._parked: dict[int, tuple[Any, Request, int, int]] = {}  # workers that are done and may not go on yet
        self._may_go: dict[int, int] = {}  # workers, and their steps, that have not come to wait yet
        self._lr = float("nan")

    def step(self, worker: int, port: Any, request: Request) -> Steps[None]:
        """All that a worker asks for (record.py)."""
        shard, flags, staleness = self._the_shard, request.flags, 0
        self._readers.pop(worker, None)
        self.draining = self.draining or bool(flags & DRAIN)
        dropped = bool(flags & BEGIN) and not self._begin(worker)
        if worker == 0 and request.lr == request.lr != self._lr:
            self._lr = request.lr
            shard.set_lr(request.lr)
        gives = flags & (PUSH | INIT | DONE | PULL) == PUSH | PULL and shard.in_place and not self._averages
        if flags & PUSH:
            staleness = shard.version - request.version
            yield from self._push(worker, port, flags, dropped, gives)
            if not (dropped or flags & INIT):
                yield from self._pushed(worker, staleness)
        if flags & DONE:
            if worker in self._begun or not self._averages:
                self._begun.discard(worker)
                self.coordinator.done(worker)
            self._parked[worker] = port, request, DROPPED * dropped, staleness
            self.let_go()
            return
        yield from self._end(worker, port, 0 if gives else flags & PULL, request.step + 1, DROPPED * dropped, staleness)

    def _begin(self, worker: int) -> bool:
        taken: bool = self.coordinator.begin(worker)
        if taken:
            self._begun.add(worker)
        else:
            self.account.dropped[worker] += 1
        return taken

    def let_go(self) -> None:
        """Answer those that may go on."""
        self._may_go.update(self.coordinator.ready())
        if self.draining:  # nobody makes another step
            self._may_go.update({worker: request.step for worker, (_, request, *_) in self._parked.items()})
        for worker in [worker for worker in self._may_go if worker in self._parked]:
            port, request, flags, staleness = self._parked.pop(worker)
            step = self._may_go.pop(worker)
            self._later(worker, self._end(worker, port, request.flags & PULL, step, flags, staleness))

    def waits(self) -> str:
        """Who waits for whom, in words; empty if nobody does."""
        waiting, others = sorted(self._parked), sorted(self._workers - set(self._parked))
        return f"{_named(waiting)} wait{'s' * (len(waiting) == 1)} for {_named(others)}" if waiting else ""

    def forget(self, worker: int) -> None:
        """It copies nothing any more: it is gone."""
        if (port := self._readers.pop(worker, None)) is not None:
            port.forget()

    def leave(self, worker: int) -> Steps[None]:
        """A worker has left: nobody waits for it any more."""
        if worker in self._begun:
            raise AllredError(
                f"worker {worker} was gone in the middle of its gradient, of which a part may be in the sum of step "
                f"{self._the_shard.version}; that cannot be taken back. Start again from the last checkpoint"
            )
        self._workers.discard(worker)
        self._parked.pop(worker, None)
        self.coordinator.leave(worker)
        yield from self._apply_mean()
        self.let_go()

    def _end(self, worker: int, port: Any, pulls: int, step: int, flags: int, staleness: int) -> Steps[None]:
        """Give the parameters, if they are asked for, and answer."""
        if pulls:
            for cell in self._the_shard.bytes:
                while not port.give(cell):
                    yield port.room
            self._given(worker, port)
        if self.draining:
            flags |= DRAINING
        port.answer(pack_answer(flags, step, self._the_shard.version, staleness))

    # Gradients in.

    def _push(self, worker: int, port: Any, flags: int, dropped: bool, gives: bool) -> Steps[None]:
        """Take the cells of a gradient, or of parameters to start from; `gives`: and give back what comes of each."""
        shard, start = self._the_shard, bool(flags & INIT)
        absent = yield from self._open(port, bool(flags & ABSENT))
        adds = self._averages and not start
        if not (start or adds or dropped):
            shard.begin(absent)
        waits = self._locking and not dropped and not adds and (start or shard.in_place)
        for number in range(len(shard.bytes)):
            while (cell := port.cell()) is None:
                yield port
            if waits and self._readers:
                yield from self._past(number)
            if start:
                shard.start(number, cell)
            elif adds and not dropped:
                shard.add(number, cell)
            elif not dropped:
                shard.apply(number, cell)
            port.take()
            if gives:
                while not port.give(shard.bytes[number]):
                    yield port.room
        self.account.bytes_in += shard.bytes_up
        if gives:
            self._given(worker, port)
        if adds and not dropped:
            shard.end_add(absent)
        if start:
            self._started()

    def _open(self, port: Any, some_absent: bool) -> Steps[Collection[int]]:
        """Begin to take a push; the pieces that have no gradient in it."""
        layout = self._the_shard.layout
        if not some_absent:
            port.open(layout.up)
            return ()
        port.open(np.concatenate([[len(layout.pieces)], layout.up]))
        while (cell := port.cell()) is None:
            yield port
        absent = set(np.flatnonzero(np.frombuffer(cell, np.uint8)).tolist())
        port.take()
        return absent

    def _pushed(self, worker: int, staleness: int) -> Steps[None]:
        """A gradient is complete."""
        self.account.gradients += 1
        self.account.staleness[staleness] += 1
        if self._averages:
            self._in_sum.add(worker)
            yield from self._apply_mean()
            return
        if not self._the_shard.in_place:
            yield from self._past(len(self._the_shard.bytes) - 1)
        self._the_shard.finish()
        self.account.updates += 1

    def _apply_mean(self) -> Steps[None]:
        """Apply the mean of a step's gradients, if all are in."""
        shard = self.shard
        needed = self._aggregate or len(self._workers | self._in_sum)
        if shard is None or not shard.added or shard.added < needed:
            return
        self._in_sum.clear()
        shard.begin_mean()
        for number in range(len(shard.bytes)):
            yield from self._past(number)
            shard.apply_mean(number)
        shard.finish()
        self.account.updates += 1

    # Parameters out.

    def _given(self, worker: int, port: Any) -> None:
        self.account.pulls += 1
        self.account.bytes_out += self._the_shard.bytes_down
        if isinstance(port, BoxPort):
            self._readers[worker] = port

    def _past(self, number: int) -> Steps[None]:
        """Wait until nobody needs this cell as it was."""
        for worker, port in list(self._readers.items()) if self._locking else ():
            while worker in self._readers and not port.has_read(number):
                yield port.reading(number)
            if port.has_read(len(self._the_shard.bytes) - 1):
                self._readers.pop(worker, None)

    @property
    def _the_shard(self) -> Shard:
        assert self.shard is not None, "a step came before registration"
        return self.shard


def _named(workers: list[int]) -> str:
    """
    >>> _named([0, 2])
    'workers 0,2'
    """
    return f"worker{'s' * (len(workers) > 1)} {','.join(map(str, workers))}"
