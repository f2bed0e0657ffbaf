"""The client of the watcher: a rank's connection to the watcher process of its node.

The rank sends events as JSON; the watcher sends messages, a letter followed by JSON. The kernel sends a signal when a
message arrives, so a rank that computes or sleeps receives it: Python runs the handler between two bytecodes of the
main thread, and the handler raises the verdict there. A rank that waits in allred raises it in its wait loop.
"""

import collections
import contextlib
import dataclasses
import errno
import faulthandler
import fcntl
import itertools
import json
import math
import os
import select
import signal
import socket
import struct
import threading
import time
import types
from collections.abc import Callable, Sequence
from typing import Any

from allred import native
from allred.errors import AllredError, CollectiveTimeout, RemoteRankError
from allred.runtime import process_end, timings
from allred.runtime.stderr import rank_warning
from allred.watch import runner_link

_F_SETOWN_EX, _F_OWNER_TID = 15, 0  # of Linux; the module fcntl lacks them


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The failure that ends the job; the same on all ranks."""

    rank: int
    host: str
    code: int
    text: str
    brief: str  # for the last line of the rank that ends the job
    traceback: str
    timeout: bool

    def error(self) -> AllredError:
        """Return the exception that a rank raises for it."""
        if self.timeout:
            return CollectiveTimeout(self.text)
        return RemoteRankError(self.text, self.rank, self.host, self.code, self.traceback)


class WatcherClient:
    """The connection of one rank, and the messages that it has received."""

    _ignores_usr1 = False  # whether an earlier world, not the program, has set SIG_IGN for SIGUSR1

    def __init__(self, name: str, hello: dict[str, Any], counters: int, prints: bool, warn_s: float) -> None:
        """Connect. counters: the descriptor of their memory, or -1. prints: whether this rank prints if the watcher
        dies. warn_s: the seconds after which the watcher warns of a wait. Raises OSError if the connection fails."""
        self.rank: int = hello["rank"]
        self.warn_s = warn_s
        self.verdict: Verdict | None = None
        self.released = False  # this rank may end the job: the watcher says so, or has not answered
        self.failed = False  # and has reported it
        self.gone: dict[int, str] = {}  # expendable ranks that have failed or died, and how, in this order
        self.gone_code = 0  # the exit code of the first
        self.dropped: CollectiveTimeout | None = None  # set if the others continue without this rank, which was silent
        self.lingers = False  # until the watcher says that the others have ended
        self.waits = False  # this rank waits in allred: the wait loop raises, not the handler
        self._host, self._prints, self._pid = hello["host"], prints, os.getpid()
        self._unsent = collections.deque[bytes](maxlen=timings.UNSENT_COUNT)  # events
        self.busy = False  # with work that must not be interrupted: then nothing is raised
        self._raised = False
        self._again_s = 0.0  # seconds by which the watcher extends a wait that reached its limit
        self._requests, self._counted = itertools.count(), dict[int, int | None]()  # of `count`
        self._held_at = -timings.RELEASE_S
        self.on_stop: Callable[[str], None] | None = None  # ends the session after the current step
        self.is_exiting = False  # the program ends: raise nothing in it
        self._pipe = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._wake, self._stack = _free_signals()
        with contextlib.suppress(ValueError):  # not the main thread
            if _may_receive_usr1() and signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:
                signal.signal(signal.SIGUSR1, _ignore)
            signal.signal(self._stack, signal.SIG_IGN)  # the handler that faulthandler restores
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        faulthandler.register(self._stack, self._pipe[1], all_threads=False)
        native.report_mpi_call(self._stack, self._pipe[1])
        hello = {**hello, "stack_signal": self._stack, "main_thread": threading.main_thread().ident}
        pidfd = os.pidfd_open(self._pid)
        try:
            self._socket.settimeout(timings.WELCOME_S)
            self._socket.connect(name.encode("latin-1"))
            files = [pidfd, self._pipe[0], *([counters] if counters >= 0 else [])]
            socket.send_fds(self._socket, [json.dumps(hello).encode()], files)
            if not self._socket.recv(timings.EVENT_BYTES):
                raise ConnectionError("it did not accept this rank")
        except OSError:
            self.close()
            raise
        finally:
            os.close(pidfd)
        self._socket.setblocking(False)
        self._enable_signals()

    @classmethod
    def restore_usr1(cls) -> None:
        """At the start of a world, restore SIG_DFL if an earlier world set SIG_IGN for SIGUSR1. A session would assume
        that the program has set it, and not handle the signal."""
        if cls._ignores_usr1 and signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN:
            with contextlib.suppress(ValueError):  # not the main thread
                signal.signal(signal.SIGUSR1, signal.SIG_DFL)
                cls._ignores_usr1 = False

    def _enable_signals(self) -> None:
        with contextlib.suppress(ValueError):  # not the main thread: then only waits are interrupted
            signal.signal(self._wake, self._on_signal)
            fd = self._socket.fileno()
            # To the main thread only: Python prints an error if another one runs the handler while `_disable_signals`
            # replaces it.
            fcntl.fcntl(fd, _F_SETOWN_EX, struct.pack("ii", _F_OWNER_TID, self._pid))
            fcntl.fcntl(fd, fcntl.F_SETSIG, self._wake)
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
            self.read()  # messages that arrived before

    def _on_signal(self, number: int, frame: types.FrameType | None) -> None:
        self.read()
        hook = frame is not None and frame.f_globals.get("__name__") == "allred.watch.excepthook"
        if self.has_error and not (self._raised or self.waits or self.busy or self.is_exiting or hook):
            raise self.error()

    @property
    def has_error(self) -> bool:
        """Whether this rank has to raise an error: the verdict, or `dropped`."""
        return self.verdict is not None or self.dropped is not None

    def pending(self) -> bool:
        """Whether there is a verdict that was not raised here: it arrived in a wait that then completed."""
        return self.has_error and not (self._raised or self.is_exiting)

    def error(self) -> AllredError:
        """Return the exception to raise if `has_error`. The signal handler raises it only if nothing else has."""
        self._raised = True
        if self.verdict is None:
            assert self.dropped is not None
            return self.dropped
        return self.verdict.error()

    def duplicate(self) -> int:
        """Return a descriptor of the socket that outlives this object; -1 without a watcher."""
        with contextlib.suppress(OSError):  # no descriptor is left
            return os.dup(self._socket.fileno()) if self.is_alive() else -1
        return -1

    def read(self) -> None:
        """Receive all messages that have arrived."""
        self._send_unsent()
        while self.is_alive():
            try:
                data = self._socket.recv(timings.EVENT_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if data:
                self._handle(json.loads(data[1:]))
                continue
            self.close()
            if self._prints and not self.is_exiting:
                rank_warning(
                    f"the watcher process on {self._host} has ended; training continues, but a rank that stalls is now "
                    "detected by the time limit only, and one that fails ends the others at once"
                )

    def _handle(self, message: dict[str, Any]) -> None:
        if message["kind"] == "print":
            rank_warning(message["text"])
        elif message["kind"] == "release":
            self.released = True
        elif message["kind"] == "linger":
            self.lingers = True
        elif message["kind"] == "extend":
            self._again_s = message["again_s"]
        elif message["kind"] == "counted":
            self._counted[message["request"]] = message["before"]
        elif message["kind"] == "threads":  # not in the signal handler of faulthandler: here no other thread runs
            faulthandler.dump_traceback(self._pipe[1], all_threads=True)
        elif message["kind"] == "hold":
            self._held_at = time.monotonic()
        elif message["kind"] == "stop" and self.on_stop is not None:
            self.on_stop(message["reason"])
        elif message["kind"] == "gone":
            self.gone[message["rank"]] = message["how"]
            self.gone_code = self.gone_code or message["code"]
            if message["rank"] == self.rank and not (self.failed or self.is_exiting):
                self.dropped = CollectiveTimeout(f"this rank {message['how']}; the others continue without it")
        elif message["kind"] == "verdict" and self.verdict is None:
            self.verdict = Verdict(**{field.name: message[field.name] for field in dataclasses.fields(Verdict)})
            process_end.call_for_failure()

    def is_alive(self) -> bool:
        return self._socket.fileno() >= 0 and os.getpid() == self._pid

    def send(self, event: str, **what: Any) -> None:
        """Send an event (job_state.py lists them), or keep it for the next call if the watcher does not read."""
        if self.is_alive():
            self._unsent.append(json.dumps({"event": event, **what}).encode())
            self._send_unsent()

    def _send_unsent(self) -> None:
        while self.is_alive():
            try:
                event = self._unsent.popleft()
            except IndexError:  # this may run in a signal handler or another thread meanwhile
                return
            try:
                self._socket.send(event, socket.MSG_DONTWAIT)
            except OSError as error:
                if error.errno in (errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM):
                    return self._unsent.appendleft(event)
                with contextlib.suppress(OSError):  # the watcher then no longer relies on the events of this rank
                    self._socket.shutdown(socket.SHUT_RDWR)

    def count(self, name: str, number: int, limit_s: float) -> int:
        """Add a number to a counter of the job, and return its value before. Raises the verdict, or AllredError without
        an answer in `limit_s` seconds."""
        request = next(self._requests)
        self.send("count", name=name, number=number, request=request)
        self._await(limit_s, lambda: request in self._counted or self.has_error, timings.POLL_S)
        before = self._counted.pop(request, None)
        if before is not None and not self.pending():
            return before
        if self.has_error:
            raise self.error()
        raise AllredError(
            f"SharedCounter({name!r}): no answer in {limit_s:g} s, or the watcher process of this node or of the "
            "chief's node has ended"
        )

    def set_role(self, text: str) -> None:
        """Set the text of this rank in messages: its role, and after a ';' more for a failure, such as
        `parameter server 0; last checkpoint ckpt/step-00000400`. The last text counts."""
        self.send("role", text=" ".join(text.split())[: timings.ROLE_CHARS])

    def report_session(self, step: int, on_stop: Callable[[str], None] | None) -> None:
        """Report that a session begins or ends at this step. on_stop: called with the reason if the session has to end
        after the current step; None: it ends now."""
        self.on_stop = on_stop
        self.send("session", step=step, is_open=on_stop is not None)

    def report_failure(self, code: int, words: str, traceback: str = "") -> None:
        """Report that this rank is about to end with that exit code."""
        self.is_exiting = self.failed = True
        self.send(
            "failed", code=code, words=words[: timings.WORDS_CHARS], traceback=traceback[-timings.VERDICT_CHARS :]
        )

    def fail(self, code: int, words: str, traceback: str) -> None:
        """As `report_failure`; then linger until this rank may end the job, or another rank's failure came first."""
        self.report_failure(code, words, traceback)
        self._await(timings.RELEASE_S, lambda: self.released or self.lingers or self.failed_elsewhere())
        self._linger_while_others_run()
        if self.lingers and not self.released and not self.failed_elsewhere():
            self.linger()
        self.released = self.released or not self.failed_elsewhere()

    def failed_elsewhere(self) -> bool:
        """Whether another rank caused the verdict."""
        return self.verdict is not None and self.verdict.rank != self.rank

    def linger(self) -> None:
        """Linger until this rank may end the job. For the rank that caused the verdict, after its program has ended."""
        self.is_exiting = True
        self.send("unwound")
        self.await_release()
        self.released = True

    def await_release(self) -> None:
        """Wait until this rank may end the job."""
        if self.verdict is None:
            self._await(timings.RELEASE_S, lambda: self.released or self.lingers or self.verdict is not None)
            self._linger_while_others_run()
            self.send("unwound")
        self._await(timings.RELEASE_S, lambda: self.released)

    def end_is_delayed(self) -> bool:
        """Whether the end of the job is delayed, because a rank is busy."""
        self.read()
        return time.monotonic() < self._held_at + timings.RELEASE_S

    def _linger_while_others_run(self) -> None:
        """Wait while the others continue: until they have ended, or the watcher has."""
        while self.lingers and not self.linger_is_over():
            self._await(timings.LINGER_READ_S, self.linger_is_over)

    def linger_is_over(self) -> bool:
        """Whether there is a verdict, the release, or no watcher."""
        self.read()
        return self.released or self.verdict is not None or not self.is_alive()

    def await_limit_verdict(
        self, what: str, limit_s: float, servers: Sequence[int], ranks: Sequence[int], earlier: str = ""
    ) -> float:
        """Report a wait that has reached its limit, and await the verdict. Returns the seconds for which the wait may
        continue, if another rank is busy or the ranks were not silent for `limit_s`; 0.0 if there is an error to raise
        or no answer. servers, ranks, earlier: see the event `limit` of job_state.py."""
        self._again_s = 0.0
        self.report_limit(what, limit_s, servers, ranks, earlier)
        self._await(timings.LIMIT_VERDICT_S, lambda: self.has_error or self._again_s > 0)
        return 0.0 if self.has_error else self._again_s

    def report_limit(
        self, what: str, limit_s: float, servers: Sequence[int], ranks: Sequence[int] = (), earlier: str = ""
    ) -> None:
        """Report a wait that has reached its limit. Arguments as for `await_limit_verdict`."""
        more = {"servers": list(servers), "ranks": list(ranks), "earlier": earlier}
        self.send("limit", what=what[: timings.WORDS_CHARS], limit_s=limit_s, **more)

    def await_verdict(self) -> None:
        """Wait for a verdict, at most LIMIT_VERDICT_S seconds."""
        self._await(timings.LIMIT_VERDICT_S, lambda: self.verdict is not None)

    def _await(self, seconds: float, done: Any, period_s: float = math.inf) -> None:
        begin = time.monotonic()
        poll = select.poll()  # select() fails where the program has more than 1024 files open
        self.read()
        while not done() and self.is_alive() and (left := max(begin, self._held_at) + seconds - time.monotonic()) > 0:
            poll.register(self._socket, select.POLLIN)
            poll.poll(1000 * min(left, period_s))
            self.read()

    def ending(self) -> None:
        """Disable the signals before Python ends: without its handlers they would kill the process."""
        self.is_exiting = True
        self.read()
        if self._socket.fileno() >= 0:  # else `close` has disabled them
            self._disable_signals()

    def _disable_signals(self) -> None:
        """Disable the signals. First stop the sending: Python prints an error if one arrives while it sets SIG_IGN."""
        faulthandler.unregister(self._stack)
        fd = self._socket.fileno()
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_ASYNC)
        with contextlib.suppress(ValueError):
            signal.signal(self._wake, signal.SIG_IGN)
            signal.signal(self._stack, signal.SIG_IGN)  # not set yet if init() ran in another thread
            if signal.getsignal(signal.SIGUSR1) is _ignore:
                signal.signal(signal.SIGUSR1, signal.SIG_IGN)
                WatcherClient._ignores_usr1 = True

    def close(self) -> None:
        if self._socket.fileno() >= 0:
            self._disable_signals()
            self._socket.close()
            for end in self._pipe:
                os.close(end)


def _may_receive_usr1() -> bool:
    """Whether the launcher sends SIGUSR1: MPICH's mpirun -disable-auto-cleanup to the ranks that survive another, and
    `allred run`, which repeats it when a session begins."""
    return "PMI_FD" in os.environ or bool(runner_link.address())


def _ignore(number: int, frame: types.FrameType | None) -> None:
    """The handler of SIGUSR1, which would kill this rank. SIG_IGN would be inherited by programs that it starts."""


def _free_signals() -> tuple[int, int]:
    """Return two real-time signals that this program does not use."""
    unused = signal.SIG_DFL, signal.SIG_IGN
    free = [number for number in range(signal.SIGRTMAX - 1, signal.SIGRTMIN, -1) if signal.getsignal(number) in unused]
    if len(free) < 2:
        raise OSError("no real-time signal is free")
    return free[0], free[1]
