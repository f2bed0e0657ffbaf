"""Handles step requests at a server: receives gradients, applies them, sends parameters, lets workers continue.

With locking a pull gets one version: while a worker copies the parameters, no cell that it has not copied changes.

docs/modes.md says why all servers apply the same mean with policy sync: requests of step s + 1 reach a server only when
its sum has all gradients of step s, and no other.
"""

import functools
from collections import deque
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from allred.comm.work import Steps
from allred.errors import AllredError
from allred.ps import protocol, table_cells
from allred.ps.compiled_steps import CompiledSteps, Served
from allred.ps.protocol import ServerStatistics
from allred.ps.shard import CELL_BYTES, Shard, Update
from allred.ps.shm_transport import MailboxPort
from allred.timeline import recorder
from allred.timeline.recorder import span
from allred.wording import named


class Turn:
    """A request that a server is working on. worker: its sender; None for work that follows a leave."""

    def __init__(self, worker: int | None, steps: Steps[None]) -> None:
        self.worker, self.steps = worker, steps
        self.pending: Any = None  # the current wait

    def advance(self) -> bool:
        """Continue up to the next wait; True at the end."""
        try:
            while self.pending is None or self.pending.done():
                self.pending = next(self.steps)
        except StopIteration:
            return True
        except ConnectionResetError:  # the worker has died; its watcher reports that
            self.cancel()
            return True
        return False

    def cancel(self) -> None:
        """Stop: the worker is gone."""
        self.steps.close()

    def rest(self) -> Steps[None]:
        """Return the remaining steps, beginning with the current wait."""
        yield self.pending
        for pending in self.steps:
            self.pending = pending
            yield pending

    def awaited_worker(self) -> int | None:
        """Return the worker that the current wait depends on: one that copies a cell, else the sender."""
        other: int | None = getattr(self.pending, "worker", None)
        return self.worker if other is None else other


