"""Shared memory between a server and the workers of its node: the parameters, and a mailbox for each worker.

Gradients in a worker's arena (allred/arena.py) are read from there; others are copied into the cells of its mailbox.
Each side opens the memory of the other through /proc. Where that is impossible (another PID namespace, no C extension),
it uses MPI.
"""

import functools
import mmap
from typing import Any

import numpy as np

from allred import arena, native
from allred.arrays import Array
from allred.comm.backends.segment import Offer, accept, describe, offer
from allred.ps.run_steps import Condition
from allred.ps.shard import CELL_BYTES

SLOTS = 8  # cells in a mailbox
BELL_BYTES = 64  # doorbell that wakes a sleeping server, at the end of the parameters' memory
BOX_BYTES = native.mailbox_bytes(SLOTS, CELL_BYTES) if native.mailbox_bytes is not None else 0


def allocate(nbytes: int) -> tuple[Any, Offer | None]:
    """Return memory of `nbytes` bytes, and the offer with which another process opens it; None if it cannot."""
    if native.available:
        try:
            return offer(max(nbytes, mmap.PAGESIZE))
        except OSError:
            pass
    return bytearray(nbytes), None


def offer_arena() -> Offer | None:
    """Return how a server opens the arena of this worker; None if there is none."""
    own = arena.memory()
    return None if own is None else describe(own[1], len(own[0]))


def mailbox(memory: Any, parameters: Any) -> Any:
    """Return one end of the mailbox in `memory`."""
    return native.Mailbox(memory, SLOTS, CELL_BYTES, memoryview(parameters)[-BELL_BYTES:])


def open_mailbox(*offers: Offer | None) -> tuple[Any, Any, Any]:
    """Return a worker's end of the mailbox, the server's parameters, and the memory of vectors; three times None if
    they cannot be opened. offers: of the three."""
    opened = [None if each is None or not native.available else accept(each) for each in offers]
    return (None, None, None) if None in opened else (mailbox(*opened[:2]), *opened[1:])


class MailboxPort:
    """A server's end of a mailbox. It is a `Pending` that is complete when a cell has arrived."""

    waits_for_peers = False

    def __init__(self, box: Any) -> None:
        self.box = box
        self.progress_count = 0
        self.cell, self._take, self._give, self.answer = box.cell, box.take, box.give, box.answer
        self._given = 0
        self._vectors: Any = None  # memory of the vectors that the worker looks up

    def open(self, sizes: Array) -> None:
        """Begin to receive cells of these sizes in bytes."""
        self._given = 0

    def take(self) -> None:
        """Release the slot of the first cell."""
        self._take(1)
        self.progress_count += 1

    def done(self) -> bool:
        return self.cell() is not None

    def spin_wait(self) -> bool:
        return bool(self.box.spin_wait_cell() is not None)

    def give(self, cell: Array, of_shard: bool = True) -> bool:
        """Let the worker copy the next cell. of_shard: of the parameters; else of vectors."""
        self._give(1) if of_shard else self._give(1, True)
        self._given += 1
        return True

    def set_vectors(self, memory: Any) -> None:
        """Set the memory of the vectors that the worker looks up (table_cells.py)."""
        self._vectors = np.frombuffer(memory, np.uint8)

    def room_for(self, start: int, nbytes: int, before: int) -> Array | None:
        """Return memory for a cell of a lookup; None until the worker has copied cell `before`, which was there. start:
        the place in the memory of vectors."""
        if before >= 0 and not self.has_read(before):
            return None
        memory: Array = self._vectors[start : start + nbytes]
        return memory

    def note_given(self, count: int) -> None:
        """Note that the worker was given this number of cells."""
        self._given = count

    def has_read(self, number: int) -> bool:
        """Whether the worker has copied this cell, or the server has not given it."""
        read: int = self.box.read
        return read > number or read >= self._given

    def forget(self) -> None:
        """Do not wait for the worker to copy cells: it is gone."""
        self._given = 0

    def reading(self, number: int, worker: int) -> Condition:
        """Return the wait until the worker has copied this cell."""
        return Condition(functools.partial(self.has_read, number), worker)
