"""The launcher of this node's ranks: mpirun, and the process through which it starts ranks on this node.

If it has ended, nobody ends the ranks. If another host is unreachable, the watcher ends the launcher, because mpirun
may wait for that host forever. After a job on one node that failed, it ends a launcher that has no process left to wait
for: Open MPI's prterun sometimes does not end if one rank calls MPI_Abort while another finalizes.

A launcher is an ancestor of a rank at the time when the rank connects. A pidfd identifies it, so that no later process
with the same number is meant.

The watcher prints a death on the stderr of the job, which is the launcher's. It opens the launcher's own when the first
rank connects, because after a death the launcher may end before the watcher runs.
"""

import contextlib
import os
import select
import signal
import stat
import time

from allred.runtime.timings import FAILED_LAUNCHER_S, LAUNCHER_SIGNAL_S
from allred.watch import process_state


class Launchers:
    def __init__(self) -> None:
        self._pidfds: dict[int, int] = {}  # by process id; daemons, which mpirun started, first
        self._stderr: dict[int, int] = {}  # of launchers, by process id. A daemon's would keep mpirun from ending

    def record(self, pid: int) -> dict[str, int]:
        """Open a pidfd for each launcher that is an ancestor of process `pid`. Return {name: pidfd} of the new ones. A
        pidfd becomes readable when the launcher ends."""
        new = {}
        for launcher in process_state.launcher_ancestors(pid):
            if launcher not in self._pidfds:
                with contextlib.suppress(OSError):  # it has just ended
                    self._pidfds[launcher] = os.pidfd_open(launcher)
                    new[f"{process_state.name(launcher)} (process {launcher})"] = self._pidfds[launcher]
                if process_state.is_launcher(launcher):
                    self._stderr[launcher] = _open(f"/proc/{launcher}/fd/2")
        return new

    def open_stderr(self, ranks: list[int]) -> int:
        """Return a descriptor of the job's stderr, -1 if there is none. This process has none of its own.

        ranks: processes. Preferred is a pipe or terminal of the launcher, then of a rank: the launcher lives longer;
        but if its stderr is a file, it may overwrite the line.
        """
        paths = [f"/proc/self/fd/{descriptor}" for descriptor in self._stderr.values()]
        paths += [f"/proc/{pid}/fd/2" for pid in (*reversed(self._pidfds), *ranks) if pid not in self._stderr]
        kinds = {path: _kind(path) for path in paths}
        streams = [path for path, kind in kinds.items() if kind == "stream"]
        files = [path for path, kind in kinds.items() if kind == "file"]
        return next((opened for path in (*streams, *files) if (opened := _open(path)) >= 0), -1)

    def end(self) -> None:
        """Wait until the launchers have ended; after LAUNCHER_SIGNAL_S end them by SIGTERM, then by SIGKILL."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            self._wait()
            for pidfd in self._pidfds.values():
                with contextlib.suppress(OSError):  # another user's, or it has just ended
                    signal.pidfd_send_signal(pidfd, number)

    def end_childless(self) -> None:
        """Wait until the launchers have ended; after FAILED_LAUNCHER_S end those that have no child process."""
        self._wait(FAILED_LAUNCHER_S)
        children = process_state.children()
        for pid in list(self._pidfds):
            if pid in children or process_state.halted(pid):
                os.close(self._pidfds.pop(pid))
        self.end()

    def _wait(self, limit_s: float = LAUNCHER_SIGNAL_S) -> None:
        """Wait at most `limit_s`, and close the pidfds of those that have ended."""
        until, poll = time.monotonic() + limit_s, select.poll()
        for pidfd in self._pidfds.values():
            poll.register(pidfd, select.POLLIN)
        while self._pidfds and (left_s := until - time.monotonic()) > 0:
            ended = {pidfd for pidfd, _ in poll.poll(1000 * left_s)}
            for pid, pidfd in list(self._pidfds.items()):
                if pidfd in ended:
                    poll.unregister(pidfd)
                    os.close(self._pidfds.pop(pid))


_NULL = os.makedev(1, 3)


def _kind(path: str) -> str:
    try:
        status = os.stat(path)
    except OSError:
        return ""
    if stat.S_ISCHR(status.st_mode) and status.st_rdev == _NULL:
        return ""
    return "file" if stat.S_ISREG(status.st_mode) else "stream"


def _open(path: str) -> int:
    try:
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return -1