class StepHandler:
    """Step requests at one server.

    turns: the requests in progress, in order; those that may continue are appended. shard: set by the registration.
    draining: whether a rank was asked to stop; then no step begins, and no leave completes one. starts: how often
    worker 0 has sent initial parameters. coordinator: the policy's state machine; on servers other than 0 it only knows
    the live workers; with a grace time they apply a mean when the first request of the next step arrives. locking:
    whether requests are handled one by one (shard.py: `locks`). sending: the workers that are sending a gradient to all
    servers; on servers other than 0, those with a part of a gradient in the sum.
    """

    def __init__(self, server: int, policy: Any, workers: int, locking: bool) -> None:
        self.statistics = ServerStatistics(server)
        self.coordinator = policy.coordinator(workers)
        self.shard: Shard | None = None
        self.turns: deque[Turn] = deque()
        self.draining = False
        self.starts = 0
        self.locking = locking
        self._averages = bool(self.coordinator.asks)
        self._rows = [f"worker {worker}" for worker in range(workers)]  # of the timeline
        self._aggregate = getattr(policy, "replicas_to_aggregate", None)
        self._grace_s: float | None = getattr(policy, "grace_s", None)
        self._grace_ends: float | None = None  # of the current step
        self.sending: set[int] = set()
        self._in_sum: set[int] = set()  # workers that have a gradient in the sum
        self._readers: dict[int, MailboxPort] = {}  # workers that copy parameters
        self.parked: dict[int, tuple[Any, protocol.StepRequest, int, int]] = {}  # workers that are done and must wait
        self._may_continue: dict[int, int] = {}  # {worker: step} of workers that may continue and have not asked yet
        self._lr = float("nan")
        self.compiled: CompiledSteps | None = None  # set by the registration
        self.boxes: dict[int, int] = {}  # {worker: number of its mailbox}, of the workers of this node

    def note_served(self, served: Served, ports: dict[int, MailboxPort]) -> None:
        """Count requests that were served in C."""
        shard, statistics = self.require_shard(), self.statistics
        for worker, _ in served.by_worker:
            ports[worker].note_given(len(shard.bytes))
            self._readers[worker] = ports[worker]
        total = sum(number for _, number in served.by_worker)
        for updates, number in served.staleness:
            statistics.staleness[updates] += number
        statistics.gradients += total
        statistics.updates += total
        statistics.pulls += total
        statistics.bytes_in += total * shard.bytes_up
        statistics.bytes_out += total * shard.bytes_down

    def step(self, worker: int, port: Any, request: protocol.StepRequest) -> Steps[None]:
        flags, step, version, lr = request[:4]
        shard, staleness, dropped, given = self.require_shard(), 0, False, False
        self._readers.pop(worker, None)
        if self._averages and step > shard.version:
            assert step == shard.version + 1, f"a request for step {step} arrived at version {shard.version}"
            assert shard.added, f"step {step} may begin, but step {shard.version} has no gradient"
            yield from self._apply_mean(shard)
        if flags & protocol.LOOKUP:
            yield from self._look_up(worker, port, shard, request)
            return
        if flags & protocol.BEGIN:
            dropped = self.draining or not self.coordinator.begin(worker)
            if dropped:
                self.statistics.dropped[worker] += 1
            else:
                self.sending.add(worker)
        if flags & protocol.DRAIN:
            self.draining = True
        if worker == 0 and lr != self._lr and lr == lr:
            self._lr = lr
            shard.set_lr(lr)
        if flags & protocol.PUSH:
            staleness = shard.version - version
            given = (
                flags & (protocol.INIT | protocol.DONE | protocol.PULL) == protocol.PULL
                and shard.in_place
                and not self._averages
            )
            kind, nbytes = ("push+pull", shard.bytes_up + shard.bytes_down) if given else ("push", shard.bytes_up)
            with recorder.NO_SPAN if recorder.current is None else span(kind, "", nbytes, self._rows[worker]):
                yield from self._push(worker, port, shard, request, dropped, given)
            if given:  # reply before counting, so that the worker continues sooner
                self._reply(port, shard, step + 1, 0, staleness)
                self._count_pull(worker, port, shard)
            self.statistics.bytes_in += shard.bytes_up
            if not dropped and not flags & protocol.INIT:
                self.statistics.gradients += 1
                self.statistics.staleness[staleness] += 1
            if given:
                return
        if flags & protocol.DONE:
            if worker in self.sending or not self._averages:
                self.sending.discard(worker)
                self.coordinator.done(worker)
                if self._grace_s is not None:
                    yield from self._end_step()
            self.parked[worker] = port, request, protocol.DROPPED * dropped, staleness
            self.release()
            return
        if flags & protocol.PULL:
            yield from self._give(worker, port, shard)
        self._reply(port, shard, step + 1, protocol.DROPPED if dropped else 0, staleness)

    def release(self) -> None:
        """Let the workers continue that may."""
        self._may_continue.update(self.coordinator.ready())
        if self.draining:  # no worker makes another step
            self._may_continue.update({worker: request.step for worker, (_, request, *_) in self.parked.items()})
        for worker in [worker for worker in self._may_continue if worker in self.parked]:
            port, request, flags, staleness = self.parked.pop(worker)
            steps = self._continue(worker, port, request.flags, self._may_continue.pop(worker), flags, staleness)
            self.turns.append(Turn(worker, steps))

    def _continue(self, worker: int, port: Any, asked: int, step: int, flags: int, staleness: int) -> Steps[None]:
        shard = self.require_shard()
        if asked & protocol.PULL:
            yield from self._give(worker, port, shard)
        self._reply(port, shard, step, flags, staleness)

    def end_grace(self, now: float) -> None:
        """End the current step if its grace time is over. now: of one clock, in seconds."""
        if self._grace_s is None or self.draining:
            return
        if not self.coordinator.in_grace:
            self._grace_ends = None
        elif self._grace_ends is None:
            self._grace_ends = now + self._grace_s
        elif now >= self._grace_ends:
            self.coordinator.close()
            self.turns.append(Turn(None, self._end_closed_step()))

    def _end_closed_step(self) -> Steps[None]:
        yield from self._end_step()
        self.release()

    def describe_waits(self) -> str:
        """Return which workers wait for which, as text; "" if none waits."""
        if not self.parked:
            return ""
        waiting, others = named("worker", self.parked), named("worker", self.coordinator.live - set(self.parked))
        return f"{waiting} wait{'s' * (len(self.parked) == 1)} for {others}"

    def forget_reader(self, worker: int) -> None:
        """Do not wait for a worker that copies parameters: it is gone."""
        if (port := self._readers.pop(worker, None)) is not None:
            port.forget()

    def drain(self) -> int | None:
        """Begin no more steps. Return the version, or None while a worker sends its gradient to all servers."""
        self.draining = True
        return None if self.sending else self.require_shard().version

    def leave(self, worker: int) -> Steps[None]:
        """Remove a worker that makes no more steps."""
        if worker not in self.coordinator.live:
            return
        if worker in self.sending:
            raise AllredError(
                f"worker {worker} failed while it sent its gradient. A part of it may be in the sum of step "
                f"{self.require_shard().version}, which cannot be undone. Restart from the last checkpoint"
            )
        self.parked.pop(worker, None)
        self._may_continue.pop(worker, None)
        self.coordinator.leave(worker)
        if not self.draining:
            yield from self._end_step()
        if not self.coordinator.live and self.shard is not None:
            self.statistics.unused = self.shard.added
        self.release()

    def require_shard(self) -> Shard:
        """Return the shard, which exists after the registration."""
        assert self.shard is not None, "a request arrived before the registration"
        return self.shard

    def _reply(self, port: Any, shard: Shard, step: int, flags: int, staleness: int) -> None:
        if self.draining:
            flags |= protocol.DRAINING
        port.answer(protocol.pack_reply(flags, step, shard.version, staleness))

    # Receiving gradients.

    def _push(
        self, worker: int, port: Any, shard: Shard, request: protocol.StepRequest, dropped: bool, gives: bool
    ) -> Steps[None]:
        """Receive the cells of a gradient or of initial parameters. gives: send each cell's parameters back."""
        flags, weight = request.flags, request.weight
        starts = flags & protocol.INIT
        adds = self._averages and not starts
        absent: Collection[int] = ()
        receive: Callable[[int, Any], None]
        update: Update | None = None
        changes = self.locking and not dropped and not adds and (starts or shard.in_place)
        received, has_rows, was_ready = 0, False, False
        try:
            if flags & protocol.TABLES:
                has_rows = yield from self._receive_rows(worker, port, shard, request, dropped)
            if flags & protocol.ABSENT:
                absent = yield from self._receive_absent(port, shard)
            else:
                port.open(shard.layout.up)
            if dropped:
                receive = lambda number, cell: None  # noqa: E731
            elif starts:
                receive = shard.start
            elif adds:
                receive = shard.add if weight == 1.0 else functools.partial(shard.add, weight=weight)
            else:
                update = shard.begin(absent)
                receive = functools.partial(shard.apply, update)
            by_mailbox = isinstance(port, MailboxPort)  # else the worker could not open its mailbox, and uses MPI
            compiled = self.compiled if update is not None and shard.in_place and by_mailbox else None
            while compiled is not None and update is not None and received < len(shard.bytes):
                reached = compiled.apply(update, self.boxes[worker], received, gives)
                if reached is None or (reached == received and was_ready):
                    break
                received, was_ready = reached, False
                if gives:
                    port.note_given(received)
                if received < len(shard.bytes):
                    if self._readers:
                        yield from self._await_readers(received)
                    while port.cell() is None:
                        yield port
                    was_ready = True
            for number, own in enumerate(shard.bytes[received:], received):
                while (cell := port.cell()) is None:
                    yield port
                if changes and self._readers:
                    yield from self._await_readers(number)
                receive(number, cell)
                received += 1
                port.take()
                if gives:
                    while not port.give(own):
                        yield port.room
        except (GeneratorExit, ConnectionResetError):  # the worker is gone
            if has_rows or received:
                if adds and not dropped:
                    self.sending.add(worker)  # servers other than 0 get no BEGIN
                elif has_rows or (update is not None and shard.in_place):
                    self.statistics.torn += not dropped
            raise
        if starts:
            self.starts += 1
        elif adds and not dropped:
            shard.end_add(absent, weight)
            self._in_sum.add(worker)
            yield from self._end_step()
        elif update is not None:
            if not shard.in_place:
                yield from self._await_readers(len(shard.bytes) - 1)
            shard.finish(update)
            self.statistics.updates += 1

    def _receive_rows(
        self, worker: int, port: Any, shard: Shard, request: protocol.StepRequest, dropped: bool
    ) -> Steps[bool]:
        """Receive the gradients of the tables, and apply them, or add them to the sums. Return whether there were
        any."""
        tables = shard.tables
        port.open(np.array([table_cells.header_bytes(len(tables))], np.int64))
        while (cell := port.cell()) is None:
            yield port
        headers = table_cells.unpack_headers(np.array(cell))
        port.take()
        sizes = table_cells.pair_sizes([count for count, _ in headers], [each.form.dim for each in tables])
        port.open(sizes)
        self.statistics.bytes_in += int(sizes.sum())
        received = False
        try:
            for store, (count, lr) in zip(tables, headers, strict=True):
                if lr == lr:
                    store.optimizer.lr = lr
                rule = None if dropped or self._averages else store.begin()
                for start, stop in table_cells.ranges(count, store.form.dim * 4, CELL_BYTES):
                    while (cell := port.cell()) is None:
                        yield port
                    ids = np.array(cell, np.uint8).view(np.uint64)
                    port.take()
                    while (cell := port.cell()) is None:
                        yield port
                    gradients = np.frombuffer(cell, np.float32).reshape(stop - start, store.form.dim)
                    if rule is not None:
                        store.update(rule, ids, gradients)
                    elif not dropped:
                        store.add(ids, gradients, request.weight)
                    received = True
                    port.take()
        except (GeneratorExit, ConnectionResetError):  # the worker is gone
            if received and not dropped:
                if self._averages:
                    self.sending.add(worker)  # servers other than 0 get no BEGIN
                else:
                    self.statistics.torn += 1
            raise
        return received

    def _receive_absent(self, port: Any, shard: Shard) -> Steps[Collection[int]]:
        """Open a push in which some pieces have no gradient, and return their numbers."""
        port.open(np.concatenate([[len(shard.layout.pieces)], shard.layout.up]))
        while (cell := port.cell()) is None:
            yield port
        absent = set(np.flatnonzero(np.frombuffer(cell, np.uint8)).tolist())
        port.take()
        return absent

    def _end_step(self) -> Steps[None]:
        """Apply the mean of a step's gradients if the sum is complete."""
        if self.shard is None or not self.shard.added:
            return
        if self._grace_s is not None:  # only server 0 knows when
            is_complete = self.coordinator.global_step > self.shard.version
        else:
            is_complete = self.shard.added >= (self._aggregate or len(self.coordinator.live | self._in_sum))
        if is_complete:
            yield from self._apply_mean(self.shard)

    def _apply_mean(self, shard: Shard) -> Steps[None]:
        """Apply the mean of the sum. All waits come before it, so a worker that dies cannot cut the update short."""
        yield from self._await_readers(len(shard.bytes) - 1)
        self._in_sum.clear()
        with span("apply", f"the mean of step {shard.version}", shard.bytes_down):
            weights, update = shard.weights, shard.begin_mean()
            for number in range(len(shard.bytes)):
                shard.apply_mean(update, number)
            for store in shard.tables:
                store.apply_mean(weights)
            shard.finish(update)
        self.statistics.updates += 1

    # Sending parameters.

    def _look_up(self, worker: int, port: Any, shard: Shard, request: protocol.StepRequest) -> Steps[None]:
        """Send the vectors of ids."""
        store, train = shard.tables[request.table], bool(request.flags & protocol.TRAIN)
        row_bytes, waits = store.row_bytes, not request.flags & protocol.PREFETCH
        in_memory, number = table_cells.vector_cells(row_bytes, waits), 0
        ranges = table_cells.id_ranges(request.ids)
        port.open(np.array([(stop - start) * table_cells.ID_BYTES for start, stop in ranges], np.int64))
        with span("lookup", store.form.name, request.ids * row_bytes, self._rows[worker]):
            for first, end in ranges:
                while (cell := port.cell()) is None:
                    yield port
                ids = np.array(cell, np.uint8).view(np.uint64)
                port.take()
                for start, stop in table_cells.vector_ranges(end - first, row_bytes):
                    at, before = table_cells.vectors_at(number, row_bytes, waits), number - in_memory
                    while (room := port.room_for(at, (stop - start) * row_bytes, before)) is None:
                        yield port.reading(before, worker)
                    store.lookup_into(ids[start:stop], room, train)
                    while not port.give(room, of_shard=False):
                        yield port.room
                    number += 1
        self.statistics.bytes_out += request.ids * store.row_bytes
        self._reply(port, shard, request.step, 0, 0)

    def _give(self, worker: int, port: Any, shard: Shard) -> Steps[None]:
        with span("pull", "", shard.bytes_down, self._rows[worker]):
            for cell in shard.bytes:
                while not port.give(cell):
                    yield port.room
        self._count_pull(worker, port, shard)

    def _count_pull(self, worker: int, port: Any, shard: Shard) -> None:
        self.statistics.pulls += 1
        self.statistics.bytes_out += shard.bytes_down
        if isinstance(port, MailboxPort):
            self._readers[worker] = port

    def _await_readers(self, number: int) -> Steps[None]:
        """Wait until every pending pull has copied this cell."""
        for worker, port in list(self._readers.items()) if self.locking else ():
            while worker in self._readers and not port.has_read(number):
                yield port.reading(number, worker)
            if port.has_read(len(self.require_shard().bytes) - 1):
                self._readers.pop(worker, None)
