"""A task that was started by hand, until all are there: it waits at the first task's address, and says for whom.

What comes of it are two connections to the process there (process.py): one for MPI's start, which speaks PMI-1, and one
that tells of this task's life and the others' death while they are inside MPI.
"""

import contextlib
import dataclasses
import os
import socket
import time
from collections.abc import Mapping
from typing import Any

from allred import detached
from allred.channel import AUTHENTICATE_S, Channel, HandshakeError, connect
from allred.cluster import report
from allred.errors import AllredError, CollectiveTimeout, ConfigError
from allred.launch import places
from allred.launch.meeting import PURPOSE
from allred.launch.places import Place

TELL_S = 5.0  # how often to say for whom this task waits
_AGAIN_S = 0.2  # from one knock at the first task's address to the next


@dataclasses.dataclass(frozen=True)
class Joined:
    """All tasks are there. `pmi`, `life`: descriptors of the two connections. `listener`: at this task's address; None
    for the first task, where the process listens."""

    rank: int
    size: int
    pmi: int
    life: int
    listener: socket.socket | None

    @property
    def environment(self) -> dict[str, str]:
        """What MPICH looks for when it starts."""
        return {"PMI_FD": str(self.pmi), "PMI_RANK": str(self.rank), "PMI_SIZE": str(self.size)}

    def __post_init__(self) -> None:
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        """In a child of this task, which may outlive it: its end must show all the same."""
        os.close(self.life)
        if self.listener is not None:
            self.listener.close()

    def up(self) -> None:
        """Tell that MPI has started."""
        with contextlib.suppress(OSError):  # the process is gone, of which the watchers have no need
            os.write(self.life, b"up\n")


class _NotYetError(Exception):
    """Nobody is there who answers; in words."""


class _Knock:
    """`task` of the cluster with these addresses, with its secret."""

    def __init__(self, addresses: Mapping[str, str], task: str, secret: str) -> None:
        self._addresses, self._task, self._secret = dict(addresses), task, secret
        self._first = next(iter(addresses))
        self._at = f"{self._first} ({addresses[self._first]})"

    def connect(self, where: list[Place], **hello: Any) -> Channel:
        """Open an authenticated channel and send the hello. Raises _NotYetError if the caller should try again, else
        ConfigError or AllredError."""
        error: OSError | None = None
        for family, address in where:
            try:
                found = connect(family, address, PURPOSE, self._secret)
            except HandshakeError as caught:
                raise ConfigError(f"{self._task}: the process at {self._at} {caught}") from None
            except OSError as caught:
                error = caught
            else:
                found.send(hello)
                return found
        if isinstance(error, ConnectionRefusedError) and self._task == self._first:
            raise AllredError(
                f"{self._task} has lost the process that it has started at {self._at}, at which the tasks meet; start "
                "it again"
            )
        raise _NotYetError(f"{self._at}: {getattr(error, 'strerror', None) or error}")


class _Waiting:
    """What the person at the terminal hears while a task waits, until the limit."""

    def __init__(self, task: str, limit_s: float, for_whom: str) -> None:
        self.for_whom = for_whom
        self._task, self._limit_s, self._begun = task, limit_s, time.monotonic()
        self._say_at = self._begun + TELL_S
        self._notice = ""

    def patience(self) -> float:
        """Seconds until there is something to say. Raises CollectiveTimeout at the limit."""
        now = time.monotonic()
        waited = now - self._begun
        if waited >= self._limit_s:
            notice = f". Meanwhile: {self._notice}" if self._notice else ""
            raise CollectiveTimeout(
                f"{self._task} has waited for {waited:.0f} s (ALLRED_START_TIMEOUT_S) for {self.for_whom}{notice}"
            )
        if now >= self._say_at:
            report.say_here(
                f"{self._task} waits for {self.for_whom}, since {waited:.0f} s; for {self._limit_s:g} s at most"
            )
            self._say_at += TELL_S
        return max(0.01, min(self._say_at - now, self._begun + self._limit_s - now))

    def notice(self, text: str) -> None:
        """Something has happened at the meeting."""
        self._notice = text
        report.say_here(text)


