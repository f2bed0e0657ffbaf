"""The limit of open files (RLIMIT_NOFILE) of processes with many connections. Many systems set it to 1024, and allow
more to a process that asks for it."""

import contextlib
import os
import resource


def allow(more: int) -> str:
    """Let this process open this number of files beside its open ones. Return why it cannot; "" if it can."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(os.listdir("/proc/self/fd")) + more
    if needed > soft != resource.RLIM_INFINITY:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return problem(needed)


def problem(number: int) -> str:
    """Return why no process started by this one can have this number of open files; "" if one can."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if number <= hard or hard == resource.RLIM_INFINITY:
        return ""
    return f"{number} open files are needed, but the limit (ulimit -Hn) is {hard}"
