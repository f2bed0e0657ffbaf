"""A line on a job's stderr from a process that holds none of its files, at a moment when its ranks are being ended."""

import contextlib
import os
import stat

_NULL = os.makedev(1, 3)


def speak(line: str, launcher: list[int], ranks: list[int]) -> bool:
    """Write the line once: to the stderr of the launcher's process if that leads on (a pipe, a terminal), else to that
    of a rank.

    The launcher lives longer than the ranks; but where its stderr is a plain file, it may write over what we add.
    Whether it was written.
    """
    kinds = {pid: _kind(pid) for pid in (*launcher, *ranks)}
    best = [pid for pid in launcher if kinds[pid] == "stream"]
    files = [pid for pid in launcher if kinds[pid] == "file"]
    return any(_write(pid, line) for pid in (*best, *(pid for pid in ranks if kinds[pid]), *files))


def _kind(pid: int) -> str:
    try:
        status = os.stat(f"/proc/{pid}/fd/2")
    except OSError:
        return ""
    if stat.S_ISCHR(status.st_mode) and status.st_rdev == _NULL:
        return ""
    return "file" if stat.S_ISREG(status.st_mode) else "stream"


def _write(pid: int, line: str) -> bool:
    with contextlib.suppress(OSError):
        stream = os.open(f"/proc/{pid}/fd/2", os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            os.write(stream, line.encode())
            return True
        finally:
            os.close(stream)
    return False
