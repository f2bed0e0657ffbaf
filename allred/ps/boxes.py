"""Memory that a server shares with the workers of its node: its parameters, and a mailbox for each of them.

A worker opens it through /proc; where that cannot be (another PID namespace, no C extension) its traffic goes by MPI.
"""

import mmap
from collections.abc import Callable
from typing import Any

from allred import native
from allred.arrays import Array
from allred.comm.backends.segment import Offer, accept, offer
from allred.comm.work import spin_wait
from allred.ps.layout import CELL_BYTES

SLOTS = 8
BELL_BYTES = 64  # at the end of the parameters' memory: what a sleeping server is woken by
BOX_BYTES = native.mailbox_bytes(SLOTS, CELL_BYTES) if native.mailbox_bytes is not None else 0


def new(nbytes: int) -> tuple[Any, Offer | None]:
    """Memory of so many bytes, and how others open it; None where they cannot."""
    if native.available:
        try:
            return offer(max(nbytes, mmap.PAGESIZE))
        except OSError:
            pass
    return bytearray(nbytes), None


def mailbox(memory: Any, shard: Any) -> Any:
    """One end of a mailbox in `memory`."""
    return native.Mailbox(memory, SLOTS, CELL_BYTES, memoryview(shard)[-BELL_BYTES:])


def open_box(offers: tuple[Offer | None, Offer | None]) -> tuple[Any, Any] | None:
    """A worker's end: the mailbox and the server's parameters; None if they cannot be had."""
    box, shard = (accept(each) if each is not None and native.available else None for each in offers)
    return None if box is None or shard is None else (mailbox(box, shard), shard)


class _Read:
    """A cell that a worker has still to copy, to wait for."""

    waits_for_peers = False
    progress_count = 0

    def __init__(self, has_read: Callable[[int], bool], number: int, worker: int) -> None:
        self._has_read, self._number, self.worker = has_read, number, worker

    def done(self) -> bool:
        return self._has_read(self._number)

    def spin_wait(self) -> bool:
        return spin_wait(self.done)


class BoxPort:
    """A server's end of a mailbox."""

    waits_for_peers = False

    def __init__(self, box: Any) -> None:
        self.box = box
        self.progress_count = 0
        self.cell, self._take, self._give, self.answer = box.cell, box.take, box.give, box.answer
        self._given = 0

    def open(self, sizes: Array) -> None:
        """Cells of so many bytes are about to come."""
        self._given = 0

    def take(self) -> None:
        """The cell is done with."""
        self._take(1)
        self.progress_count += 1

    def done(self) -> bool:
        """Whether a cell has come."""
        return self.cell() is not None

    def spin_wait(self) -> bool:
        return bool(self.box.spin_wait_cell() is not None)

    def give(self, cell: Array) -> bool:
        """The next cell of the parameters may be read."""
        self._give(1)
        self._given += 1
        return True

    def has_read(self, number: int) -> bool:
        """Whether the worker has copied that cell, if it was given."""
        read: int = self.box.read
        return read > number or read >= self._given

    def forget(self) -> None:
        """The worker will not copy what was given."""
        self._given = 0

    def reading(self, number: int, worker: int) -> _Read:
        """The pending copy of this cell by the worker, to be waited for."""
        return _Read(self.has_read, number, worker)
