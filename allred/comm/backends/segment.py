"""Memory that the ranks of one node share, and that leaves nothing behind: a memfd has no name.

    1  the first rank makes it, and writes a nonce at its start
    2  the others open it through /proc, and look whether it is the same file: in another PID namespace the same path
       may be another process's
    3  if that fails on any of them, they try the next way: the descriptor is sent to them over a Unix socket
    4  if that fails too there is no shared memory, and all of them know it

Every step is agreed on by all ranks, so that none is left waiting for one on which it failed.
"""

import contextlib
import dataclasses
import mmap
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

NONCE_BYTES = 16
SOCKET_S = 10.0  # a rank that is connected answers at once; this bounds one that died in between


@dataclasses.dataclass(frozen=True)
class _Identity:
    """By which the others know that they have opened the right file."""

    device: int
    inode: int
    nonce: bytes


@dataclasses.dataclass(frozen=True)
class Offer:
    """How another process of this node opens memory that one has made."""

    path: str
    nbytes: int
    identity: _Identity


def offer(nbytes: int) -> tuple[mmap.mmap, Offer]:
    """New memory, and how others open it; its descriptor stays open. Raises OSError if it cannot be had."""
    fd, identity = _create(mmap.PAGESIZE + nbytes)  # the nonce stays, on a page of its own
    memory = mmap.mmap(fd, nbytes, offset=mmap.PAGESIZE)
    return memory, Offer(f"/proc/{os.getpid()}/fd/{fd}", nbytes, identity)


def accept(offered: Offer) -> mmap.mmap | None:
    """The memory that another process has made; None if it cannot be opened here."""
    try:
        fd = os.open(offered.path, os.O_RDWR | os.O_CLOEXEC)
        return _map(fd, offered.nbytes, offered.identity, mmap.PAGESIZE)
    except OSError:
        return None


def share(comm: Any, nbytes: int, ways: Sequence[Callable[[Any, int], int]] = ()) -> mmap.mmap | None:
    """`nbytes` bytes of zeros, the same on all ranks of an mpi4py communicator; None if they cannot share memory.

    Collective and blocking. The ranks have to be on one node. ways: other than the two below, in turn.
    """
    fd, identity = -1, None
    if comm.Get_rank() == 0:
        with contextlib.suppress(OSError):
            fd, identity = _create(nbytes)
    identity = comm.bcast(identity)
    if identity is None:
        return None
    try:
        for way in ways or (_through_proc, _over_socket):
            memory = _map(way(comm, fd), nbytes, identity)
            if all(comm.allgather(memory is not None)):
                assert memory is not None
                memory[:NONCE_BYTES] = bytes(NONCE_BYTES)
                comm.Barrier()
                return memory
            if memory is not None:
                memory.close()
        return None
    finally:
        if fd >= 0:
            os.close(fd)


def way(comm: Any) -> str:
    """Which way the ranks of an mpi4py communicator take, in words; "" if they have none. Collective and blocking."""
    for words, one in (("memfd through /proc", _through_proc), ("memfd over a Unix socket", _over_socket)):
        memory = share(comm, mmap.PAGESIZE, [one])
        if memory is not None:
            memory.close()
            return words
    return ""


def _create(nbytes: int) -> tuple[int, _Identity]:
    fd = os.memfd_create("allred", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, nbytes)  # now, where it is an error; later it would be a SIGBUS
        nonce = secrets.token_bytes(NONCE_BYTES)
        os.pwrite(fd, nonce, 0)
    except OSError:
        os.close(fd)
        raise
    status = os.fstat(fd)
    return fd, _Identity(status.st_dev, status.st_ino, nonce)


def _map(fd: int, nbytes: int, identity: _Identity, offset: int = 0) -> mmap.mmap | None:
    """The memory, if this is the right file. The descriptor is closed, but for the first rank's, which is in use."""
    if fd < 0:
        return None
    try:
        status = os.fstat(fd)
        found = _Identity(status.st_dev, status.st_ino, os.pread(fd, NONCE_BYTES, 0))
        return mmap.mmap(fd, nbytes, offset=offset) if found == identity else None
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)


def _through_proc(comm: Any, fd: int) -> int:
    """A descriptor of the first rank's memory, or -1."""
    path = comm.bcast(f"/proc/{os.getpid()}/fd/{fd}")
    try:
        return os.dup(fd) if fd >= 0 else os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return -1


def _over_socket(comm: Any, fd: int) -> int:
    """The same; it serves between PID namespaces, as long as they share the network namespace."""
    with socket.socket(socket.AF_UNIX) as mine:
        mine.settimeout(SOCKET_S)
        name, ready = "", False
        with contextlib.suppress(OSError):
            if fd >= 0:
                name = f"\0allred-{secrets.token_hex(16)}"  # abstract: not a file
                mine.bind(name)
                mine.listen(comm.Get_size())
        name = comm.bcast(name)
        with contextlib.suppress(OSError):
            if fd < 0:
                mine.connect(name)
                ready = True
        connected = sum(comm.allgather(ready))
        with contextlib.suppress(OSError, IndexError):  # the latter: the first rank closed without sending it
            if fd >= 0:
                _serve(mine, fd, connected)
                return os.dup(fd)
            return socket.recv_fds(mine, 1, 1)[1][0]
    return -1


def _serve(listener: socket.socket, fd: int, count: int) -> None:
    """Send the descriptor to `count` processes of this user; the name can be seen, and used, by others."""
    deadline = time.monotonic() + SOCKET_S
    while count and time.monotonic() < deadline:
        with listener.accept()[0] as peer:
            credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            if struct.unpack("3i", credentials)[1] == os.geteuid():
                socket.send_fds(peer, [b"m"], [fd])
                count -= 1
