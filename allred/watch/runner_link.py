"""The connection of the chief's watcher to `allred run`: reports of the ranks up, signals to the ranks down.

    hello size            the first message, with the number of ranks
    joined, left, failed, session, unreachable     events of job_state.py
    verdict               the failure that ends the job, once

`allred run` answers with messages to ranks: `signal` with its number, or `stop`, which ends the session of all ranks
after the current step, with the reason.
"""

import os
import socket

from allred.runtime import channel
from allred.runtime.channel import Channel, HandshakeError
from allred.watch.records import Event

PURPOSE = "runner"
VARIABLE = "ALLRED_RUNNER"
RESTART = "restart of the job"  # the reason of a stop request, if the number of ranks changes
_REPORTED = ("joined", "left", "failed", "session", "unreachable")

_address: str | None = None  # before the first call of `address`


def address() -> str:
    """Return where `allred run` listens: address, port and secret; "" if this rank was started in another way.

    Removes the variable from the environment: programs that this one starts are not ranks of the job."""
    global _address
    if _address is None:
        _address = os.environ.pop(VARIABLE, "")
    return _address


class RunnerLink:
    """The connection. It counts as lost only when `receive` raises."""

    def __init__(self, opened: Channel, size: int) -> None:
        self._channel, self._has_verdict = opened, False
        self.connection = opened.connection
        self._channel.send({"event": "hello", "size": size})

    def report(self, event: Event) -> None:
        if event["event"] in _REPORTED:
            self._channel.send({key: value for key, value in event.items() if key != "traceback"})

    def report_verdict(self, verdict: Event | None) -> None:
        """Report the failure that ends the job, if there is one."""
        if verdict is not None and not self._has_verdict:
            self._has_verdict = True
            self._channel.send({"event": "verdict", **{key: verdict[key] for key in ("rank", "code", "text")}})

    def receive(self) -> list[tuple[int | None, Event]]:
        """Return the messages that have arrived, as (rank, message); rank None: all ranks. Raises OSError, ValueError
        or KeyError if the connection is lost, or carries something else."""
        return [(message["rank"], message) for message in self._channel.receive()]


def connect(where: str, size: int) -> RunnerLink | None:
    """Connect to `allred run`. where: the value of `address()`. size: the number of ranks.

    Returns None if that fails: then the job continues, and `allred run` has only the exit code of mpirun."""
    host, port, secret = where.split()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return RunnerLink(channel.connect(family, (host, int(port)), PURPOSE, secret), size)
    except (HandshakeError, OSError):
        return None
