"""One start of a job: mpirun and its processes, the reports of the ranks, and signals to them. The reports pass through
the watcher of the chief's node."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from allred.run.restarts import End
from allred.runtime import timings
from allred.runtime.channel import Channel, Message
from allred.runtime.loop import Loop, Timer
from allred.watch import process_state
from allred.wording import named

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


class Reports:
    """The reports of the ranks of one world, from init() to shutdown() or the end of the program.

    size: the number of ranks. sessions: {rank: step} of those whose session is open. lost_hosts: hosts that were
    unreachable until the time limit.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.sessions: dict[int, int] = {}
        self.restored: int | None = None  # the step from which the session resumed
        self.lost_hosts: set[str] = set()
        self.code, self.text, self.exception = 0, "", ""  # of the failure that ended the job
        self.step: int | None = None  # of the session of the rank that failed
        self._hosts: dict[int, str] = {}
        self._left: set[int] = set()
        self._exceptions: dict[int, str] = {}
        self._steps: dict[int, int] = {}

    def handle(self, event: dict[str, Any]) -> None:
        """Handle an event of the watcher (watch/job_state.py lists them), or `verdict`."""
        kind, rank = event["event"], event["rank"]
        if kind == "joined":
            self._hosts[rank] = event["host"]
        elif kind == "left":
            self._left.add(rank)
        elif kind == "failed":
            self._exceptions[rank] = event["words"]
        elif kind == "session":
            self._handle_session(rank, event["step"], event["is_open"])
        elif kind == "unreachable":
            self.lost_hosts |= {self._hosts[each] for each in event["ranks"] if each in self._hosts}
        elif kind == "verdict":
            self.code, self.text = event["code"] or 1, event["text"].partition("\n")[0]
            self.exception = self._exceptions.get(rank, "")
            self.step = self._steps.get(rank)

    def lose_chief(self) -> None:
        """The connection to the host of rank 0 has failed. No effect if the end of the job was reported before."""
        if not self.code and not self.is_success and 0 in self._hosts:
            self.lost_hosts.add(self._hosts[0])
            self.code, self.text = 1, f"host {self._hosts[0]} (rank 0) is unreachable"

    def _handle_session(self, rank: int, step: int, is_open: bool) -> None:
        self._steps[rank] = step
        if is_open:
            self.restored = step
            self.sessions[rank] = step
        else:
            self.sessions.pop(rank, None)

    @property
    def have_joined(self) -> bool:
        """Whether all ranks are watched, or have been."""
        return len(self._hosts) == self.size

    @property
    def is_success(self) -> bool:
        """Whether every rank has reported success."""
        return not self.code and len(self._left) == len(self._hosts) == self.size

    @property
    def watched_have_left(self) -> bool:
        """Whether every rank that has a watcher has reported success, and there is one."""
        return not self.code and bool(self._left) and self._left == self._hosts.keys()

    @property
    def missing(self) -> str:
        """The ranks that have reported neither success nor failure, for messages."""
        ranks = [rank for rank in range(self.size) if rank not in self._left]
        return f"{named('rank', ranks)} ended without a report"


