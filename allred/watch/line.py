"""A rank's end of the line to the watcher of its node; the one of this process, if there is one.

The rank says how it is, in JSON; what the watcher has to say comes as a letter and JSON. The kernel signals its coming,
so it is heard while the rank computes or sleeps: the handler, which Python runs between two bytecodes of the main
thread, raises the verdict there. A rank that waits in allred sees it in its loop.
"""

import contextlib
import dataclasses
import faulthandler
import fcntl
import json
import os
import select
import signal
import socket
import time
import types
from collections.abc import Sequence
from typing import Any

from allred.errors import AllredError, CollectiveTimeout, RemoteRankError
from allred.watch.records import LARGEST

WELCOME_S = 10.0
RELEASE_S = 3.0  # more than release.GRACE_S
LOOK_AGAIN_S = 1.0  # for what the signal's handler has read just before a poll
ANSWER_S = 2.0  # for the table of a time limit; more than stalls.LOOK_S

# What is sent around of a traceback (its end) and of other words. JSON makes 12 bytes of a character at most, and all
# together, with the words twice, has to be less than LARGEST.
_TRACEBACK_CHARS, _WORDS_CHARS = 9000, 500
_NAME_CHARS = 200  # of what a rank is known as


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What has ended the job; the same on all ranks."""

    rank: int
    host: str
    code: int
    text: str
    brief: str  # for the last line of the one that ends the job
    traceback: str
    timeout: bool

    def error(self) -> AllredError:
        """The exception that a rank raises for it."""
        if self.timeout:
            return CollectiveTimeout(self.text)
        return RemoteRankError(self.text, self.rank, self.host, self.code, self.traceback)


class Line:
    """The rank's connection, and what has come over it."""

    def __init__(self, name: str, hello: dict[str, Any], speaks: bool, warn_s: float) -> None:
        """Connect. `speaks`: whether this rank tells the user if the watcher dies. `warn_s`: when the watcher warns of
        a wait, in seconds. Raises OSError if there is no connection."""
        self.rank: int = hello["rank"]
        self.warn_s = warn_s
        self.verdict: Verdict | None = None
        self.released = False  # it is this rank's turn to end the job, or it has waited for that long enough
        self.failed = False  # and has said so
        self.gone: dict[int, str] = {}  # spare ranks that have failed or died (spares.py), and how, the first one first
        self.gone_code = 0  # the exit code of the first
        self.dropped: CollectiveTimeout | None = None  # set if the others continue without this rank, which was silent
        self.lingers = False  # for as long as it takes, until the watcher says that the others have ended
        self.waits = False  # in allred: then the waiting loop raises, not the handler
        self._host, self._speaks, self._pid = hello["host"], speaks, os.getpid()
        self.busy = False  # with what must not be cut short: then nothing is raised here
        self._raised = False
        self._again_s = 0.0  # seconds by which the watcher extends a wait that reached its limit
        self._held_at = -RELEASE_S
        self.hushed = False  # the program is at its end: nothing is to be raised in it
        self._pipe = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._wake, self._stack = _free_signals()
        with contextlib.suppress(ValueError):
            signal.signal(self._stack, signal.SIG_IGN)  # what faulthandler puts back
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        faulthandler.register(self._stack, self._pipe[1], all_threads=False)
        hello = {**hello, "stack_signal": self._stack}
        pidfd = os.pidfd_open(self._pid)
        try:
            self._socket.settimeout(WELCOME_S)
            self._socket.connect(name.encode("latin-1"))
            socket.send_fds(self._socket, [json.dumps(hello).encode()], [pidfd, self._pipe[0]])
            if not self._socket.recv(LARGEST):
                raise ConnectionError("it did not accept this rank")
        except OSError:
            self.close()
            raise
        finally:
            os.close(pidfd)
        self._socket.setblocking(False)
        self._signal_what_comes()

    def _signal_what_comes(self) -> None:
        with contextlib.suppress(ValueError):  # in another thread than the main one: then only waits are interrupted
            signal.signal(self._wake, self._on_signal)
            if "PMI_FD" in os.environ and signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:
                signal.signal(signal.SIGUSR1, _nothing)
            fd = self._socket.fileno()
            fcntl.fcntl(fd, fcntl.F_SETOWN, self._pid)
            fcntl.fcntl(fd, fcntl.F_SETSIG, self._wake)
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
            self.read()  # what came before

    def _on_signal(self, number: int, frame: types.FrameType | None) -> None:
        self.read()
        hook = frame is not None and frame.f_globals.get("__name__") == "allred.watch.uncaught"
        if self.has_error and not (self._raised or self.waits or self.busy or self.hushed or hook):
            raise self.error()

    @property
    def has_error(self) -> bool:
        """Whether this rank has to raise an error: the verdict, or `dropped`."""
        return self.verdict is not None or self.dropped is not None

    def pending(self) -> bool:
        """Whether there is a verdict that nobody has raised here: it came in a wait, which then ended well."""
        return self.has_error and not (self._raised or self.hushed)

    def error(self) -> AllredError:
        """Return the exception to raise if `has_error`. The signal handler raises it only if nothing else has."""
        self._raised = True
        if self.verdict is None:
            assert self.dropped is not None
            return self.dropped
        return self.verdict.error()

    def duplicate(self) -> int:
        """A descriptor of the socket that outlives this object; -1 without a watcher."""
        with contextlib.suppress(OSError):  # no descriptor is left
            return os.dup(self._socket.fileno()) if self._alive() else -1
        return -1

    def read(self) -> None:
        """Take what has come."""
        while self._alive():
            try:
                data = self._socket.recv(LARGEST)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                return self._lost()
            self._take(json.loads(data[1:]))

    def _take(self, message: dict[str, Any]) -> None:
        if message["kind"] == "say":
            _print(message["text"])
        elif message["kind"] == "release":
            self.released = True
        elif message["kind"] == "linger":
            self.lingers = True
        elif message["kind"] == "wait on":
            self._again_s = message["again_s"]
        elif message["kind"] == "hold":
            self._held_at = time.monotonic()
        elif message["kind"] == "gone":
            self.gone[message["rank"]] = message["how"]
            self.gone_code = self.gone_code or message["code"]
            if message["rank"] == self.rank and not (self.failed or self.hushed):
                self.dropped = CollectiveTimeout(f"this rank {message['how']}; the others continue without it")
        elif message["kind"] == "verdict" and self.verdict is None:
            fields = {field.name: message[field.name] for field in dataclasses.fields(Verdict)}
            self.verdict = Verdict(**fields)

    def _lost(self) -> None:
        self.close()
        if self._speaks and not self.hushed:
            _print(
                f"the watcher process on {self._host} is gone; training goes on, but a rank that stalls is now noticed "
                "by the time limit only, and one that fails ends the others at once"
            )

    def _alive(self) -> bool:
        return self._socket.fileno() >= 0 and os.getpid() == self._pid

    def tell(self, event: str, **what: Any) -> None:
        """Send an event (job.py lists them)."""
        if self._alive():
            with contextlib.suppress(OSError):
                self._socket.send(json.dumps({"event": event, **what}).encode(), socket.MSG_DONTWAIT)

    def known_as(self, text: str) -> None:
        """Tell what this rank is, for lines about it: a role, and after a ';' what else is worth telling, such as
        `parameter server 0; last checkpoint ckpt/step-00000400`. The text that was told last holds. One message."""
        self.tell("known_as", text=" ".join(text.split())[:_NAME_CHARS])

    def begin_to_fail(self, code: int, words: str, traceback: str = "") -> None:
        """Tell that this rank is about to end with that exit code."""
        self.hushed = self.failed = True
        self.tell("failed", code=code, words=words[:_WORDS_CHARS], traceback=traceback[-_TRACEBACK_CHARS:])

    def fail(self, code: int, words: str, traceback: str) -> None:
        """The same, and linger until it is this rank's turn to end the job, or another's failure came first."""
        self.begin_to_fail(code, words, traceback)
        self._await(RELEASE_S, lambda: self.released or self.lingers or self.is_anothers())
        self._linger_long()
        if self.lingers and not self.released and not self.is_anothers():
            return self.linger()
        self.released = self.released or not self.is_anothers()

    def is_anothers(self) -> bool:
        """Whether another rank has brought the verdict about."""
        return self.verdict is not None and self.verdict.rank != self.rank

    def linger(self) -> None:
        """The program of the rank that brought the verdict about has ended: linger until it is its turn."""
        self.hushed = True
        self.tell("unwound")
        self.await_release()
        self.released = True

    def await_release(self) -> None:
        """Until it is this rank's turn to end the job."""
        if self.verdict is None:
            self._await(RELEASE_S, lambda: self.released or self.lingers or self.verdict is not None)
            self._linger_long()
            self.tell("unwound")
        self._await(RELEASE_S, lambda: self.released)

    def held(self) -> bool:
        """Whether the job is not to end yet, for a rank is busy."""
        self.read()
        return time.monotonic() < self._held_at + RELEASE_S

    def _linger_long(self) -> None:
        """Where the others go on: until they have ended, or the watcher has."""
        while self.lingers and not self.over():
            self._await(LOOK_AGAIN_S, self.over)

    def over(self) -> bool:
        """Whether there is nothing more to linger for: a verdict, the release, or no watcher to wait for."""
        self.read()
        return self.released or self.verdict is not None or not self._alive()

    def limit(self, what: str, limit_s: float, servers: Sequence[int] = (), ranks: Sequence[int] = ()) -> float:
        """Report a wait that has reached its limit, and await the verdict. Returns the seconds for which the wait may
        continue, if another rank is busy or the ranks were not silent for `limit_s`; 0.0 if there is an error to raise
        or no answer. servers, ranks: see the event `limit` of job.py."""
        self._again_s = 0.0
        self.ask_for_verdict(what, limit_s, servers, ranks)
        self._await(ANSWER_S, lambda: self.has_error or self._again_s > 0)
        return 0.0 if self.has_error else self._again_s

    def ask_for_verdict(self, what: str, limit_s: float, servers: Sequence[int], ranks: Sequence[int] = ()) -> None:
        """Report a wait that has reached its limit, without waiting for the answer. Arguments as for `limit`."""
        self.tell("limit", what=what[:_WORDS_CHARS], limit_s=limit_s, servers=list(servers), ranks=list(ranks))

    def watched(self) -> bool:
        """Whether the watcher of this rank is alive."""
        return self._alive()

    def await_verdict(self) -> None:
        """For a moment, where there has to be one soon."""
        self._await(ANSWER_S, lambda: self.verdict is not None)

    def _await(self, seconds: float, come: Any) -> None:
        deadline = time.monotonic() + seconds
        poll = select.poll()  # select() fails where the program has more than 1024 files open
        self.read()
        while not come() and self._alive() and (left := max(deadline, self._held_at + seconds) - time.monotonic()) > 0:
            poll.register(self._socket, select.POLLIN)
            poll.poll(1000 * left)
            self.read()

    def ending(self) -> None:
        """Python is about to end, and with it the handlers: by default these signals would kill the process."""
        self.hushed = True
        self.read()
        self._quiet()

    def _quiet(self) -> None:
        """No more signals. First none is sent: Python prints an error about one that comes as it sets SIG_IGN."""
        faulthandler.unregister(self._stack)
        fd = self._socket.fileno()
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_ASYNC)
        with contextlib.suppress(ValueError):
            signal.signal(self._wake, signal.SIG_IGN)
            signal.signal(self._stack, signal.SIG_IGN)  # it is not yet where init() ran in another thread
            if signal.getsignal(signal.SIGUSR1) is _nothing:
                signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    def close(self) -> None:
        """Hang up."""
        if self._socket.fileno() >= 0:
            self._quiet()
            self._socket.close()
            for end in self._pipe:
                os.close(end)


def _nothing(number: int, frame: types.FrameType | None) -> None:
    """For SIGUSR1, which MPICH's mpirun -disable-auto-cleanup sends to those that survive a rank; it would kill them.
    Not SIG_IGN while the program runs: programs that it starts would inherit that."""


def _free_signals() -> tuple[int, int]:
    """Two real-time signals that this program does not use."""
    free = [number for number in range(signal.SIGRTMAX - 1, signal.SIGRTMIN, -1) if _is_free(number)]
    if len(free) < 2:
        raise OSError("no real-time signal is free")
    return free[0], free[1]


def _is_free(number: int) -> bool:
    return signal.getsignal(number) in (signal.SIG_DFL, signal.SIG_IGN)


def _print(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"allred: {text}\n".encode())
