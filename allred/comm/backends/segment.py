"""Shared memory of the ranks of one node. It is a memfd, which has no name, so nothing is left behind after a crash.

    1  the first rank creates it, and writes a nonce at its start
    2  the others open it through /proc and check the nonce: in another PID namespace the path may lead elsewhere
    3  if that fails on any rank, the first rank sends the descriptor to the others over a Unix socket
    4  if that fails too, there is no shared memory

All ranks agree on the result of every step, so none waits for a rank on which it failed.
"""

import contextlib
import dataclasses
import mmap
import os
import secrets
import socket
import struct
import time
import weakref
from collections.abc import Callable, Sequence

from allred.arena import NONCE_BYTES
from allred.comm.bootstrap import Bootstrap
from allred.runtime.timings import DESCRIPTOR_S


@dataclasses.dataclass(frozen=True)
class _Identity:
    """Identifies the file, so that another process knows that it has opened the right one."""

    device: int
    inode: int
    nonce: bytes


@dataclasses.dataclass(frozen=True)
class Offer:
    """How another process of this node can open shared memory."""

    path: str
    nbytes: int
    identity: _Identity


def offer(nbytes: int) -> tuple[mmap.mmap, Offer]:
    """Create `nbytes` bytes of shared memory. Its descriptor is open as long as the memory exists. Raises OSError if
    there is no memory."""
    fd, identity = _create(mmap.PAGESIZE + nbytes)  # the nonce has a page of its own
    memory = mmap.mmap(fd, nbytes, offset=mmap.PAGESIZE)
    weakref.finalize(memory, os.close, fd)
    return memory, Offer(f"/proc/{os.getpid()}/fd/{fd}", nbytes, identity)


def describe(fd: int, nbytes: int) -> Offer:
    """Offer `nbytes` bytes of a file of this process, behind its first page, which begins with a nonce."""
    return Offer(f"/proc/{os.getpid()}/fd/{fd}", nbytes, _identify(fd))


def accept(offered: Offer, fd: int = -1) -> mmap.mmap | None:
    """Map the memory of an offer; None if that fails. fd: a descriptor of the file, which is closed; default: it is
    opened through /proc."""
    try:
        if fd < 0:
            fd = os.open(offered.path, os.O_RDWR | os.O_CLOEXEC)
        return _map(fd, offered.nbytes, offered.identity, mmap.PAGESIZE)
    except OSError:
        return None


def share(bootstrap: Bootstrap, nbytes: int, ways: Sequence[Callable[[Bootstrap, int], int]] = ()) -> mmap.mmap | None:
    """Create `nbytes` bytes of zeros, shared by the ranks of `bootstrap`, all on one node; None if they cannot.

    Collective and blocking. ways: how to pass the descriptor, tried in turn; default: both.
    """
    fd, identity = -1, None
    if bootstrap.rank == 0:
        with contextlib.suppress(OSError):
            fd, identity = _create(nbytes)
    identity = bootstrap.broadcast_object(identity)
    if identity is None:
        return None
    try:
        for way in ways or (_through_proc, over_socket):
            memory = _map(way(bootstrap, fd), nbytes, identity)
            if all(bootstrap.allgather_object(memory is not None)):
                assert memory is not None
                memory[:NONCE_BYTES] = bytes(NONCE_BYTES)
                bootstrap.barrier()
                return memory
            if memory is not None:
                memory.close()
        return None
    finally:
        if fd >= 0:
            os.close(fd)


def way(bootstrap: Bootstrap) -> str:
    """Describe how the ranks of `bootstrap` share memory; "" if they cannot. Collective and blocking."""
    for words, one in (("memfd through /proc", _through_proc), ("memfd over a Unix socket", over_socket)):
        memory = share(bootstrap, mmap.PAGESIZE, [one])
        if memory is not None:
            memory.close()
            return words
    return ""


def _create(nbytes: int) -> tuple[int, _Identity]:
    fd = os.memfd_create("allred", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, nbytes)  # fails now with an error instead of a SIGBUS later
        os.pwrite(fd, secrets.token_bytes(NONCE_BYTES), 0)
        return fd, _identify(fd)
    except OSError:
        os.close(fd)
        raise


def _identify(fd: int) -> _Identity:
    status = os.fstat(fd)
    return _Identity(status.st_dev, status.st_ino, os.pread(fd, NONCE_BYTES, 0))


def _map(fd: int, nbytes: int, identity: _Identity, offset: int = 0) -> mmap.mmap | None:
    """Map the memory if this is the right file, else None. Closes the descriptor `fd`."""
    if fd < 0:
        return None
    try:
        return mmap.mmap(fd, nbytes, offset=offset) if _identify(fd) == identity else None
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)


def _through_proc(bootstrap: Bootstrap, fd: int) -> int:
    """Return a descriptor of the first rank's memory, or -1."""
    path = bootstrap.broadcast_object(f"/proc/{os.getpid()}/fd/{fd}")
    try:
        return os.dup(fd) if fd >= 0 else os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return -1


def over_socket(bootstrap: Bootstrap, fd: int, root: int = 0) -> int:
    """Return a descriptor of the file of rank `root`, or -1. Collective. fd: that file on `root`, else -1. It works
    between PID namespaces that share the network namespace."""
    with socket.socket(socket.AF_UNIX) as mine:
        mine.settimeout(DESCRIPTOR_S)
        name, ready = "", False
        with contextlib.suppress(OSError):
            if fd >= 0:
                name = f"\0allred-{secrets.token_hex(16)}"  # abstract: not a file
                mine.bind(name)
                mine.listen(bootstrap.size)
        name = bootstrap.broadcast_object(name, root)
        with contextlib.suppress(OSError):
            if fd < 0:
                mine.connect(name)
                ready = True
        connected = sum(bootstrap.allgather_object(ready))
        with contextlib.suppress(OSError, IndexError):  # IndexError: closed without a descriptor
            if fd >= 0:
                _serve(mine, fd, connected)
                return os.dup(fd)
            return socket.recv_fds(mine, 1, 1)[1][0]
    return -1


def _serve(listener: socket.socket, fd: int, count: int) -> None:
    """Send the descriptor to `count` processes of this user; other users can connect too, and are refused."""
    deadline = time.monotonic() + DESCRIPTOR_S
    while count and time.monotonic() < deadline:
        with listener.accept()[0] as peer:
            credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            if struct.unpack("3i", credentials)[1] == os.geteuid():
                socket.send_fds(peer, [b"m"], [fd])
                count -= 1
