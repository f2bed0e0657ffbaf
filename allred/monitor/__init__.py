"""Shows a job: `python -m allred top` on the terminal and as a page, and the metrics for Prometheus.

Connection: the connection to the watcher of the job's chief, and the snapshots that it sends.
"""

import contextlib
import time
from typing import Any

from allred.errors import AllredError
from allred.runtime.channel import HandshakeError, connect
from allred.runtime.timings import SNAPSHOT_BYTES, SNAPSHOT_S
from allred.watch import job_directory
from allred.watch.job_status import PURPOSE

Snapshot = dict[str, Any]


class Connection:
    """A connection to a job. entry: the content of its file in the job directory. Raises AllredError."""

    def __init__(self, entry: dict[str, Any]) -> None:
        self._job = entry["job"]
        try:
            self._channel = connect(("127.0.0.1", entry["port"]), PURPOSE, entry["token"])
        except (HandshakeError, OSError) as error:
            raise AllredError(f"the watcher of job {self._job} does not answer: {error}") from None
        self._channel.longest = SNAPSHOT_BYTES

    def snapshot(self, states: bool = True) -> Snapshot:
        """Return a snapshot. states: with the states and source lines of the ranks, which a signal interrupts for this.
        Raises AllredError if the job has ended."""
        self._channel.send({"states": states})
        try:
            return self._channel.receive_one(time.monotonic() + SNAPSHOT_S)
        except (OSError, ValueError):
            raise AllredError(f"job {self._job} has ended") from None

    def close(self) -> None:
        """Close the connection: a job without a monitor takes no samples."""
        self._channel.close()

    def wait_for_end(self) -> None:
        """Wait until the job has ended."""
        self.snapshot(states=False)  # the watcher closes a connection without a first message
        self._channel.connection.settimeout(None)
        with contextlib.suppress(OSError, ValueError):
            while True:
                self._channel.receive()


def open_job(name: str) -> Connection:
    """Connect to a job by its name; "" for the only one. Raises AllredError."""
    return Connection(job_directory.choose(name, job_directory.entries(job_directory.JOB), "job"))
