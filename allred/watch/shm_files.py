"""MPICH's files of shared memory in /dev/shm. MPI_Init creates one for the ranks of a node and MPI_Finalize deletes it,
so a job that is killed leaves it.

Whether a file is in use is asked of the kernel: it grants a read lease only if no process on this machine has the file
open or mapped for writing, also of other users and in other namespaces, whose /proc/PID/maps may not be readable.

python -m allred.watch.shm_files deletes the files of this user that no process uses.
"""

import contextlib
import fcntl
import glob
import os
import re
import signal
import stat
from typing import NamedTuple

_MAPPED = re.compile(r" ([0-9a-f]+):([0-9a-f]+) (\d+) +(/dev/shm/mpich_shm_\w+)$", re.MULTILINE)


class File(NamedTuple):
    """A file and its identity: another job may create a file with the same path later."""

    path: str
    device: int
    inode: int


def mapped(pid: int) -> set[File]:
    """The files of MPICH that a process has mapped; empty if that cannot be read. MPICH maps them in MPI_Init."""
    try:
        with open(f"/proc/{pid}/maps") as maps:
            found = _MAPPED.findall(maps.read())
    except OSError:
        return set()
    return {File(path, os.makedev(int(major, 16), int(minor, 16)), int(inode)) for major, minor, inode, path in found}


def unused() -> dict[File, int]:
    """The files of MPICH that belong to this user and that no process uses, with their bytes in memory."""
    found = {}
    for path in sorted(glob.glob("/dev/shm/mpich_shm_*")):
        with contextlib.suppress(OSError), _Leased(path) as status:
            found[File(path, status.st_dev, status.st_ino)] = status.st_blocks * 512
    return found


def delete(file: File) -> bool:
    """Delete a file that no process uses. False if it is in use, or if that is unknown; True if it is gone."""
    try:
        with _Leased(file.path) as status:
            if (status.st_dev, status.st_ino) == (file.device, file.inode):
                os.unlink(file.path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


class _Leased:
    """An own file that no process uses, with its status. Raises OSError if it is in use, or belongs to another user. A
    process that opens it for writing waits until the end of the block."""

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)

    def __enter__(self) -> os.stat_result:
        try:
            status = os.fstat(self._descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                raise PermissionError
            fcntl.fcntl(self._descriptor, fcntl.F_SETSIG, signal.SIGURG)  # at such an open; it is ignored by default
            fcntl.fcntl(self._descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        except OSError:
            os.close(self._descriptor)
            raise
        return status

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


if __name__ == "__main__":
    deleted = [nbytes for file, nbytes in unused().items() if delete(file)]
    print(f"deleted in /dev/shm: {len(deleted)} of MPICH's files that no process used, {sum(deleted)} bytes")
