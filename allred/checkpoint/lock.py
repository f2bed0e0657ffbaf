"""Locks of unfinished checkpoints: whether the writer of one is dead, so that its files may be deleted.

1  The name of the directory contains the boot id of the kernel. `claim`, called by `begin`, creates manifest.json in
   the directory, locks it (flock), and then writes the name of the writer into it.
2  The kernel releases the lock when the process ends, in every case. `commit` writes the manifest into the same file:
   the lock is held until after the rename, and no lock file remains.
3  `is_dead` returns True if the file is not empty, has no lock, and is from this boot of this host, where flock is
   reliable.
4  The directory is created and claimed with a shared lock of the root. With the exclusive lock of the root, a directory
   of this boot that has no claim is dead.
5  Writers on other hosts (some file systems restrict flock to one host) and of earlier boots, and file systems without
   flock: `is_dead` returns True only if nothing in the directory has changed for a day. The clock of the file system is
   used, since the clocks of hosts differ.

A process forked from the writer holds the lock too: the directory then remains until both have ended.
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

_claimed: dict[str, BinaryIO] = {}  # real path of each directory that this process writes: its locked manifest


def claim(directory: pathlib.Path) -> None:
    """Create `directory` and lock it for this process. Raises OSError."""
    with _lock_root(directory.parent, fcntl.LOCK_SH):
        directory.mkdir()
        file = open(directory / NAME, "x+b")  # noqa: SIM115  (open until `release`: closing it releases the lock)
        try:
            with contextlib.suppress(OSError):  # a file system without locks: then the age decides
                fcntl.flock(file, fcntl.LOCK_EX)
            writer = f"process {os.getpid()} on {socket.gethostname()}"
            file.write(json.dumps({"writer": writer}).encode())
            file.flush()
        except BaseException:
            with contextlib.suppress(OSError):  # close() tries the failed write again
                file.close()
            raise
        _claimed[os.path.realpath(directory)] = file


@contextlib.contextmanager
def _lock_root(root: pathlib.Path, operation: int) -> Iterator[bool]:
    """Lock the directory of all checkpoints, and yield whether that succeeded."""
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, operation)
            locked = True
        except OSError:  # another process holds the lock, or the file system has no locks of directories
            locked = False
        yield locked
    finally:
        os.close(descriptor)


def exclude_claims(root: pathlib.Path) -> contextlib.AbstractContextManager[bool]:
    """Block `claim` of other processes on this host; yield whether that succeeded. Does not wait. Raises OSError."""
    return _lock_root(root, fcntl.LOCK_EX | fcntl.LOCK_NB)


def overwrite(directory: pathlib.Path, content: bytes) -> None:
    """Replace the content of the claimed manifest, sync it to disk, and keep the lock. Raises OSError."""
    file = _claimed.get(os.path.realpath(directory))
    with contextlib.nullcontext(file) if file else open(directory / NAME, "r+b") as manifest:
        manifest.seek(0)
        manifest.write(content)
        manifest.truncate()  # not earlier: an empty manifest counts as not claimed
        manifest.flush()
        os.fsync(manifest.fileno())


def release(directory: str) -> None:
    """Release the lock of a committed or abandoned checkpoint. `directory`: a real path, which need not exist."""
    if file := _claimed.pop(directory, None):
        with contextlib.suppress(OSError):
            file.close()


def is_dead(directory: pathlib.Path, boot: str, now: float, excluded: bool) -> bool:
    """Return whether the writer of the unfinished checkpoint in `directory` is dead.

    Arguments:
        boot: the `boot_id` of the writer.
        now: st_mtime of a file just written to the same file system.
        excluded: the value of `exclude_claims`.
    """
    if os.path.realpath(directory) in _claimed:
        return False
    same_boot = boot == boot_id()
    try:
        with open(directory / NAME, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if same_boot and (excluded or file.read(1)):
                return True
    except FileNotFoundError:
        if same_boot and excluded:
            return True
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
    return now - _last_change(directory) > ABANDONED_S


def _last_change(directory: pathlib.Path) -> float:
    try:
        return max(path.stat().st_mtime for path in [directory, *directory.iterdir()])
    except OSError:
        return float("inf")  # unknown: do not delete it


@functools.cache
def boot_id() -> str:
    """Return hex digits that identify this boot of this host."""
    try:
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    except OSError:
        return secrets.token_hex(16)  # then the age decides
