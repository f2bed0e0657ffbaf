"""Last words for a process that hangs or dies inside MPI, where Python cannot speak: nothing that calls into C can.

A process of its own watches this one. It is told, through a pipe, what begins, how long that may take, and what to
print if it takes longer or if this process ends in it; then it kills this process, and the launcher ends the job.
It runs this file, with nothing but Python itself, so it starts in some 20 ms.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator

_BEHIND = 4.0  # times later the guards of ranks that do not speak come: the one that speaks is to be heard first


class Guard:
    """The guard of this process. `speaks`: whether it prints anything."""

    def __init__(self, speaks: bool) -> None:
        command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(int(speaks))]
        self._process: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(OSError):  # no more processes allowed: then there is none, and no limit in C
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    @contextlib.contextmanager
    def phase(self, limit_s: float, late: str, gone: str) -> Iterator[None]:
        """For the length of a `with`: after limit_s print `late` and kill; print `gone` if this process ends in it."""
        self._tell({"limit_s": limit_s, "late": late, "gone": gone})
        try:
            yield
        finally:
            self._tell({})

    def close(self) -> None:
        """End the guard."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            self._process.wait()

    def _tell(self, message: dict[str, object]) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):  # it was killed: no reason to end this process too
                self._process.stdin.write(json.dumps(message).encode() + b"\n")
                self._process.stdin.flush()


def watch(pid: int, speaks: bool) -> None:
    """The guard's own program, with the pipe as stdin."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    phase: dict[str, object] = {}
    unread = b""
    while True:
        limit_s = phase.get("limit_s")
        wait_s = float(str(limit_s)) * (1 if speaks else _BEHIND) if limit_s is not None else None
        ready, _, _ = select.select([0], [], [], wait_s)
        received = os.read(0, 65536) if ready else b""
        if not received:
            break
        *messages, unread = (unread + received).split(b"\n")
        phase = json.loads(messages[-1]) if messages else phase
    words = str(phase.get("gone" if ready else "late", ""))
    if speaks and words:
        print(words, flush=True)
    if not ready and os.getppid() == pid:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    watch(int(sys.argv[1]), sys.argv[2] == "1")
