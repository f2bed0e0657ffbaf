"""The directory of this user's running jobs on this host, with a socket for each `allred run`.

Only the user can enter it (mode 0700), so a file in it needs no password.
"""

import contextlib
import os
import socket
import stat
from pathlib import Path

from allred.errors import AllredError

SOCKET = ".run"


def directory() -> Path:
    """Return the directory; create it if it is missing. Raises AllredError if another user could write to it."""
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    path = Path(base, "allred") if base and os.access(base, os.W_OK) else Path(f"/tmp/allred-{os.geteuid()}")
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise AllredError(f"the directory of running jobs, {path}, cannot be used: {error.strerror}") from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise AllredError(f"{path} must be a directory of this user with mode 0700; remove it")
    return path


def jobs() -> dict[str, Path]:
    """Return the sockets of the running jobs of `allred run`, by name; removes those of processes that were killed."""
    found = {}
    for path in sorted(directory().glob(f"*{SOCKET}")):
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(path))
            except OSError:
                with contextlib.suppress(OSError):
                    path.unlink()
                continue
        found[path.name.removesuffix(SOCKET)] = path
    return found


def find(name: str) -> Path:
    """Return the socket of a job; with "" of the only one. Raises AllredError if there is none, naming those that
    run."""
    running = jobs()
    if name in running:
        return running[name]
    if not name and len(running) == 1:
        return next(iter(running.values()))
    what = f"no job {name!r}" if name else "which job?" if running else "no job"
    which = f"running here: {', '.join(running)}" if running else "no `allred run` of this user runs on this host"
    raise AllredError(f"{what}; {which}")
