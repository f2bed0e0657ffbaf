"""MPICH's shared-memory files in /dev/shm. MPI_Init creates one for the ranks of a node, which all of them map, and
MPI_Finalize deletes it. init() deletes it at once, because a killed job would leave it there. Files of jobs that end in
MPI_Init, or do not use allred, stay.

A file is in use if the kernel refuses a read lease. The kernel grants the lease only if no process of this machine has
the file open or mapped for writing. That includes processes of other users and namespaces, whose /proc/PID/maps may not
be readable.

python -m allred.watch.shm_files deletes the files of this user that no process uses.
"""

import contextlib
import fcntl
import glob
import os
import re
import signal
import stat
import sys
from typing import NamedTuple

_MAPPED = re.compile(r" (/dev/shm/mpich_shm_\w+)$", re.MULTILINE)  # a deleted file has another end


class File(NamedTuple):
    """A file and its identity: another job may create a file with the same path later."""

    path: str
    device: int
    inode: int


def unused() -> dict[File, int]:
    """Return the files of MPICH of this user that no process uses, with the bytes of memory of each."""
    found = {}
    for path in sorted(glob.glob("/dev/shm/mpich_shm_*")):
        with contextlib.suppress(OSError), _Leased(path) as status:
            found[File(path, status.st_dev, status.st_ino)] = status.st_blocks * 512
    return found


def delete(file: File) -> bool:
    """Delete a file if no process uses it. Returns whether the file no longer exists."""
    try:
        with _Leased(file.path) as status:
            if (status.st_dev, status.st_ino) == (file.device, file.inode):
                os.unlink(file.path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def delete_own() -> None:
    """Delete the files that this process has mapped. Call it after MPI_Init, which returns when all ranks of the node
    have mapped the file; none opens it again."""
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
        for path in set(_MAPPED.findall(maps.read())):
            os.unlink(path)


class _Leased:
    """Context manager: a read lease on a file of this user; gives the file's status. Raises OSError if a process uses
    the file or it belongs to another user. A process that opens it for writing waits until the end of the block."""

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)

    def __enter__(self) -> os.stat_result:
        try:
            status = os.fstat(self._descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                raise PermissionError
            # The signal that reports such an open; its default action is to ignore it.
            fcntl.fcntl(self._descriptor, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(self._descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        except OSError:
            os.close(self._descriptor)
            raise
        return status

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit("usage: python -m allred.watch.shm_files: delete the files of MPICH in /dev/shm that no process uses")
    deleted = [nbytes for file, nbytes in unused().items() if delete(file)]
    print(f"deleted {len(deleted)} files of MPICH in /dev/shm that no process used, {sum(deleted)} bytes")
