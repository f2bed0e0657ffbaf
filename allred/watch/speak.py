"""A line on a job's stderr from a process that holds none of its files, at a moment when its ranks are being ended."""

import contextlib
import os
import stat

_NULL = os.makedev(1, 3)


def outlet(launcher: list[int], ranks: list[int]) -> int:
    """A descriptor of the job's stderr, -1 if there is none: that of a process of the launcher, outermost last in the
    list and taken first, where it leads on (a pipe, a terminal); else that of a rank.

    The launcher lives longer than the ranks; but where its stderr is a plain file, it may write over what we add.
    """
    kinds = {pid: _kind(pid) for pid in (*reversed(launcher), *ranks)}
    streams = [pid for pid, kind in kinds.items() if kind == "stream"]
    files = [pid for pid, kind in kinds.items() if kind == "file"]
    return next((opened for pid in (*streams, *files) if (opened := _open(pid)) >= 0), -1)


def speak(descriptor: int, line: str) -> None:
    """Write a line, and close the outlet."""
    if descriptor >= 0:
        with contextlib.suppress(OSError):
            os.write(descriptor, line.encode())
        os.close(descriptor)


def _kind(pid: int) -> str:
    try:
        status = os.stat(f"/proc/{pid}/fd/2")
    except OSError:
        return ""
    if stat.S_ISCHR(status.st_mode) and status.st_rdev == _NULL:
        return ""
    return "file" if stat.S_ISREG(status.st_mode) else "stream"


def _open(pid: int) -> int:
    try:
        return os.open(f"/proc/{pid}/fd/2", os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return -1
