"""The directory of this user's jobs on this host.

Only the user can enter it (mode 0700). For each job it has a file (mode 0600) by which monitors find the watcher, and
for each `allred run` one by which `allred resize` finds it: a port of this host, and the secret of the channel. The
newest MOST_ENDED jobs that have ended have a file with their last state.
"""

import contextlib
import json
import os
import stat
from pathlib import Path
from typing import Any

from allred.errors import AllredError
from allred.watch import process_state

RUN, JOB, ENDED = ".run", ".job", ".ended"
MOST_ENDED = 20


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


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _read(path: Path) -> dict[str, Any]:
    """Raises OSError or ValueError."""
    try:
        found = json.loads(path.read_text())
    except RecursionError:
        raise ValueError("JSON is nested too deep") from None
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    return found


def write_entry(name: str, kind: str, entry: dict[str, Any]) -> Path:
    """Write the file of a job, which only the user can read, and return it. Raises AllredError or OSError."""
    path, pid = directory() / f"{name}{kind}", os.getpid()
    _remove(path)  # of a job with this name that was killed
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "w") as file:
            json.dump({**entry, "process": pid, "started": process_state.start_time(pid)}, file)
    except OSError:
        _remove(path)
        raise
    return path


def remove_entry(path: Path, entry: dict[str, Any]) -> None:
    """Remove the file of a job that `write_entry` has written, if another job has not replaced it."""
    with contextlib.suppress(OSError, ValueError):
        if entry.items() <= _read(path).items():
            path.unlink()


def entries(kind: str) -> dict[str, dict[str, Any]]:
    """Return the files of the running jobs, by the name of the job. Removes those of processes that were killed."""
    found = {}
    for path in sorted(directory().glob(f"*{kind}")):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # it has just been removed, or damaged
            entry = _read(path)
            if entry["started"] == process_state.start_time(entry["process"]):
                found[path.name.removesuffix(kind)] = entry
            else:
                _remove(path)
    return found


def write_ended(name: str, state: dict[str, Any]) -> None:
    """Write the last state of a job, and remove the last states of the oldest jobs. Raises AllredError or OSError."""
    path = directory() / f"{name}{ENDED}"
    new = path.with_suffix(f".{os.getpid()}")  # a reader sees the whole file
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(state, file)
    new.replace(path)
    for old in _ended_paths()[:-MOST_ENDED]:
        _remove(old)


def ended() -> list[str]:
    """Return the names of the jobs with a last state, the newest last."""
    return [path.name.removesuffix(ENDED) for path in _ended_paths()]


def read_ended(name: str) -> dict[str, Any]:
    """Return the last state of a job that has ended. Raises AllredError."""
    try:
        state = _read(directory() / f"{name}{ENDED}")
    except (OSError, ValueError):
        raise AllredError(
            f"job {name}: its watcher does not answer, or ended without a last state; the ranks may still run"
        ) from None
    return state


def _ended_paths() -> list[Path]:
    times = {}
    for path in directory().glob(f"*{ENDED}"):
        with contextlib.suppress(OSError):
            times[path] = path.stat().st_mtime_ns
    return sorted(times, key=lambda path: times[path])


def choose(name: str, running: dict[str, Any], what: str) -> Any:
    """Return the value of a job; with "" of the only one. Raises AllredError, naming the jobs that run.

    what: what runs, for the message."""
    if name in running:
        return running[name]
    if not name and len(running) == 1:
        return next(iter(running.values()))
    problem = f"no job {name!r}" if name else "which job?" if running else "no job"
    none = f"no {what} of this user runs on this host (no file in {directory()}; XDG_RUNTIME_DIR selects it)"
    which = f"running here: {', '.join(running)}" if running else none
    raise AllredError(f"{problem}; {which}")
