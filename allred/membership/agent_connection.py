"""`AgentConnection`: the connection of a process to the agent of its host (agent.py)."""

import dataclasses
import json
import math
import mmap
import os
import select
import socket
import threading
from typing import Any

from allred.errors import AllredError, RanksChanged
from allred.launch.rendezvous_bootstrap import TaskConnection
from allred.membership import agreement
from allred.membership.agent_process import end_with_parent
from allred.membership.member import Member
from allred.runtime.channel import Channel
from allred.runtime.timings import WORDS_CHARS


class AgentConnection(TaskConnection):
    """member: what this process may do. A thread may call `error` while another one uses the connection."""

    def __init__(self, where: str) -> None:
        super().__init__(math.inf)  # `allred run` has the time limit, and ends the process that is late
        name, own, self._host = where.split()
        self.member = Member(own)
        self._lock = threading.RLock()
        self._cause: dict[str, Any] = {}  # of the last poison
        self._error: AllredError | None = None
        self._watcher: dict[str, Any] | None = None  # the answer to `serve_watcher`
        file = os.memfd_create("agent.allred", os.MFD_CLOEXEC)
        os.ftruncate(file, mmap.PAGESIZE)
        page = mmap.mmap(file, mmap.PAGESIZE)
        self._poisoned = memoryview(page)[:8].cast("Q")  # the number of the last world that was poisoned
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(f"\0{name}".encode("latin-1"))
        pidfd = os.pidfd_open(os.getpid())
        socket.send_fds(connection, [json.dumps({"name": own}).encode()], [pidfd, file])
        os.close(pidfd)
        os.close(file)
        self._channel = Channel(connection)
        self._poller = select.poll()
        self._poller.register(connection, select.POLLIN)
        os.register_at_fork(after_in_child=self.close)
        end_with_parent()

    @property
    def own_host(self) -> str:
        return self._host

    def send(self, message: agreement.Report | None) -> None:
        """Send a message of the agreement."""
        if message is not None:
            self._channel.send({"report": type(message).__name__.lower(), **dataclasses.asdict(message)})

    def report_failure(self, code: int, words: str) -> None:
        """Report that this process is about to end with this exit code, and why."""
        self._channel.send({"failed": words[:WORDS_CHARS], "code": code})

    def await_form(self) -> agreement.Form:
        """Wait until this process is a member of a new world. Raises SystemExit if it has to end."""
        while self.member.phase != "building":
            self._read(None)
            if self.member.end is not None:
                raise SystemExit(int(isinstance(self.member.end, agreement.Restart)))
        form = self.member.form
        assert form is not None
        self.rank, self.size, self.tasks = form.members.index(self.member.name), len(form.members), form.members
        for each in (self._exchanges, self._values, self._parts, self._sizes, self._missing):
            each.clear()
        return form

    def serve_watcher(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Let the agent be the watcher of this node. Return the name of its socket, and its port."""
        self._watcher = None
        self._channel.send({"watch": settings})
        while self._watcher is None:
            self._receive(None)
        return self._watcher

    def is_poisoned(self) -> bool:
        """Whether this process has to leave its world."""
        return self._poisoned[0] >= self.member.generation > 0 or self.member.is_poisoned  # the message may come first

    def error(self) -> RanksChanged | None:
        """Return the error of a wait in a world that this process has to leave; None if it has not."""
        if not self.is_poisoned():
            return None
        with self._lock:
            self._read(0.0)
            cause = self._cause
        end = self.member.end
        text = cause.get("text") or (end.reason if end is not None else "the ranks of the job change")
        return RanksChanged(text, cause.get("rank", -1), cause.get("host", ""), cause.get("code", 1))

    def close(self) -> None:
        """Close the connection; in a forked child, whose parent continues to use it."""
        self._channel.close()

    def _send(self, line: str) -> None:
        self._channel.send({"line": line, "generation": self.member.generation})

    def _receive(self, timeout_s: float | None) -> None:
        self._read(timeout_s)
        if (error := self.error()) is not None:
            raise error

    def _read(self, timeout_s: float | None) -> None:
        """Read messages. Wait for them at most `timeout_s`; None: without a limit."""
        with self._lock:
            if self._error is not None:
                raise self._error
            if not self._poller.poll(None if timeout_s is None else timeout_s * 1000):
                return
            try:
                messages = self._channel.receive()
            except (OSError, ValueError) as error:
                self._error = AllredError(f"the agent of this host has ended: {error}")
                raise self._error from None
            for message in messages:
                self._handle_message(message)

    def _handle_message(self, message: dict[str, Any]) -> None:
        if "line" in message:
            if message["generation"] == self.member.generation:
                self._handle(message["line"])
        elif "watcher" in message:
            self._watcher = message["watcher"]
        elif "form" in message:
            given = message["form"]
            self._cause = {}
            lists = {name: tuple(given[name]) for name in ("members", "receivers")}
            self.member.receive(agreement.Form(**{**given, **lists}))
        elif "poison" in message:
            self._cause = message
            self.member.receive(agreement.Poison(message["poison"]))
        elif "stop" in message:
            self.member.receive(agreement.Stop(message["stop"]))
        elif "restart" in message:
            self.member.receive(agreement.Restart(message["restart"]))
