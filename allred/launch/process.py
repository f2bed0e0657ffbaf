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

from allred.channel import Channel, Listener, dispatch
from allred.detached import serve
from allred.launch.meeting import PURPOSE, Meeting, Message
from allred.launch.pmi import Pmi

DEATH_S = 0.5  # for the others to fail by themselves of what a task has failed of
_TICK_S = 0.1


class Process:
    """The settings: addresses (of tasks, by name), secret, listener (a descriptor), pid (of the first task)."""

    def __init__(self, settings: Message) -> None:
        self._secret: str = settings["secret"]
        self._first = next(iter(settings["addresses"]))
        self._meeting = Meeting(settings["addresses"])
        self._selector = selectors.DefaultSelector()
        self._tasks: dict[str, Channel] = {}
        self._pmi: Pmi | None = None
        self._speakers: dict[int, Channel] = {}  # connections of MPI, by rank
        self._later: list[tuple[float, list[str], str]] = []  # what to tell to whom, and when
        self._over_at = float("inf")
        self._first_task = os.pidfd_open(settings["pid"])
        self._selector.register(self._first_task, selectors.EVENT_READ, self._lose_first)
        listening = socket.socket(fileno=settings["listener"])
        self._listener = Listener(self._selector, listening, PURPOSE, self._secret, self._take, self._refusal)

    def run(self) -> None:
        """Until the last task is gone."""
        while self._tasks or time.monotonic() < self._over_at:
            dispatch(self._selector, _TICK_S)
            self._listener.close_expired()
            now = time.monotonic()
            for _, names, text in [each for each in self._later if now >= each[0]]:
                self._say(names, text)
            self._later = [each for each in self._later if now < each[0]]

    def _watch(self, channel: Channel, hear: Callable[[], object], lost: Callable[[], None]) -> None:
        def ready() -> None:
            try:
                hear()
            except Exception:  # closed, or not the protocol: no bytes of a peer may end this process
                self._close(channel)
                lost()

        self._selector.register(channel.connection, selectors.EVENT_READ, ready)

    def _close(self, channel: Channel) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(channel.connection)
        channel.connection.close()

    def _say(self, names: list[str], text: str) -> None:
        for name in names:
            if name in self._tasks:
                self._tasks[name].send_line(text)

    # New connections.

    def _refusal(self, host: str, has: bool) -> str:
        text = f"has a different ALLRED_SECRET than {self._first}"
        if has != bool(self._secret):
            one, none = "an ALLRED_SECRET", "no ALLRED_SECRET"
            text = f"has {one if has else none}, but {self._first} has {none if has else one}"
        text += "; set the same ALLRED_SECRET for all tasks"
        self._notice(f"a task at {host} was refused: it {text}")
        return f"this task {text}"

    def _take(self, channel: Channel, messages: list[Message]) -> None:
        """Take the new channel of a task, or of its MPI."""
        hello = messages[0]
        if "rank" in hello:
            return self._take_speaker(channel, hello)
        if late := self._meeting.late(hello):
            self._watch(channel, channel.receive, lambda: None)  # until this process ends
            return channel.send({"missing": [late]})
        refusal = self._meeting.come(hello)
        if refusal:
            self._notice(refusal)
            channel.send({"refused": refusal})
            return channel.connection.close()
        name = hello["task"]
        self._watch(channel, lambda: self._hear_task(name), lambda: self._lose(name))
        self._tasks[name] = channel
        if self._meeting.began:
            self._pmi = Pmi(self._meeting.nodes())
            self._send_to_all({"go": True})
        else:
            self._tell_missing()

    # Tasks.

    def _notice(self, text: str) -> None:
        """Say it to those who wait."""
        if not self._meeting.began:
            self._send_to_all({"notice": text})

    def _tell_missing(self) -> None:
        self._send_to_all({"missing": self._meeting.missing()})

    def _send_to_all(self, message: Message) -> None:
        for channel in self._tasks.values():
            channel.send(message)

    def _hear_task(self, name: str) -> None:
        for word in self._tasks[name].receive_lines():
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
            for channel in self._tasks.values():
                self._close(channel)
            self._tasks.clear()
            self._over_at = time.monotonic()

    def _end(self) -> None:
        self._say(self._meeting.end(), "")

    # MPI.

    def _take_speaker(self, channel: Channel, hello: Message) -> None:
        rank = int(hello["rank"])
        if self._pmi is None or rank in self._speakers:
            return channel.connection.close()
        self._watch(channel, lambda: self._hear_mpi(rank), lambda: self._lose_speaker(rank))
        self._speakers[rank] = channel
        channel.send({"speak": True})

    def _lose_speaker(self, rank: int) -> None:
        self._speakers.pop(rank, None)

    def _hear_mpi(self, rank: int) -> None:
        assert self._pmi is not None
        for line in self._speakers[rank].receive_lines():
            for other, answer in self._pmi.hear(rank, line):
                if other in self._speakers:
                    self._speakers[other].send_line(answer)


def _prepare(settings: Message) -> tuple[Message, Callable[[], None]]:
    process = Process(settings)
    return {}, process.run


def main() -> None:
    """See detached.py."""
    serve(_prepare)
