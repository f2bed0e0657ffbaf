"""What a server does for a step: takes gradients, applies them, gives parameters, lets workers go on.

With locking a pull brings one version: while a worker still copies what it pulled, no cell that it has not copied is
changed.

Policy sync on several servers. Each applies the mean of a step by itself, and all apply the same one:

    1  a gradient that server 0 has accepted for step s (BEGIN) goes to all servers, which add it to their sums
    2  when all have answered, server 0 hears so (DONE): so when it has heard of all gradients of the step, they are in
       every server's sum, and nothing else is
    3  a server applies the mean when as many are in as it believes the step to need: `replicas_to_aggregate`, or one
       of each worker that has not left. A leave may reach it later than server 0; then it still waits
    4  server 0 lets a worker go on with step s + 1, which means that step s is complete. The worker's next requests to
       all servers carry that number. A server whose version is smaller applies the mean of what is in its sum first
    5  so no pull brings parameters older than the step it is for, and no gradient comes into the sum of another step

A server may be ahead: it hears of a leave before server 0 does, and lets nobody go on. Or `replicas_to_aggregate` is
smaller than the number of workers, and a backup worker pulls while the others end the step: what it makes of that is
dropped (BEGIN), since the step has its gradients.
"""

import functools
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
from allred.ps.shard import Shard, Update
from allred.ps.stalls import named
from allred.timeline.recorder import span


