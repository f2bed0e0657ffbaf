"""A parameter server: one thread, one loop, that takes requests in turn until the last worker has left.

With use_locking (the default) a request is done to its end before the next begins. Without, requests take turns cell
by cell, as in Hogwild: nobody waits for anybody, and a pull may mix versions. Where gradients are gathered before they
are applied (policy sync, optimizers that need whole tensors) requests are always done one by one.
"""

import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from allred import native, world
from allred.comm.work import Steps, spin_wait
from allred.errors import AllredError
from allred.ps.calls import Call, Calls
from allred.ps.drive import drive
from allred.ps.post import CALL, STEP, MpiPort, Post
from allred.ps.record import unpack_request
from allred.ps.running import Running
from allred.ps.service import Service
from allred.ps.shard import locks
from allred.ps.stalls import Stalls
from allred.watch.wait import Awaited

_END_S = 2.0  # for answers that are still under way when the last worker has left; one that has failed takes none
_NAP_US = 5000  # at most, on the mailboxes' bell, before messages by MPI are looked for
_AWAKE_S = 0.1  # where there are no mailboxes: how long to go on looking without requests, before sleeping
_IN_A_ROW = 16  # requests from mailboxes, before messages by MPI are looked for
_SLEEP_SHARE, _LONGEST_SLEEP_S = 0.01, 0.01  # then for this part of the time since the last one


class _GoneError(AllredError):
    """The worker whose turn it is has died."""


class _Turn:
    """Something to do for a worker; None: because one has left."""

    def __init__(self, worker: int | None, steps: Steps[None]) -> None:
        self.worker, self.steps = worker, steps
        self.pending: Any = None  # what it waits for

    def advance(self) -> bool:
        """Go on as far as it goes without waiting; True at its end."""
        try:
            while self.pending is None or self.pending.done():
                self.pending = next(self.steps)
        except StopIteration:
            return True
        except ConnectionResetError:  # its worker has died, which will be heard of
            self.end()
            return True
        return False

    def end(self) -> None:
        """There is nobody to do the rest for."""
        self.steps.close()

    def rest(self) -> Steps[None]:
        """What is left to do, with what it waits for."""
        yield self.pending
        for pending in self.steps:
            self.pending = pending
            yield pending

    def awaited(self) -> int | None:
        """The worker that this turn waits for: another worker that copies a cell, else the worker of the request."""
        other: int | None = getattr(self.pending, "worker", None)
        return self.worker if other is None else other


