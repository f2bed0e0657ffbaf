"""A parameter server: one thread, one loop, that takes requests in turn until the last worker has left.

With use_locking (the default) a request is done to its end before the next begins. Without, requests take turns cell
by cell, as in Hogwild: nobody waits for anybody, and a pull may mix versions.
"""

import contextlib
import signal
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from allred import native
from allred.comm.work import Steps, linger
from allred.errors import AllredError
from allred.ps.calls import Calls, name_this
from allred.ps.drive import drive
from allred.ps.post import CALL, STEP, MpiPort, Post
from allred.ps.record import unpack_request
from allred.ps.running import Running
from allred.ps.service import Service
from allred.watch import line

_NAP_US = 5000  # at most, on the mailboxes' bell, before messages by MPI are looked for
_AWAKE_S = 0.1  # where there are no mailboxes: how long to go on looking without requests, before sleeping
_SLEEP_SHARE, _LONGEST_SLEEP_S = 0.01, 0.01  # then for this part of the time since the last one


class _GoneError(AllredError):
    """The worker whose turn it is has died."""


class _Turn:
    """Something to do for a worker."""

    def __init__(self, worker: int, steps: Steps[None]) -> None:
        self.worker, self.steps = worker, steps
        self.pending: Any = None  # what it waits for

    def advance(self) -> bool:
        """Go on as far as it goes without waiting; True at its end."""
        try:
            while self.pending is None or self.pending.done():
                self.pending = next(self.steps)
        except StopIteration:
            return True
        return False

    def rest(self) -> Steps[None]:
        """What is left to do, with what it waits for."""
        yield self.pending
        yield from self.steps


class Server:
    """`optimizer`: this rank's own. `policy`: one of consistency.py. settings: what workers must agree on, in words.
    calls: Calls, or what takes more of them."""

    def __init__(
        self, running: Running, optimizer: Any, policy: Any, use_locking: bool, settings: str,
        calls: Callable[..., Calls] = Calls,
    ) -> None:  # fmt: skip
        self._running, self._policy, self._locking = running, policy, use_locking
        self._post = Post(running.comm)
        self._workers = set(range(running.workers))
        self._turns: deque[_Turn] = deque()
        self._service = Service(
            running.rank, policy, running.workers, use_locking,
            later=lambda worker, steps: self._turns.append(_Turn(worker, steps)), started=lambda: self._calls.started(),
        )  # fmt: skip
        self._calls = calls(running, self._post, self._service, optimizer, settings, self._leave)
        self._mpi_ports: dict[int, MpiPort] = {}  # of workers that have sent a step by MPI
        self._last_request = time.monotonic()
        self._first = 0  # where to look for the next one, in turn

    def serve(self) -> None:
        """Until the last worker has left."""
        name_this(f"parameter server {self._running.rank}")
        with contextlib.suppress(ValueError):  # in another thread than the main one there are no handlers
            signal.signal(signal.SIGTERM, self._drain)
        while self._workers or self._turns:
            self._mourn()
            if self._locking:
                if not self._turns:
                    self._look(wait=True)
                while self._turns:
                    self._run(self._turns.popleft())
            else:
                self._look(wait=not self._turns)
                for turn in list(self._turns):
                    if turn.advance():
                        self._turns.remove(turn)
        while not self._post.tend():
            pass

    def _drain(self, number: int, frame: Any) -> None:
        self._service.draining = True

    def _run(self, turn: _Turn) -> None:
        """To its end, waiting for its worker where that is slow."""
        try:
            while not turn.advance():
                if not turn.pending.linger():
                    self._wait_for(turn)
                    return
        except (_GoneError, ConnectionResetError):  # in the latter case it will be heard of
            self._service.account.torn += 1

    def _wait_for(self, turn: _Turn) -> None:
        def check() -> None:
            self._mourn()
            if turn.worker not in self._workers:
                raise _GoneError

        drive(f"a request of worker {turn.worker}", turn.rest(), self._running.config.timeout_s, check=check)

    # Who is next.

    def _look(self, wait: bool) -> None:
        """Take a new request, if there is one; wait for one for a moment at most."""
        boxes = self._calls.boxes
        if boxes:
            napping = wait and not self._mpi_ports and len(boxes) == len(self._workers)
            found = native.Mailbox.wait_any(boxes, _NAP_US if napping else 0, (self._first + 1) % len(boxes))
            if found >= 0:
                self._first = found
                worker = self._calls.box_workers[found]
                return self._take(worker, self._calls.ports[worker], boxes[found].poll())
        if self._arrived() or not wait:
            return
        idle_s = time.monotonic() - self._last_request
        if not linger(self._arrived) and idle_s > _AWAKE_S:
            time.sleep(min(_SLEEP_SHARE * idle_s, _LONGEST_SLEEP_S))

    def _arrived(self) -> bool:
        """Take a message that has come by MPI."""
        source = self._post.arrived(STEP)
        if source is not None:
            worker = source - self._running.servers
            port = self._mpi_ports.setdefault(worker, MpiPort(self._post, source))
            self._take(worker, port, self._post.receive_record(source, STEP))
            return True
        source = self._post.arrived(CALL)
        if source is not None:
            self._last_request = time.monotonic()
            self._turns.append(_Turn(source - self._running.servers, self._calls.answer(source)))
        return source is not None

    def _take(self, worker: int, port: Any, record: bytes) -> None:
        self._last_request = time.monotonic()
        self._turns.append(_Turn(worker, self._service.step(worker, port, unpack_request(record))))

    # Who is gone.

    def _mourn(self) -> None:
        """Let go of workers that have failed or died, where that does not end the job."""
        if line.current is not None and line.current.gone:
            for rank in list(line.current.gone):
                worker = rank - self._running.servers
                for turn in [turn for turn in self._turns if turn.worker == worker and worker in self._workers]:
                    self._turns.remove(turn)
                    self._service.account.torn += 1
                self._leave(worker)

    def _leave(self, worker: int) -> None:
        if worker in self._workers:
            self._workers.discard(worker)
            self._calls.forget(worker)
            self._mpi_ports.pop(worker, None)
            self._turns.append(_Turn(worker, self._service.leave(worker)))
