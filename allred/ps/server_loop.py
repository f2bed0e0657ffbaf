"""Loop of a parameter server: one thread that handles requests until the last worker has left.

With use_locking (the default) a request is completed before the next begins. Without it, requests take turns cell by
cell, as in Hogwild: no worker waits for another, and a pull may mix versions. Where gradients are collected before they
are applied (policy sync, optimizers that need whole tensors) requests are always handled one by one.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from allred import native, world
from allred.comm.work import spin_wait
from allred.errors import AllredError, CollectiveTimeout
from allred.ps.context import Context
from allred.ps.control import Control
from allred.ps.mpi_transport import CALL, STEP, MpiPort, MpiTransport
from allred.ps.protocol import ControlRequest, unpack_request
from allred.ps.run_steps import run_steps
from allred.ps.step_handler import StepHandler, Turn
from allred.runtime.timings import LAST_MESSAGE_S, SILENT_WORKER_S, SILENT_WORKER_TICK_S
from allred.watch.wait import Awaited
from allred.wording import named

_NAP_US = 5000  # longest sleep on the doorbell of the mailboxes before MPI is tested
_AWAKE_S = 0.1  # without mailboxes: time without requests before the loop sleeps between tests
_POLL_US = 20  # longest wait for the mailboxes, if MPI is tested all the time
_IN_A_ROW = 16  # requests from mailboxes before MPI is tested
_SLEEP_SHARE, _LONGEST_SLEEP_S = 0.01, 0.01  # such a sleep, as a share of the time since the last request; its limit


class _GoneError(AllredError):
    """The worker of the current request has died."""


class ServerLoop:
    """The loop of one server.

    optimizer: this rank's own. policy: of consistency.py. agreement: the options that must be equal on all ranks.
    """

    def __init__(self, context: Context, optimizer: Any, policy: Any, use_locking: bool, agreement: str) -> None:
        self._context = context
        self._transport = MpiTransport(context.comm)
        self.step_handler = StepHandler(context.rank, policy, context.workers, use_locking)
        self.control = Control(context, self._transport, self.step_handler, optimizer, policy, agreement)
        self._turns = self.step_handler.turns
        self._mpi_ports: dict[int, MpiPort] = {}  # of workers that have sent a step by MPI
        self._silent = SilentWorkers(context, time.monotonic())
        self._process = os.getpid()
        self._first = 0  # the mailbox that was served last
        self._in_a_row = 0  # requests from mailboxes since MPI was tested
        self._tags = [STEP, CALL]  # the kinds of messages, in the order in which to test for them

    def serve(self, first: ControlRequest | None = None) -> None:
        """Serve until the last worker has left. first: a request of worker 0 that was received before."""
        if first is not None:
            self._turns.append(Turn(0, self.control.handle(self._context.servers, first)))
        with contextlib.suppress(ValueError):  # only the main thread can set handlers
            signal.signal(signal.SIGTERM, self._on_signal)
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                signal.signal(signal.SIGINT, self._on_signal)  # the first one: mpirun sends it to workers too
        while self.control.live or self._turns:
            self._remove_dead_workers()
            self._check_silent(waits_here=True)
            if self.step_handler.draining:
                self.step_handler.release()
            self.step_handler.end_grace(time.monotonic())
            if self.step_handler.locking:
                if not self._turns:
                    self._receive(wait=True)
                while self._turns:
                    self._run(self._turns.popleft())
            else:
                self._receive(wait=not self._turns)
                self._advance_all()
            if self.control.waiting:
                self.control.retry()
        self._transport.flush(LAST_MESSAGE_S)

    def _on_signal(self, number: int, frame: Any) -> None:
        if os.getpid() == self._process:
            self.step_handler.draining = True
            if number == signal.SIGINT:
                signal.signal(number, signal.default_int_handler)
        else:  # a process that was forked from this one
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _advance_all(self) -> None:
        """Advance each request; the requests that result from it come after them."""
        left = []
        for turn in [self._turns.popleft() for _ in range(len(self._turns))]:
            if not turn.advance():
                left.append(turn)
        for turn in left:
            if not self._is_live(turn):
                turn.cancel()
        self._turns.extendleft(turn for turn in reversed(left) if self._is_live(turn))

    def _is_live(self, turn: Turn) -> bool:
        return turn.worker is None or turn.worker in self.control.live

    def _run(self, turn: Turn) -> None:
        """Complete a request, and wait for its worker if needed."""
        try:
            while not turn.advance():
                if not turn.pending.spin_wait():
                    self._wait_for(turn)
                    return
        except (_GoneError, ConnectionResetError):  # the watcher reports a worker that has died
            turn.cancel()

    def _wait_for(self, turn: Turn) -> None:
        def check() -> None:
            self._remove_dead_workers()
            self._check_silent(waits_here=False)
            if not self._is_live(turn):
                raise _GoneError

        def ranks() -> Sequence[int]:
            worker = turn.awaited_worker()
            return [] if worker is None else [worker + self._context.servers]

        title = "the leave of a worker" if turn.worker is None else f"a request of worker {turn.worker}"
        run_steps(title, turn.rest(), self._context.config.timeout_s, check=check, awaited=Awaited(ranks=ranks))

    # Receiving requests.

    def _receive(self, wait: bool) -> None:
        """Receive a new request if there is one. wait: wait for one for a moment."""
        boxes = self.control.boxes
        if self._in_a_row >= _IN_A_ROW and self._receive_message():
            return
        if boxes:
            napping = wait and not self._mpi_ports and len(boxes) == len(self.control.live)
            if wait and self._serve_compiled(_NAP_US if napping else _POLL_US):
                return
            found = native.Mailbox.wait_any(boxes, _NAP_US if napping else 0, (self._first + 1) % len(boxes))
            if found >= 0:
                self._first = found
                self._in_a_row += 1
                worker = self.control.box_workers[found]
                self._start_step(worker, self.control.ports[worker], boxes[found].poll())
                return
        if self._receive_message() or not wait:
            return
        now = time.monotonic()
        idle_s = self._silent.idle_s(now)
        self._silent.report_idle(self.step_handler.describe_waits, now)
        if not spin_wait(self._receive_message) and idle_s > _AWAKE_S:
            time.sleep(min(_SLEEP_SHARE * idle_s, _LONGEST_SLEEP_S))

    def _serve_compiled(self, limit_us: int) -> bool:
        """Serve steps in C, until another request arrives from a mailbox, for at most `limit_us`. Return whether there
        was a request."""
        handler, workers = self.step_handler, self.control.box_workers
        if handler.compiled is None or handler.draining or handler.parked:
            return False
        first, chief = (self._first + 1) % len(workers), handler.boxes.get(0, -1)
        if (served := handler.compiled.serve(limit_us, first, chief, handler.coordinator)) is None:
            return False
        if served.by_worker:
            handler.note_served(served, self.control.ports)
            now = time.monotonic()
            for worker, _ in served.by_worker:
                self._silent.record_request(worker, now)
            self._in_a_row = _IN_A_ROW
        if served.record is not None:
            self._first = served.box
            self._in_a_row += 1
            worker = workers[served.box]
            self._start_step(worker, self.control.ports[worker], served.record)
        return served.record is not None or bool(served.by_worker)

    def _receive_message(self) -> bool:
        """Receive a message by MPI if there is one. Steps and control requests take turns."""
        self._in_a_row = 0
        for tag in self._tags:
            source = self._transport.arrived(tag)
            if source is not None:
                self._tags = [CALL, STEP] if tag == STEP else [STEP, CALL]
                self._start_request(source, tag)
                return True
        return False

    def _start_request(self, source: int, tag: int) -> None:
        worker = source - self._context.servers
        if tag == CALL:
            self._silent.record_request(worker, time.monotonic())
            self._turns.append(Turn(worker, self.control.handle(source)))
        elif worker not in self.control.live:  # it was removed, and does not know that yet
            self._transport.receive_record(source, STEP)
        else:
            port = self._mpi_ports.setdefault(worker, MpiPort(self._transport, source))
            self._start_step(worker, port, self._transport.receive_record(source, STEP))

    def _start_step(self, worker: int, port: Any, record: bytes) -> None:
        self._silent.record_request(worker, time.monotonic())
        self._turns.append(Turn(worker, self.step_handler.step(worker, port, unpack_request(record))))

    # Checks.

    def _check_silent(self, waits_here: bool) -> None:
        now = time.monotonic()
        if self._silent.due(now):
            self._silent.check(self.control.awaited(), self.control.at_end(), waits_here, now)

    def _remove_dead_workers(self) -> None:
        """Remove workers that have failed or died, where the others continue."""
        if (watcher := world.watcher()) is not None and watcher.gone:
            for rank in list(watcher.gone):
                self.control.remove(rank - self._context.servers)
        if self._mpi_ports and not self._mpi_ports.keys() <= self.control.live:
            self._mpi_ports = {worker: port for worker, port in self._mpi_ports.items() if worker in self.control.live}


class SilentWorkers:
    """Detection of workers that make no request while others wait for them. now: the time of one clock, in seconds.

    While the server holds replies back, it sends its watcher every second the workers that cause this, and the seconds
    since the last request of each (event `holds`), from which the watcher computes the time limits of the other
    workers. A worker that waits at its end cannot warn or end the job itself; the server does both for it.
    """

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

    def record_request(self, worker: int, now: float) -> None:
        self._last[worker] = self._last_of_all = now
        if self._reported and (not self._reported_workers or worker in self._reported_workers):
            self._report_end()

    def idle_s(self, now: float) -> float:
        """Return the seconds since the last request of any worker."""
        return now - self._last_of_all

    def report_idle(self, describe_waits: Callable[[], str], now: float) -> None:
        """Report that there is no request. describe_waits: returns which workers wait for which, or ""."""
        watcher = world.watcher()
        report_s = SILENT_WORKER_S if watcher is None else min(SILENT_WORKER_S, watcher.warn_s / 2)
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
        watcher = world.watcher()
        warn_s = SILENT_WORKER_TICK_S if watcher is None else watcher.warn_s
        self._next = now + min(SILENT_WORKER_TICK_S, warn_s / 4, self._timeout_s / 8)
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
        late = [
            worker for worker, for_s in silent.items() if for_s > min(SILENT_WORKER_S, warn_s / 2, self._timeout_s / 2)
        ]
        if not late:
            return
        has, its, waits = ("has", "its", "waits") if len(ended) == 1 else ("have", "their", "wait")
        what = f"service: {named('worker', ended)} {has} made {its} last step, and {waits} for {named('worker', late)}"
        if late != self._reported_workers:
            self._report_wait(what, max(silent.values()), late, quiet=False)
        if max(silent.values()) >= self._timeout_s:
            self._end_job(what, late)

    def _end_job(self, what: str, late: list[int]) -> None:
        if (watcher := world.watcher()) is not None and watcher.is_alive():
            watcher.report_limit(what, self._timeout_s, [self._server])
            return
        raise CollectiveTimeout(
            f"{what}: {named('worker', late)} made no request for {self._timeout_s:g} s; it is late, stopped or dead. "
            "If such a pause is intended, increase ALLRED_TIMEOUT_S"
        )

    def _report_holds(self, awaited: Collection[int], now: float) -> None:
        watcher = world.watcher()
        if watcher is not None and (awaited or self._holds):
            silent = {self._ranks[worker]: round(now - self._last[worker], 1) for worker in awaited}
            watcher.send("holds", silent=silent)
            watcher.read()
            if watcher.pending():
                raise watcher.error()
        self._holds = bool(awaited)

    def _report_wait(self, what: str, since_s: float, late: list[int], quiet: bool) -> None:
        if (watcher := world.watcher()) is not None:
            self._reported, self._reported_workers = what, late
            watcher.send("waiting", what=self._reported, since_s=since_s, peers=False, quiet=quiet)

    def _report_end(self) -> None:
        if (watcher := world.watcher()) is not None:
            watcher.send("resumed")
        self._reported, self._reported_workers = "", []