class Server:
    """`optimizer`: this rank's own. `policy`: one of consistency.py. settings: what workers must agree on, in words.
    calls: Calls, or what takes more of them."""

    def __init__(
        self, running: Running, optimizer: Any, policy: Any, use_locking: bool, settings: str,
        calls: Callable[..., Calls] = Calls,
    ) -> None:  # fmt: skip
        self._running, self._policy = running, policy
        self._locking = locks(use_locking, policy, optimizer)
        self._post = Post(running.comm)
        self._workers = set(range(running.workers))
        self._turns: deque[_Turn] = deque()
        self._service = Service(
            running.rank, policy, running.workers, self._locking,
            later=lambda worker, steps: self._turns.append(_Turn(worker, steps)), started=lambda: self._calls.started(),
        )  # fmt: skip
        self._calls = calls(running, self._post, self._service, optimizer, settings, self._leave)
        self._mpi_ports: dict[int, MpiPort] = {}  # of workers that have sent a step by MPI
        self._stalls = Stalls(running, time.monotonic())
        self._process = os.getpid()
        self._first = 0  # where to look for the next one, in turn
        self._in_a_row = 0  # requests from mailboxes, since messages by MPI were looked for
        self._tags = [STEP, CALL]  # the kind of message to look for first comes first

    def serve(self, first: Call | None = None) -> None:
        """Until the last worker has left. first: a call of worker 0 that has come already."""
        if first is not None:
            self._turns.append(_Turn(0, self._calls.answer(self._running.servers, first)))
        with contextlib.suppress(ValueError):  # in another thread than the main one there are no handlers
            signal.signal(signal.SIGTERM, self._drain)
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                signal.signal(signal.SIGINT, self._drain)  # the first one: mpirun sends it to workers too
        while self._workers or self._turns:
            self._mourn()
            self._check_stalls(waits_here=True)
            if self._service.draining:
                self._service.let_go()
            if self._locking:
                if not self._turns:
                    self._look(wait=True)
                while self._turns:
                    self._run(self._turns.popleft())
            else:
                self._look(wait=not self._turns)
                self._advance_all()
        until = time.monotonic() + _END_S
        while not self._post.tend() and time.monotonic() < until:
            pass

    def _drain(self, number: int, frame: Any) -> None:
        if os.getpid() == self._process:
            self._service.draining = True
            if number == signal.SIGINT:
                signal.signal(number, signal.default_int_handler)
        else:  # a process that was forked from this one
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _advance_all(self) -> None:
        """A part of each turn; what comes of it has its turn after them."""
        turns, self._turns = self._turns, deque()
        left = [turn for turn in turns if not turn.advance()]
        for turn in left:
            if not self._lives(turn):
                turn.end()
        self._turns.extendleft(turn for turn in reversed(left) if self._lives(turn))

    def _lives(self, turn: _Turn) -> bool:
        """Whether there is still somebody to do it for."""
        return turn.worker is None or turn.worker in self._workers

    def _run(self, turn: _Turn) -> None:
        """To its end, waiting for its worker where that is slow."""
        try:
            while not turn.advance():
                if not turn.pending.spin_wait():
                    self._wait_for(turn)
                    return
        except (_GoneError, ConnectionResetError):  # in the latter case it will be heard of
            turn.end()

    def _wait_for(self, turn: _Turn) -> None:
        def check() -> None:
            self._mourn()
            self._check_stalls(waits_here=False)
            if not self._lives(turn):
                raise _GoneError

        def ranks() -> Sequence[int]:
            worker = turn.awaited()
            return [] if worker is None else [worker + self._running.servers]

        title = "the leave of a worker" if turn.worker is None else f"a request of worker {turn.worker}"
        drive(title, turn.rest(), self._running.config.timeout_s, check=check, awaited=Awaited(ranks=ranks))

    # Who is next.

    def _look(self, wait: bool) -> None:
        """Take a new request, if there is one; wait for one for a moment at most."""
        boxes = self._calls.boxes
        if self._in_a_row >= _IN_A_ROW and self._arrived():
            return None
        if boxes:
            napping = wait and not self._mpi_ports and len(boxes) == len(self._workers)
            found = native.Mailbox.wait_any(boxes, _NAP_US if napping else 0, (self._first + 1) % len(boxes))
            if found >= 0:
                self._first = found
                self._in_a_row += 1
                worker = self._calls.box_workers[found]
                return self._take(worker, self._calls.ports[worker], boxes[found].poll())
        if self._arrived() or not wait:
            return
        now = time.monotonic()
        idle_s = self._stalls.silent_s(now)
        self._stalls.idle(self._service.waits, now)
        if not spin_wait(self._arrived) and idle_s > _AWAKE_S:
            time.sleep(min(_SLEEP_SHARE * idle_s, _LONGEST_SLEEP_S))

    def _arrived(self) -> bool:
        """Take a message that has come by MPI: a step and a call in turn, where there are both."""
        self._in_a_row = 0
        for tag in self._tags:
            source = self._post.arrived(tag)
            if source is not None:
                self._tags = [CALL, STEP] if tag == STEP else [STEP, CALL]
                self._take_message(source, tag)
                return True
        return False

    def _take_message(self, source: int, tag: int) -> None:
        worker = source - self._running.servers
        if tag == CALL:
            self._stalls.heard(worker, time.monotonic())
            self._turns.append(_Turn(worker, self._calls.answer(source)))
        elif worker not in self._workers:  # the others have continued without it, and it does not know that yet
            self._post.receive_record(source, STEP)
        else:
            port = self._mpi_ports.setdefault(worker, MpiPort(self._post, source))
            self._take(worker, port, self._post.receive_record(source, STEP))

    def _take(self, worker: int, port: Any, record: bytes) -> None:
        self._stalls.heard(worker, time.monotonic())
        self._turns.append(_Turn(worker, self._service.step(worker, port, unpack_request(record))))

    def _check_stalls(self, waits_here: bool) -> None:
        now = time.monotonic()
        if self._stalls.due(now):
            self._stalls.look(self._calls.awaited(self._workers), self._calls.at_the_end(), waits_here, now)

    # Who is gone.

    def _mourn(self) -> None:
        """Let go of workers that have failed or died, where that does not end the job."""
        if (watcher := world.watcher()) is not None and watcher.gone:
            for rank in list(watcher.gone):
                self._leave(rank - self._running.servers)

    def _leave(self, worker: int) -> None:
        if worker in self._workers:
            self._workers.discard(worker)
            self._calls.forget(worker)
            self._mpi_ports.pop(worker, None)
            self._service.forget(worker)
            self._turns.append(_Turn(None, self._let_leave(worker)))

    def _let_leave(self, worker: int) -> Steps[None]:
        yield from self._service.leave(worker)
        self._calls.gone(worker)  # after it: the last one's leave may end a step, or count what is left of one