class Job:
    """A running mpirun. words: its command. loop: SIGCHLD wakes it."""

    def __init__(self, words: Sequence[str], environ: Mapping[str, str], loop: Loop) -> None:
        terminal = sys.stdin is None or sys.stdin.closed or sys.stdin.isatty()  # which a background session cannot read
        self._process = subprocess.Popen(
            words, env=environ, stdin=subprocess.DEVNULL if terminal else None, start_new_session=True,
            preexec_fn=_prepare,
        )  # fmt: skip
        self._loop, self._timers = loop, list[Timer]()
        self._links: dict[Channel, Reports] = {}
        self._reports: list[Reports] = []
        self._lost = ""  # the daemon of the launcher that was lost, with the ranks that are left
        self._ranks: dict[int, list[int]] = {}  # of this host, by the daemon that started them
        self._orphaned_at = float("inf")  # since when mpirun has no child process, and this process has adopted some
        self._kept, self._has_passed = False, False  # a SIGUSR1; whether the ranks have received it
        self._is_terminated = self._is_over = False
        self._look_at_daemons(timings.FIRST_LOOK_S)

    def _after(self, seconds: float, call: Callable[[], object]) -> None:
        """Call `call` later, unless this start of the job has ended."""
        self._timers.append(self._loop.after(seconds, call))

    # Reports.

    def connect(self, link: Channel, messages: list[Message]) -> None:
        """Take the connection of the watcher of the chief's node. messages: its first ones."""
        link.keep_alive(*timings.CHIEF_KEEPALIVE_S)
        reports = Reports(messages[0]["size"])
        self._reports.append(reports)
        self._links[link] = reports
        link.serve(self._loop, lambda events: self._handle(reports, events), lambda error: self._lose(link, error))
        self._handle(reports, messages[1:])

    def _handle(self, reports: Reports, events: list[Message]) -> None:
        for event in events:
            reports.handle(event)
            if event["event"] == "unreachable":
                self._after(timings.MPIRUN_LOST_HOST_S, self.terminate)
        self._pass_kept()

    def _lose(self, link: Channel, error: Exception) -> None:
        reports = self._links.pop(link)
        if isinstance(error, OSError) and not isinstance(error, ConnectionError):  # the watcher has not ended
            reports.lose_chief()
            self._after(timings.MPIRUN_LOST_HOST_S, self.terminate)

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
        """Pass a kept SIGUSR1 on to the next session; before, once, to a program that handles it by itself."""
        if not self._kept:
            return
        if self.request_stop(signal.SIGUSR1.name):
            self._kept = False
        elif self._has_passed:
            pass
        elif self._links:
            self._has_passed = all(reports.have_joined for reports in self._links.values())
            for link in self._links if self._has_passed else ():
                link.send({"kind": "signal", "number": signal.SIGUSR1, "rank": None})
        elif not self._reports:
            ranks = [rank for _, started in self._daemons(process_state.children()) for rank in started]
            self._has_passed = bool(ranks) and all(process_state.handles(rank, signal.SIGUSR1) for rank in ranks)
            if self._has_passed:
                self._process.send_signal(signal.SIGUSR1)

    def _daemons(self, children: Mapping[int, list[int]]) -> list[tuple[int, list[int]]]:
        """Return the launcher's processes on this host that start ranks, with these. children: of all processes."""
        starters = [self._process.pid, *children.get(self._process.pid, [])]
        daemons = [pid for pid in starters if process_state.starts_ranks(pid)]
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
        if not self._is_terminated:
            self._is_terminated = True
            self._process.terminate()
            self._after(timings.TERMINATE_S, self._kill)

    def _kill(self) -> None:
        """Kill all processes, and again those that they have started meanwhile."""
        for pid in descendants():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self._after(timings.RETRY_S, self._kill)

    # The end.

    def has_ended(self) -> bool:
        """Return whether mpirun and all its processes have ended, and no more reports will arrive. Call it whenever a
        signal or a message has arrived."""
        is_running, has_children = self._process.poll() is None, _reap(self._process.pid)
        if not (is_running or self._is_over):
            self._is_over = True
            self._after(timings.REPORTS_S, self._lose_chief)
            self._after(timings.LEFTOVER_S, self._kill)
        if is_running or has_children or self._links:
            return False
        for timer in self._timers:
            timer.cancel()
        return True

    def _lose_chief(self) -> None:
        """A watcher ends after its ranks, so the chief's host is lost if one has not ended after mpirun."""
        for link, reports in self._links.items():
            link.close()
            reports.lose_chief()
        self._links.clear()

    def _look_at_daemons(self, again_s: float) -> None:
        """Notice that a daemon of mpirun was killed, which mpirun may not notice, and that its ranks are left. After
        allred.init() the watchers do."""
        if self._is_over or self._reports:
            return
        self._after(again_s, lambda: self._look_at_daemons(min(2 * again_s, timings.LOOK_S)))
        self._pass_kept()
        children = process_state.children()
        found = {pid: ranks for pid, ranks in self._daemons(children) if pid != self._process.pid}
        for daemon, ranks in self._ranks.items():
            if daemon not in found and any(map(process_state.is_alive, ranks)):
                self._lose_daemon(f"process {daemon}, by which mpirun had started ranks on this host, was killed")
        self._ranks = found
        if self._process.pid in children or children.get(os.getpid(), []) == [self._process.pid]:
            self._orphaned_at = float("inf")
        elif (now := time.monotonic()) >= self._orphaned_at + timings.ORPHANED_S:  # killed before a look has seen it
            self._lose_daemon("the process by which mpirun had started ranks on this host was killed")
        else:
            self._orphaned_at = min(self._orphaned_at, now)

    def _lose_daemon(self, text: str) -> None:
        if not self._lost:
            self._lost = text
            self._after(timings.MPIRUN_LOST_HOST_S, self.terminate)

    def end(self) -> End:
        """Return how it ended."""
        code = self._process.returncode
        code = 128 - code if code < 0 else code
        if not self._reports and self._lost:
            return End(1, f"{self._lost}, before allred.init() was complete on a rank", joined=False)
        if not self._reports:
            return End(
                code, f"mpirun ended with exit code {code} before allred.init() was complete on a rank", joined=False
            )
        for reports in self._reports:
            if reports.code:
                return End(reports.code, reports.text, reports.exception, reports.step, restored=reports.restored)
        for reports in self._reports:
            if not (reports.is_success or (code == 0 and reports.watched_have_left)):
                text = f"{reports.missing}; mpirun ended with exit code {code}"
                return End(code or 1, text, restored=reports.restored)
        # A rank that no watcher could accept has only mpirun's exit code.
        return End(code, f"every rank reported success, but mpirun ended with exit code {code}" if code else "")


def _reap(kept: int) -> bool:
    """Collect the ends of adopted processes; not that of `kept`. Return whether a child process is left."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid != kept:
            os.waitpid(ended.si_pid, 0)
        return True
    return False


def descendants() -> list[int]:
    """Return the ids of all processes that descend from this one."""
    children, found = process_state.children(with_zombies=True), []
    todo = [os.getpid()]
    while todo:
        new = children.get(todo.pop(), [])
        found += new
        todo += new
    return found