class Service:
    """Of one server. `coordinator`: the policy's machine; on servers other than 0 it only knows who lives.

    locking: requests are done one by one (shard.py: `locks`).
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
        self._rows = [f"worker {worker}" for worker in range(workers)]  # of the timeline
        self._aggregate = getattr(policy, "replicas_to_aggregate", None)
        self._begun: set[int] = set()  # workers whose gradient is on its way to all servers, or partly in the sum
        self._in_sum: set[int] = set()  # workers that have a gradient in the sum
        self._readers: dict[int, BoxPort] = {}  # that copy what they pulled
        self._parked: dict[int, tuple[Any, Request, int, int]] = {}  # workers that are done and may not go on yet
        self._may_go: dict[int, int] = {}  # workers, and their steps, that have not come to wait yet
        self._lr = float("nan")

    def step(self, worker: int, port: Any, request: Request) -> Steps[None]:
        """All that a worker asks for (record.py)."""
        flags, step, version, lr = request
        shard, staleness, dropped, given = self.shard, 0, False, False
        assert shard is not None, "a step came before registration"
        self._readers.pop(worker, None)
        if self._averages and step > shard.version:
            assert step == shard.version + 1, f"a request for step {step} came at version {shard.version}"
            assert shard.added, f"step {step} may begin, but of the one before there is no gradient"
            yield from self._apply_mean(shard)
        if flags & DRAIN:
            self.draining = True
        if flags & BEGIN:
            dropped = not self._begin(worker)
        if worker == 0 and lr != self._lr and lr == lr:
            self._lr = lr
            shard.set_lr(lr)
        if flags & PUSH:
            staleness = shard.version - version
            given = flags & (INIT | DONE | PULL) == PULL and shard.in_place and not self._averages
            kind, nbytes = ("push+pull", shard.bytes_up + shard.bytes_down) if given else ("push", shard.bytes_up)
            with span(kind, "", nbytes, self._rows[worker]):
                yield from self._push(worker, port, shard, flags, dropped, given)
            if given:  # the worker goes on while this is counted
                self._answer(port, step + 1, 0, staleness)
                self._note_pull(worker, port, shard)
            self.account.bytes_in += shard.bytes_up
            if not dropped and not flags & INIT:
                self.account.gradients += 1
                self.account.staleness[staleness] += 1
            if given:
                return
        if flags & DONE:
            if worker in self._begun or not self._averages:
                self._begun.discard(worker)
                self.coordinator.done(worker)
            self._parked[worker] = port, request, DROPPED * dropped, staleness
            self.let_go()
            return
        if flags & PULL:
            yield from self._give(worker, port, shard)
        self._answer(port, step + 1, DROPPED if dropped else 0, staleness)

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
            self._later(worker, self._go_on(worker, port, request.flags, step, flags, staleness))

    def _go_on(self, worker: int, port: Any, asked: int, step: int, flags: int, staleness: int) -> Steps[None]:
        if asked & PULL:
            yield from self._give(worker, port, self._the_shard)
        self._answer(port, step, flags, staleness)

    def waits(self) -> str:
        """Who waits for whom, in words; empty if nobody does."""
        waiting, others = sorted(self._parked), sorted(self._workers - set(self._parked))
        return f"{named(waiting)} wait{'s' * (len(waiting) == 1)} for {named(others)}" if waiting else ""

    @property
    def parked(self) -> Collection[int]:
        """The workers whose answers are held back."""
        return self._parked.keys()

    def forget(self, worker: int) -> None:
        """It copies nothing any more: it is gone."""
        if (port := self._readers.pop(worker, None)) is not None:
            port.forget()

    def leave(self, worker: int) -> Steps[None]:
        """A worker makes no more steps: nobody waits for it any more."""
        if worker not in self._workers:
            return
        if worker in self._begun:
            raise AllredError(
                f"worker {worker} was gone in the middle of its gradient, of which a part may be in the sum of step "
                f"{self._the_shard.version}; that cannot be taken back. Start again from the last checkpoint"
            )
        self._workers.discard(worker)
        self._parked.pop(worker, None)
        self._may_go.pop(worker, None)
        self.coordinator.leave(worker)
        yield from self._end_step()
        if not self._workers and self.shard is not None:
            self.account.unused = self.shard.added
        self.let_go()

    def _answer(self, port: Any, step: int, flags: int, staleness: int) -> None:
        if self.draining:
            flags |= DRAINING
        port.answer(pack_answer(flags, step, self._the_shard.version, staleness))

    # Gradients in.

    def _push(self, worker: int, port: Any, shard: Shard, flags: int, dropped: bool, gives: bool) -> Steps[None]:
        """Take the cells of a gradient, or of parameters to start from; `gives`: and give back what comes of each."""
        starts = flags & INIT
        adds = self._averages and not starts
        absent: Collection[int] = ()
        if flags & ABSENT:
            absent = yield from self._open_absent(port, shard)
        else:
            port.open(shard.layout.up)
        take_in: Callable[[int, Any], None]
        update: Update | None = None
        if dropped:
            take_in = _ignore
        elif starts:
            take_in = shard.start
        elif adds:
            take_in = shard.add
        else:
            update = shard.begin(absent)
            take_in = functools.partial(shard.apply, update)
        changes = self._locking and not dropped and not adds and (starts or shard.in_place)
        taken = 0
        try:
            for number, own in enumerate(shard.bytes):
                while (cell := port.cell()) is None:
                    yield port
                if changes and self._readers:
                    yield from self._past(number)
                take_in(number, cell)
                taken += 1
                port.take()
                if gives:
                    while not port.give(own):
                        yield port.room
        except (GeneratorExit, ConnectionResetError):  # the worker is gone
            if taken and update is not None and shard.in_place:
                self.account.torn += 1
            elif taken and adds and not dropped:
                self._begun.add(worker)  # at servers other than 0 this is the first to tell of it
            raise
        if starts:
            self._started()
        elif adds and not dropped:
            shard.end_add(absent)
            self._in_sum.add(worker)
            yield from self._end_step()
        elif update is not None:
            if not shard.in_place:
                yield from self._past(len(shard.bytes) - 1)
            shard.finish(update)
            self.account.updates += 1

    def _open_absent(self, port: Any, shard: Shard) -> Steps[Collection[int]]:
        """Begin to take a push of which some pieces have no gradient; which."""
        port.open(np.concatenate([[len(shard.layout.pieces)], shard.layout.up]))
        while (cell := port.cell()) is None:
            yield port
        absent = set(np.flatnonzero(np.frombuffer(cell, np.uint8)).tolist())
        port.take()
        return absent

    def _end_step(self) -> Steps[None]:
        """Apply the mean of a step's gradients, if all are in."""
        needed = self._aggregate or len(self._workers | self._in_sum)
        if self.shard is not None and self.shard.added and self.shard.added >= needed:
            yield from self._apply_mean(self.shard)

    def _apply_mean(self, shard: Shard) -> Steps[None]:
        """Of the gradients in the sum. It waits before, not within: if the worker at hand is gone, nothing is torn."""
        yield from self._past(len(shard.bytes) - 1)
        self._in_sum.clear()
        with span("apply", f"the mean of step {shard.version}", shard.bytes_down):
            update = shard.begin_mean()
            for number in range(len(shard.bytes)):
                shard.apply_mean(update, number)
            shard.finish(update)
        self.account.updates += 1

    # Parameters out.

    def _give(self, worker: int, port: Any, shard: Shard) -> Steps[None]:
        """All parameters."""
        with span("pull", "", shard.bytes_down, self._rows[worker]):
            for cell in shard.bytes:
                while not port.give(cell):
                    yield port.room
        self._note_pull(worker, port, shard)

    def _note_pull(self, worker: int, port: Any, shard: Shard) -> None:
        self.account.pulls += 1
        self.account.bytes_out += shard.bytes_down
        if isinstance(port, BoxPort):
            self._readers[worker] = port

    def _past(self, number: int) -> Steps[None]:
        """Wait until nobody needs this cell as it was."""
        for worker, port in list(self._readers.items()) if self._locking else ():
            while worker in self._readers and not port.has_read(number):
                yield port.reading(number, worker)
            if port.has_read(len(self._the_shard.bytes) - 1):
                self._readers.pop(worker, None)

    @property
    def _the_shard(self) -> Shard:
        assert self.shard is not None, "a step came before registration"
        return self.shard


def _ignore(number: int, cell: Any) -> None:
    """A cell of a gradient that is dropped."""