def meet(addresses: Mapping[str, str], task: str, secret: str, limit_s: float, mpi: str, problem: str = "") -> Joined:
    """Wait until all tasks are there, `limit_s` seconds at most.

    addresses: of all tasks, by name, the first one first. mpi: which this Python has. problem: why this task cannot
    take part, which the others are told.
    Raises ConfigError if it cannot, or is not let in; CollectiveTimeout at the limit.
    """
    detached.keep_standard_files()
    first = next(iter(addresses))
    where = places.look_up({first: addresses[first]})
    knock = _Knock(addresses, task, secret)
    hello: dict[str, Any] = {"task": task, "addresses": dict(addresses), "mpi": mpi, "node": places.node()}
    hello |= {"host": socket.gethostname(), "pid": os.getpid(), "user": os.geteuid()}
    try:
        where = places.look_up(addresses)
        places.check(addresses, where, secret)
        if problem:
            raise ConfigError(problem)
        listener = places.take(task, addresses[task], where[task])
    except ConfigError as error:
        if task != first:
            with contextlib.suppress(_NotYetError, AllredError, OSError, ValueError):
                _answer(knock.connect(where[first], **hello, problem=str(error)))  # until it has been read
        raise
    if task == first:
        _start(addresses, secret, listener)
    waiting = _Waiting(task, limit_s, f"{first} ({addresses[first]})")
    life = None
    while life is None:
        life = _wait(knock, where[first], hello, waiting)
    rank, size = list(addresses).index(task), len(addresses)
    try:
        pmi = knock.connect(where[first], rank=rank)
        _answer(pmi)
    except (_NotYetError, OSError, ValueError) as error:
        raise AllredError(
            f"{task}: the connection to the process at {addresses[first]} failed before MPI started: {error}"
        ) from None
    for each in (pmi, life):
        each.connection.settimeout(None)
    kept = None if task == first else listener
    return Joined(rank, size, pmi.connection.detach(), life.connection.detach(), kept)


def _answer(to: Channel) -> dict[str, Any]:
    return to.receive_one(time.monotonic() + AUTHENTICATE_S)


def _start(addresses: Mapping[str, str], secret: str, listener: socket.socket) -> None:
    settings = {"addresses": dict(addresses), "secret": secret, "listener": listener.fileno(), "pid": os.getpid()}
    found = detached.start("allred.launch.process", settings, files=[listener.fileno()])
    listener.close()
    if found["problem"]:
        raise ConfigError(f"the rendezvous process of the tasks did not start: {found['problem']}")


def _wait(knock: _Knock, where: list[Place], hello: dict[str, Any], waiting: _Waiting) -> Channel | None:
    """The connection on which all are said to be there; None if it has ended before, and it is to be tried again."""
    life = None
    try:
        life = knock.connect(where, **hello)
    except _NotYetError as error:
        waiting.for_whom = str(error)
    if life is None:
        time.sleep(min(_AGAIN_S, waiting.patience()))
        return None
    try:
        while (messages := _next(life, waiting.patience())) is not None:
            for message in messages:
                if "refused" in message:
                    raise ConfigError(str(message["refused"]))
                if "notice" in message:
                    waiting.notice(str(message["notice"]))
                if "missing" in message:
                    waiting.for_whom = " and ".join(message["missing"])
                if "go" in message:
                    return life
    except BaseException:
        life.connection.close()
        raise
    life.connection.close()
    return None


def _next(life: Channel, patience_s: float) -> list[dict[str, Any]] | None:
    """What comes in so many seconds; None at the end."""
    life.connection.settimeout(patience_s)
    try:
        return life.receive()
    except TimeoutError:
        return []
    except (OSError, ValueError):
        return None
