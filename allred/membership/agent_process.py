"""`AgentProcess`: a process that an agent has started (agent.py)."""

import contextlib
import ctypes
import mmap
import os
import signal
import struct
import subprocess

from allred.runtime.channel import Channel

NEVER = 2**62  # no world has this number: poisoned with it, a process leaves every world
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Let this process be killed when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def prepare() -> None:
    """In a child, before it becomes the program: let it end with its agent, and not inherit ignored signals."""
    end_with_parent()
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


class AgentProcess:
    """A process of this host. It is the rank itself, or a program such as a shell that starts the rank."""

    def __init__(self, name: str, popen: "subprocess.Popen[bytes]") -> None:
        self.name, self.popen = name, popen
        self.pidfd = os.pidfd_open(popen.pid)
        self.channel: Channel | None = None  # after it has connected
        self.page: mmap.mmap | None = None
        self.rank_pid, self.rank_pidfd = popen.pid, -1  # rank_pidfd: of a rank that another program has started
        self.is_reported = False
        self.has_success = False  # whether a rank that another program has started has ended with success
        self.failure, self.failed_with = "", 0  # the last line of its traceback, and its exit code
        self.is_late = False  # whether it was killed, because it had not ended after a failure

    def kill(self) -> None:
        """Kill all processes of its session."""
        with contextlib.suppress(OSError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        if self.rank_pidfd >= 0:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self.rank_pidfd, signal.SIGKILL)

    def poison(self, generation: int) -> None:
        if self.page is not None:
            struct.pack_into("=Q", self.page, 0, generation)
