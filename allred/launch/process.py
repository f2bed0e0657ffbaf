"""The process at which tasks meet: it listens at the first task's address, and is gone when they are.

Each task has a connection to it for life, which tells of its end: the kernel closes it, however it ends. Until all are
there, that says who is missing; then it says "go", and each task makes another one, which its MPI speaks PMI-1 over.
From a task come "up" and "left", a word a line. What goes to a task after "go" is a line for its person: it ends there.

If the first task ends before all were there, so does this; the others go on knocking at its address. So does a task
that is started again while the job that it was of still runs.
"""

import contextlib
import os
import selectors
import socket
import time
from collections.abc import Callable

from allred.detached import serve
from allred.launch.meeting import Meeting, Message
from allred.launch.pmi import Pmi
from allred.launch.wire import VERSION, Lines, new_nonce, proof, shows

GUEST_S = 10.0  # for a guest to say who it is
DEATH_S = 0.5  # for the others to fail by themselves of what a task has failed of
_GUESTS = 256
_TICK_S = 0.1


class _Guest:
    """A connection of which it is not known yet whose it is."""

    def __init__(self, lines: Lines) -> None:
        self.lines, self.nonce, self.admitted = lines, new_nonce(), False
        self.until = time.monotonic() + GUEST_S


class Process:
    """The settings: addresses (of tasks, by name), secret, listener (a descriptor), pid (of the first task)."""

    def __init__(self, settings: Message) -> None:
        self._secret: str = settings["secret"]
        self._first = next(iter(settings["addresses"]))
        self._meeting = Meeting(settings["addresses"])
        self._selector = selectors.DefaultSelector()
        self._guests: list[_Guest] = []
        self._tasks: dict[str, Lines] = {}
        self._pmi: Pmi | None = None
        self._speakers: dict[int, Lines] = {}  # connections of MPI, by rank
        self._later: list[tuple[float, list[str], str]] = []  # what to tell to whom, and when
        self._over_at = float("inf")
        self._first_task = os.pidfd_open(settings["pid"])
        self._selector.register(self._first_task, selectors.EVENT_READ, self._lose_first)
        self._listener = socket.socket(fileno=settings["listener"])
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def run(self) -> None:
        """Until the last task is gone."""
        while self._tasks or time.monotonic() < self._over_at:
            for key, _ in self._selector.select(_TICK_S):
                if key.fd in self._selector.get_map():  # not closed by what came before
                    key.data()
            now = time.monotonic()
            for guest in [guest for guest in self._guests if now > guest.until]:
                self._dismiss(guest)
            for _, names, text in [each for each in self._later if now >= each[0]]:
                self._say(names, text)
            self._later = [each for each in self._later if now < each[0]]

    def _watch(self, lines: Lines, hear: Callable[[], object], lost: Callable[[], None]) -> None:
        def ready() -> None:
            try:
                hear()
            except Exception:  # gone, or speaks of other things: whatever a stranger sends, the others go on
                self._close(lines)
                lost()

        self._selector.register(lines.connection, selectors.EVENT_READ, ready)

    def _close(self, lines: Lines) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(lines.connection)
        lines.connection.close()

    def _say(self, names: list[str], text: str) -> None:
        for name in names:
            with contextlib.suppress(OSError, KeyError):  # gone, which will be heard
                self._tasks[name].say(text)

    # Guests.

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # gone again, or too many files
            connection, _ = self._listener.accept()
            connection.settimeout(1.0)  # what is sent is little: it fits into the kernel's buffer
            if len(self._guests) >= _GUESTS:
                return connection.close()
            guest = _Guest(Lines(connection))
            self._guests.append(guest)
            self._watch(guest.lines, lambda: self._hear_guest(guest), lambda: self._dismiss(guest))
            guest.lines.tell(allred=VERSION, nonce=guest.nonce)

    def _dismiss(self, guest: _Guest) -> None:
        self._close(guest.lines)
        with contextlib.suppress(ValueError):
            self._guests.remove(guest)

    def _hear_guest(self, guest: _Guest) -> None:
        for message in guest.lines.hear():
            if guest.admitted:
                self._take(guest, message)
                return  # what it says from now on is for others to hear
            nonces = guest.nonce, str(message["nonce"])
            if not shows(message, self._secret, "task", nonces):
                return self._turn_away(guest, message)
            guest.admitted = True
            guest.lines.tell(proof=proof(self._secret, "meeting", nonces))

    def _turn_away(self, guest: _Guest, message: Message) -> None:
        theirs, ours = ("has none" if not has else "has one" for has in (message.get("has"), self._secret))
        differ = "another one" if theirs == ours == "has one" else f"none set, while this one {ours}"
        if theirs == "has one" != ours:
            differ = "one, while this one has none set"
        where = guest.lines.connection.getpeername()[0]
        self._notice(f"a task at {where} was turned away: as ALLRED_SECRET it has {differ}")
        guest.lines.tell(refused=f"its ALLRED_SECRET is not that of {self._first}: it has {differ}")
        self._dismiss(guest)

    def _take(self, guest: _Guest, hello: Message) -> None:
        """It knows the secret: a task, or its MPI."""
        if "rank" in hello:
            return self._take_speaker(guest, hello)
        if late := self._meeting.late(hello):
            self._rename(guest, guest.lines.receive, lambda: None)  # until this process ends
            return guest.lines.tell(missing=[late])
        refusal = self._meeting.come(hello)
        if refusal:
            self._notice(refusal)
            guest.lines.tell(refused=refusal)
            return self._dismiss(guest)
        name, lines = hello["task"], guest.lines
        self._rename(guest, lambda: self._hear_task(name), lambda: self._lose(name))
        self._tasks[name] = lines
        if self._meeting.began:
            self._pmi = Pmi(self._meeting.nodes())
            for each in list(self._tasks.values()):
                with contextlib.suppress(OSError):
                    each.tell(go=True)
        else:
            self._tell_missing()

    def _rename(self, guest: _Guest, hear: Callable[[], object], lost: Callable[[], None]) -> None:
        self._selector.unregister(guest.lines.connection)
        self._guests.remove(guest)
        self._watch(guest.lines, hear, lost)

    # Tasks.

    def _notice(self, text: str) -> None:
        """Say it to those who wait."""
        if not self._meeting.began:
            for lines in list(self._tasks.values()):
                with contextlib.suppress(OSError):
                    lines.tell(notice=text)

    def _tell_missing(self) -> None:
        for lines in list(self._tasks.values()):
            with contextlib.suppress(OSError):
                lines.tell(missing=self._meeting.missing())

    def _hear_task(self, name: str) -> None:
        for word in self._tasks[name].receive():
            {"up": self._meeting.up, "left": self._meeting.left}[word](name)
        self._end()

    def _lose(self, name: str) -> None:
        del self._tasks[name]
        started = self._meeting.began
        if started:
            self._over_at = time.monotonic()
        names, text = self._meeting.go(name)
        if started:
            self._later.append((time.monotonic() + DEATH_S, names, text))
            self._end()
        elif name == self._first:
            self._lose_first()
        else:
            self._tell_missing()

    def _lose_first(self) -> None:
        """The first task has ended, or given up. If not all were there, others are to find another at its address."""
        with contextlib.suppress(KeyError):
            self._selector.unregister(self._first_task)
        if not self._meeting.began:
            for lines in self._tasks.values():
                self._close(lines)
            self._tasks.clear()
            self._over_at = time.monotonic()

    def _end(self) -> None:
        self._say(self._meeting.end(), "")

    # MPI.

    def _take_speaker(self, guest: _Guest, hello: Message) -> None:
        rank, lines = int(hello["rank"]), guest.lines
        if self._pmi is None or rank in self._speakers:
            return self._dismiss(guest)
        self._rename(guest, lambda: self._hear_mpi(rank), lambda: self._lose_speaker(rank))
        self._speakers[rank] = lines
        lines.tell(speak=True)

    def _lose_speaker(self, rank: int) -> None:
        self._speakers.pop(rank, None)

    def _hear_mpi(self, rank: int) -> None:
        assert self._pmi is not None
        for line in self._speakers[rank].receive():
            for other, answer in self._pmi.hear(rank, line):
                with contextlib.suppress(OSError, KeyError):
                    self._speakers[other].say(answer)


def _prepare(settings: Message) -> tuple[Message, Callable[[], None]]:
    process = Process(settings)
    return {}, process.run


def main() -> None:
    """See detached.py."""
    serve(_prepare)
