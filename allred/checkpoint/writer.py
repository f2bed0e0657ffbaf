"""Whether the writer of an unfinished checkpoint still lives: leftovers of dead ones may go, those of others never.

1  The name of the directory has the boot id of the kernel in it. `claim`, called by `begin`, makes the directory's
   manifest.json, locks it (flock), and only then writes into it who the writer is.
2  The kernel drops the lock when the process ends, however it ends. `commit` writes the manifest into the same file, so
   that the lock is held until after the rename, and nothing else has to be removed.
3  `is_dead` answers yes if the file is not empty, nobody holds its lock, and it is of this boot of this host: there
   flock can be trusted.
4  The directory is made and claimed with a shared lock of the root. Who has that lock alone knows that a directory
   of this boot which is not claimed will never be.
5  For a writer on another host (some file systems keep flock to one host), one of an earlier boot, and where there is
   no flock or no such file, it answers yes only if nothing in the directory has changed for a day: measured by the
   clock that dates files, since hosts' clocks differ.

A process forked from the writer holds the lock as well: the directory then stays until both have ended.
"""

import contextlib
import errno
import fcntl
import functools
import json
import os
import pathlib
import secrets
import socket
from collections.abc import Iterator
from typing import BinaryIO

from allred.checkpoint.manifest import NAME

ABANDONED_S = 24 * 3600.0

_held: dict[str, BinaryIO] = {}  # directories that this process writes, each with its locked manifest


def claim(directory: pathlib.Path) -> None:
    """Make `directory`; this process writes the checkpoint in it from now on. Raises OSError."""
    with _root_locked(directory.parent, fcntl.LOCK_SH):
        directory.mkdir()
        _claim(directory)


@contextlib.contextmanager
def _root_locked(root: pathlib.Path, how: int) -> Iterator[bool]:
    """Whether it is."""
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, how)
            locked = True
        except OSError:  # held by another; or a file system without locks, or without those of directories
            locked = False
        yield locked
    finally:
        os.close(descriptor)


def nobody_begins(root: pathlib.Path) -> contextlib.AbstractContextManager[bool]:
    """Keep others on this host from `claim`, and give whether that could be done. Does not wait. Raises OSError."""
    return _root_locked(root, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _claim(directory: pathlib.Path) -> None:
    file = open(directory / NAME, "x+b")  # noqa: SIM115  (open until `release`: closing it drops the lock)
    try:
        with contextlib.suppress(OSError):  # a file system without locks; then age decides
            fcntl.flock(file, fcntl.LOCK_EX)
        who = f"process {os.getpid()} on {socket.gethostname()}"
        file.write(json.dumps({"writer": who}).encode())
        file.flush()
    except BaseException:
        with contextlib.suppress(OSError):  # it writes once more what could not be written
            file.close()
        raise
    _held[os.path.realpath(directory)] = file


def overwrite(directory: pathlib.Path, content: bytes) -> None:
    """Replace what the claimed manifest says, on disk, and keep the lock. Raises OSError."""
    file = _held.get(os.path.realpath(directory))
    with contextlib.nullcontext(file) if file else open(directory / NAME, "r+b") as manifest:
        manifest.seek(0)
        manifest.write(content)
        manifest.truncate()  # not before: an empty one is nobody's
        manifest.flush()
        os.fsync(manifest.fileno())


def release(directory: str) -> None:
    """The checkpoint is done, or given up. `directory` is its real path; it need not exist any more."""
    if file := _held.pop(directory, None):
        with contextlib.suppress(OSError):  # as above
            file.close()


def is_dead(directory: pathlib.Path, boot: str, now: float, alone: bool) -> bool:
    """Whether nobody writes the unfinished checkpoint in `directory` any more.

    Arguments:
        boot: what `boot_id` was for its writer.
        now: st_mtime of something just written to the same file system.
        alone: what `nobody_begins` gave.
    """
    if os.path.realpath(directory) in _held:
        return False
    ours = boot == boot_id()
    try:
        with open(directory / NAME, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if ours and (alone or file.read(1)):
                return True
    except FileNotFoundError:
        if ours and alone:
            return True
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
    return now - _changed(directory) > ABANDONED_S


def _changed(directory: pathlib.Path) -> float:
    """When something in the directory changed last; the end of time if it cannot be looked at."""
    try:
        return max(path.stat().st_mtime for path in [directory, *directory.iterdir()])
    except OSError:
        return float("inf")


@functools.cache
def boot_id() -> str:
    """Hex digits that are the same for all processes of this boot of this host, and for no others."""
    try:
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    except OSError:
        return secrets.token_hex(16)  # then age decides
