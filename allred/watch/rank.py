"""A rank in the watcher of its node: its socket, its process, and its last events."""

import contextlib
import json
import os
import socket
import struct
import time

from allred.counters import CountersReader, Values
from allred.runtime.loop import Loop
from allred.runtime.timings import EVENT_BYTES, HELLO_S
from allred.watch import process_state
from allred.watch.records import Event

_ENDS = {"failed": "at its end", "unwound": "at its end", "left": "has ended"}


def owner(connection: socket.socket) -> tuple[int, int]:
    """Return the process id and the user id of the peer of a Unix socket."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, user, _ = struct.unpack("3i", credentials)
    return pid, user


def accept(listening: socket.socket, most_files: int) -> tuple[socket.socket, Event, list[int]] | None:
    """Accept a process of this user, and receive its first message, a JSON object, with descriptors. None if that
    fails."""
    try:
        connection, _ = listening.accept()
    except OSError:  # the process has closed the connection, or there are too many open files
        return None
    try:
        if owner(connection)[1] != os.geteuid():
            raise ValueError
        connection.settimeout(HELLO_S)
        data, files, _, _ = socket.recv_fds(connection, EVENT_BYTES, most_files)
    except (OSError, ValueError):
        connection.close()
        return None
    try:
        hello = json.loads(data)
        if isinstance(hello, dict):
            return connection, hello, files
    except (ValueError, RecursionError):
        pass
    refuse(connection, files)
    return None


def refuse(connection: socket.socket, files: list[int]) -> None:
    """Close the connection of a process that `accept` has returned, and its descriptors."""
    connection.close()
    for file in files:
        os.close(file)


class WatchedRank:
    """A rank that is connected. hello: rank, host, stack_signal, main_thread. pidfd: of its process. pipe: for its
    stack. counters: their memory."""

    def __init__(
        self, connection: socket.socket, hello: Event, pidfd: int, pipe: int, counters: int | None = None
    ) -> None:
        self.connection, self.pidfd, self.pipe = connection, pidfd, pipe
        self.number, self.host, self.stack_signal = hello["rank"], hello["host"], hello["stack_signal"]
        self.main_thread = int(hello["main_thread"] or 0)  # as threading.Thread.ident
        self.waits_in, self.since, self.ending, self.dead, self.left = "", 0.0, "", "", False
        self.end = ""  # its end by its own report
        self.role = ""
        self.pid, _ = owner(connection)
        self.hung_up_at = 0.0  # the last thread of its process may end much later
        os.set_blocking(pipe, False)
        connection.setblocking(False)  # with a time limit, Python waits before each call, also with MSG_DONTWAIT
        self._counters = CountersReader(counters)

    def send(self, message: Event) -> bool:
        """Send a message: the first letter of its kind, and JSON. Does not wait for a rank that does not read. Return
        whether it was sent."""
        with contextlib.suppress(OSError):
            self.connection.send(f"{message['kind'][0]}{json.dumps(message)}".encode())
            return True
        return False

    def receive(self) -> Event | None:
        """Return one event; {} at the end of the connection, None if there is none now."""
        if self.connection.fileno() < 0:
            return None
        try:
            data = self.connection.recv(EVENT_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            return {}
        if not data:
            return {}
        event: Event = json.loads(data)
        self._record(event)
        return event

    def hang_up(self) -> None:
        """Close the connection, after the rank has closed its end."""
        self.hung_up_at = time.monotonic()
        self.connection.close()

    def close(self, loop: Loop) -> None:
        """Close all files of this rank."""
        for file in (self.connection, self.pidfd):
            loop.remove(file)
        self.connection.close()
        os.close(self.pidfd)
        os.close(self.pipe)

    def _record(self, event: Event) -> None:
        if event["event"] in ("holds", "count"):
            return
        if event["event"] == "waiting":
            self.waits_in, self.since = event["what"], time.monotonic() - event["since_s"]
        elif event["event"] == "limit" and event["what"] != self.waits_in:
            self.waits_in, self.since = event["what"], time.monotonic() - event["limit_s"]
        elif event["event"] == "role":
            self.role = event["text"]
        elif event["event"] != "limit":
            self.waits_in = ""
        self.left = self.left or event["event"] == "left"
        self.ending = _ENDS.get(event["event"], self.ending)
        if event["event"] == "failed":
            self.end = f"failed: {event['words']}" if event["words"] else f"failed with exit code {event['code']}"
        elif event["event"] in ("left", "unwound"):
            self.end = self.end or ("has ended" if self.left else "has ended after the failure")

    @property
    def gone(self) -> bool:
        """Whether there will be no more events: its process has ended, or it has closed the connection after `left`."""
        return bool(self.dead) or (self.left and self.connection.fileno() < 0)

    def monitored(self) -> Event:
        """Return what monitors show of this rank."""
        return {"host": self.host, "role": self.role.partition(";")[0], "counters": self._counters.read()}

    def steps(self) -> tuple[int, int]:
        """Return its number of steps, and whether it is in opt.step."""
        values = Values(*self._counters.read())
        return int(values.steps), int(values.in_step)

    @property
    def has_stack(self) -> bool:
        """Whether it can write its stack: it runs, and its program has not ended."""
        return not (self.dead or self.ending or process_state.halted(self.pid))

    def state(self) -> str:
        """Return the state of the rank; "" if only its stack shows it."""
        if self.dead:
            return self.end or self.dead
        waits = f"in {self.waits_in} for {time.monotonic() - self.since:.0f} s" if self.waits_in else self.ending
        return ", ".join(filter(None, (process_state.halted(self.pid), waits)))
