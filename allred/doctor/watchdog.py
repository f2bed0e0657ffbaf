"""Watchdog of a process that may hang or die inside MPI, where Python code cannot run.

A second process watches this one. Through a pipe it receives, for each phase, the time limit and two messages: one for
a phase that exceeds its limit, and one for a process that ends during the phase. After the limit it prints the message
and kills the watched process, and the launcher ends the job. The second process runs this file with the standard
library only, so it starts in about 20 ms.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator

_SILENT_FACTOR = 4.0  # silent watchdogs wait longer, so that the one that prints comes first


class Watchdog:
    """Starts the watchdog of this process. prints: whether it prints its messages; if not, it only kills."""

    def __init__(self, prints: bool) -> None:
        command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(int(prints))]
        self._process: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(OSError):  # the process limit is reached: continue without a watchdog
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    @contextlib.contextmanager
    def phase(self, limit_s: float, late: str, gone: str) -> Iterator[None]:
        """Watch a `with` block: print `late` and kill after limit_s; print `gone` if this process ends in the block."""
        self._send({"limit_s": limit_s, "late": late, "gone": gone})
        try:
            yield
        finally:
            self._send({})

    def close(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            self._process.wait()

    def _send(self, message: dict[str, object]) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):  # the watchdog was killed: this process continues
                self._process.stdin.write(json.dumps(message).encode() + b"\n")
                self._process.stdin.flush()


def watch(pid: int, prints: bool) -> None:
    """The main function of the watchdog's process; stdin is the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    phase: dict[str, object] = {}
    unread = b""
    while True:
        limit_s = phase.get("limit_s")
        wait_s = float(str(limit_s)) * (1 if prints else _SILENT_FACTOR) if limit_s is not None else None
        ready, _, _ = select.select([0], [], [], wait_s)
        received = os.read(0, 65536) if ready else b""
        if not received:
            break
        *messages, unread = (unread + received).split(b"\n")
        phase = json.loads(messages[-1]) if messages else phase
    message = str(phase.get("gone" if ready else "late", ""))
    if prints and message:
        print(message, flush=True)
    if not ready and os.getppid() == pid:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    watch(int(sys.argv[1]), sys.argv[2] == "1")
