"""One start of a job: mpirun and its processes, the reports of the ranks, and signals to them."""

import contextlib
import ctypes
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from allred.run.reports import Reports
from allred.run.restarts import End
from allred.runtime import timings
from allred.runtime.channel import Channel, Message
from allred.watch import process_state

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def adopt_orphans() -> None:
    """Become the parent of all descendants whose parent ends, so that `Job.end` finds them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _prepare() -> None:
    """In the child, before it becomes mpirun: end it with `allred run`, and do not inherit ignored signals."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


class Job:
    """A running mpirun. words: its command. selector: of the event loop, which calls what is registered."""

    def __init__(self, words: Sequence[str], environ: Mapping[str, str], selector: selectors.BaseSelector) -> None:
        terminal = sys.stdin is None or sys.stdin.closed or sys.stdin.isatty()  # which a background session cannot read
        self._process = subprocess.Popen(
            words, env=environ, stdin=subprocess.DEVNULL if terminal else None, start_new_session=True,
            preexec_fn=_prepare,
        )  # fmt: skip
        self._selector = selector
        self._links: dict[Channel, Reports] = {}
        self._reports: list[Reports] = []
        self._lost_at = float("inf")  # when a host or the daemon of the launcher was lost
        self._lost = ""  # the daemon, with the ranks that are left
        self._ranks: dict[int, list[int]] = {}  # of this host, by the daemon that started them
        self._look_at, self._look_s = 0.0, timings.FIRST_LOOK_S
        self._orphaned_at = float("inf")  # since when `_has_orphans`
        self._kept, self._has_passed = False, False  # a SIGUSR1; whether the ranks have received it
        self._kill_at = float("inf")

    # Reports.

    def connect(self, link: Channel, messages: list[Message]) -> None:
        """Take the connection of the watcher of the chief's node. messages: its first ones."""
        link.keep_alive(*timings.CHIEF_KEEPALIVE_S)
        reports = Reports(messages[0]["size"])
        self._reports.append(reports)
        self._links[link] = reports
        self._selector.register(link.connection, selectors.EVENT_READ, lambda: self._receive(link))
        for event in messages[1:]:
            reports.handle(event)

    def _receive(self, link: Channel) -> None:
        try:
            events = link.receive()
        except (OSError, ValueError) as error:
            reports = self._close(link)
            if isinstance(error, OSError) and not isinstance(
                error, ConnectionError
            ):  # the watcher has not ended: the chief's host is lost
                reports.lose_chief()
                self._lost_at = time.monotonic()
            return
        for event in events:
            self._links[link].handle(event)
            if event["event"] == "unreachable":
                self._lost_at = time.monotonic()

    def _close(self, link: Channel) -> Reports:
        """Close a connection. Return its reports."""
        self._selector.unregister(link.connection)
        link.connection.close()
        return self._links.pop(link)

    @property
    def sessions(self) -> dict[int, int]:
        """The ranks whose session is open, with the step at which it began."""
        return {rank: step for reports in self._links.values() for rank, step in reports.sessions.items()}

    @property
    def lost_hosts(self) -> set[str]:
        """The hosts that were unreachable until the time limit."""
        return {host for reports in self._reports for host in reports.lost_hosts}

    # Signals.

    def send_signal(self, number: int) -> None:
        """Pass a signal on: as a stop request if there is a session, else to all ranks; before allred.init() to mpirun.
        SIGUSR1, the warning of a batch system, is kept until it can be passed on without killing a rank.

        With a session, a rank could receive the signal after the session has ended on all ranks, and be killed."""
        if self.request_stop(signal.Signals(number).name):
            return
        if number == signal.SIGUSR1:
            self._kept, self._has_passed = True, False
            self._pass_kept()
            return
        for link in self._links:
            link.send({"kind": "signal", "number": number, "rank": None})
        if not self._links:
            self._process.send_signal(number)

    def _pass_kept(self) -> None:
        """Pass the kept SIGUSR1 on to the next session; before, once, to a program that handles it by itself."""
        if self.request_stop(signal.SIGUSR1.name):
            self._kept = False
        elif self._has_passed:
            pass
        elif self._links:
            self._has_passed = all(reports.have_joined for reports in self._links.values())
            for link in self._links if self._has_passed else ():
                link.send({"kind": "signal", "number": signal.SIGUSR1, "rank": None})
        elif not self._reports:
            ranks = [rank for _, children in self._daemons() for rank in children]
            self._has_passed = bool(ranks) and all(process_state.handles(rank, signal.SIGUSR1) for rank in ranks)
            if self._has_passed:
                self._process.send_signal(signal.SIGUSR1)

    def _daemons(self) -> list[tuple[int, list[int]]]:
        """Return the launcher's processes on this host that start ranks, with these."""
        children = process_state.children()
        starters = [self._process.pid, *children.get(self._process.pid, [])]
        daemons = [pid for pid in starters if process_state.is_daemon(pid) or process_state.is_launcher(pid)]
        return [(pid, [child for child in children.get(pid, []) if child not in starters]) for pid in daemons]

    def request_stop(self, reason: str) -> bool:
        """Let the session write a checkpoint after the current step, and end. Return whether there is a session."""
        for link, reports in self._links.items():
            if reports.sessions:
                link.send({"kind": "stop", "rank": min(reports.sessions), "reason": reason})
                return True
        return False

    def terminate(self) -> None:
        """End mpirun, and after TERMINATE_S all its processes."""
        if self._kill_at == float("inf"):
            self._process.terminate()
            self._kill_at = time.monotonic() + timings.TERMINATE_S

    # The end.

    def is_running(self) -> bool:
        """Return whether mpirun has not ended. Call it repeatedly: it ends what does not terminate."""
        if self._process.poll() is None:
            now = time.monotonic()
            if self._kept:
                self._pass_kept()
            if not self._reports and now >= self._look_at:
                self._look_at, self._look_s = now + self._look_s, min(2 * self._look_s, timings.LOOK_S)
                self._look_at_daemons()
            if now >= self._lost_at + timings.MPIRUN_LOST_HOST_S:
                self.terminate()
            if now >= self._kill_at:
                kill(descendants())
        _reap(self._process.pid)
        return self._process.poll() is None

    def _look_at_daemons(self) -> None:
        """Notice that a daemon of mpirun was killed, which mpirun may not notice, and that its ranks are left. After
        allred.init() the watchers do."""
        found = {pid: ranks for pid, ranks in self._daemons() if pid != self._process.pid}
        for daemon, ranks in self._ranks.items():
            if daemon not in found and any(map(process_state.is_alive, ranks)):
                self._lose_daemon(f"process {daemon}, by which mpirun had started ranks on this host, was killed")
        self._ranks = found
        if not self._has_orphans():
            self._orphaned_at = float("inf")
        elif (now := time.monotonic()) >= self._orphaned_at + timings.ORPHANED_S:  # killed before a look has seen it
            self._lose_daemon("the process by which mpirun had started ranks on this host was killed")
        else:
            self._orphaned_at = min(self._orphaned_at, now)

    def _has_orphans(self) -> bool:
        """Return whether mpirun has no child processes, but this process has adopted some."""
        children = process_state.children()
        return self._process.pid not in children and children.get(os.getpid(), []) != [self._process.pid]

    def _lose_daemon(self, text: str) -> None:
        if not self._lost:
            self._lost, self._lost_at = text, time.monotonic()

    def has_reported(self, since: float) -> bool:
        """Return whether no more reports will arrive. since: when mpirun ended. A watcher ends after its ranks; if one
        has not after REPORTS_S, the chief's host is lost."""
        if time.monotonic() > since + timings.REPORTS_S:
            for link in list(self._links):
                self._close(link).lose_chief()
        return not self._links

    def has_left(self, since: float) -> bool:
        """Return whether all processes have ended; kills those that are left LEFTOVER_S after `since`."""
        _reap(self._process.pid)
        left = descendants()
        if left and time.monotonic() > min(since + timings.LEFTOVER_S, self._kill_at):
            kill(left)
        return not left

    def end(self) -> End:
        """Return how it ended."""
        code = self._process.returncode
        code = 128 - code if code < 0 else code
        if not self._reports and self._lost:
            return End(1, f"{self._lost}, and no rank had called allred.init()", joined=False)
        if not self._reports:
            return End(code, f"mpirun ended with exit code {code}, and no rank had called allred.init()", joined=False)
        for reports in self._reports:
            if reports.code:
                return End(reports.code, reports.text, reports.exception, reports.step, restored=reports.restored)
        for reports in self._reports:
            if not reports.is_success:
                text = f"{reports.missing}; mpirun ended with exit code {code}"
                return End(code or 1, text, restored=reports.restored)
        return End(code, f"every rank reported success, but mpirun ended with exit code {code}" if code else "")


def _reap(kept: int) -> None:
    """Collect the ends of adopted processes; not that of `kept`."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid != kept:
            os.waitpid(ended.si_pid, 0)


def descendants() -> list[int]:
    """Return the ids of all processes that descend from this one."""
    children, found = process_state.children(with_zombies=True), []
    todo = [os.getpid()]
    while todo:
        new = children.get(todo.pop(), [])
        found += new
        todo += new
    return found


def kill(pids: Sequence[int]) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
