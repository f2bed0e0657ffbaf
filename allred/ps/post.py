"""MPI between workers and servers: objects for everything that is rare, and gradients and parameters where the two ends
share no memory.

Nothing blocks: sends are kept until they are complete, receives are looked for. Cells pass through buffers that this
module owns, a few at a time, so an interrupted step never lets MPI write into a user's array.

Cells are sent with Issend, which completes only when the receiver has matched the message. So at most _DEPTH cells of a
sender are unexpected messages, even while the receiver serves other workers. Isend completes as soon as TCP has taken
the bytes, and limits nothing: libfabric's tcp provider stops reading a connection after 64 unexpected messages
(FI_TCP_MAX_SAVED), and MPICH then hangs if data flows in both directions.
"""

import pickle
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from allred import world
from allred.arrays import Array
from allred.comm.work import Steps, spin_wait
from allred.ps.layout import CELL_BYTES
from allred.ps.record import RECORD_BYTES

CALL, REPLY, BODY, STEP, ANSWER, UP, DOWN = range(1, 8)  # tags
_DEPTH = 4  # cells under way, each way
# Of a rank, where the MPI lets the others live: Open MPI's ULFM. An MPI without has mpi4py take ERR_UNKNOWN for them.
_DEATHS = {MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING} - {MPI.ERR_UNKNOWN}
LOST = (ConnectionResetError, MPI.Exception)  # how the death of the other end shows, mailboxes included
_PART_BYTES = 2**28  # of a large object: no count comes near 2**31


def _complete(request: Any, lost: bool = False) -> bool:
    """Whether a send or receive is over. Raises ConnectionResetError if the other end has died; not if `lost`, then
    that is an end too."""
    try:
        return bool(request.Test())
    except MPI.Exception as error:
        if error.Get_error_class() not in _DEATHS:
            raise
        if lost:
            return True
        raise ConnectionResetError from error


class Arrival:
    """A message with this tag, or one from that rank, to wait for. waits_for_peers: its sender may come late."""

    progress_count = 0

    def __init__(self, comm: Any, source: int, tag: int, waits_for_peers: bool = False) -> None:
        self.waits_for_peers = waits_for_peers
        self.nbytes = 0  # of the message, once it is there
        self._comm, self._source, self._tag = comm, source, tag

    def done(self) -> bool:
        status = MPI.Status()
        if not self._comm.Iprobe(self._source, self._tag, status):
            return False
        self.nbytes = status.Get_count(MPI.BYTE)
        return True

    def spin_wait(self) -> bool:
        return spin_wait(self.done)


class Post:
    """This rank's end of an mpi4py communicator that nobody else uses."""

    def __init__(self, comm: Any) -> None:
        self.comm = comm
        self._sending: deque[tuple[Any, Any]] = deque()  # requests, and what they send

    def send(self, to: int, tag: int, value: Any) -> None:
        """An object to a rank."""
        self.send_parts(to, tag, [pickle.dumps(value, pickle.HIGHEST_PROTOCOL)])

    def send_parts(self, to: int, tag: int, parts: Sequence[Any]) -> None:
        """Bytes, or memory that is sent from where it lies: it has to stay as it is until `tend` says so."""
        arrays = [np.frombuffer(part, np.uint8) for part in parts]
        self._start(np.array([array.size for array in arrays], np.int64).view(np.uint8), to, tag)
        for data in arrays:
            for at in range(0, data.size, _PART_BYTES):
                self._start(data[at : at + _PART_BYTES], to, BODY)

    def send_record(self, to: int, tag: int, record: bytes) -> None:
        """RECORD_BYTES bytes to a rank."""
        self._start(np.frombuffer(record, np.uint8), to, tag)

    def _start(self, data: Array, to: int, tag: int) -> None:
        self.tend()
        self._sending.append((self.comm.Isend([data, MPI.BYTE], to, tag), data))

    def tend(self) -> bool:
        """Drive what is being sent; True when all of it is."""
        while self._sending and _complete(self._sending[0][0], lost=True):
            self._sending.popleft()
        return not self._sending

    def arrived(self, tag: int) -> int | None:
        """A rank from which a message with this tag has come."""
        status = MPI.Status()
        try:
            return status.Get_source() if self.comm.Iprobe(MPI.ANY_SOURCE, tag, status) else None
        except MPI.Exception as error:
            if error.Get_error_class() not in _DEATHS or world.watcher() is None:
                raise
            self.comm.Ack_failed()  # the watcher tells of it, and what comes of it
            return None

    def receive_record(self, source: int, tag: int) -> bytes:
        """A record that has come."""
        record = np.empty(RECORD_BYTES, np.uint8)
        self.comm.Recv([record, MPI.BYTE], source, tag)
        return record.tobytes()

    def receive(self, source: int, tag: int, waits_for_peers: bool = False) -> Steps[Any]:
        """The object that a rank has sent, or is about to."""
        [data] = yield from self.receive_parts(source, tag, waits_for_peers)
        return pickle.loads(data.data)

    def receive_parts(self, source: int, tag: int, waits_for_peers: bool = False) -> Steps[list[Array]]:
        """The same, of `send_parts`."""
        arrival = Arrival(self.comm, source, tag, waits_for_peers)
        yield arrival
        sizes = np.empty(arrival.nbytes // 8, np.int64)
        self.comm.Recv([sizes.view(np.uint8), MPI.BYTE], source, tag)
        parts = [np.empty(size, np.uint8) for size in sizes.tolist()]
        for data in parts:
            for at in range(0, data.size, _PART_BYTES):
                part = data[at : at + _PART_BYTES]
                yield Arrival(self.comm, source, BODY)
                self.comm.Recv([part, MPI.BYTE], source, BODY)
        return parts


class _Stream:
    """Arrays as one stream of bytes."""

    def __init__(self, parts: Sequence[Array]) -> None:
        self._parts, self._number, self._offset = parts, 0, 0

    def copy(self, cell: Array, out: bool) -> None:
        """The next bytes into `cell`, or from it."""
        at = 0
        while at < cell.size:
            part = self._parts[self._number]
            count = min(cell.size - at, part.size - self._offset)
            here = part[self._offset : self._offset + count]
            if out:
                here[...] = cell[at : at + count]
            else:
                cell[at : at + count] = here
            at += count
            self._offset += count
            if self._offset == part.size:
                self._number, self._offset = self._number + 1, 0


class Exchange:
    """A worker's request, on its way; as `Pending`. `up`, `down`: arrays of bytes; sizes: of their cells."""

    waits_for_peers = False

    def __init__(
        self, post: Post, server: int, record: bytes, up: Sequence[Array], up_sizes: Array, down: Sequence[Array],
        down_sizes: Array,
    ) -> None:  # fmt: skip
        self.progress_count = 0
        self.reply = b""
        self._post, self._server = post, server
        self._up, self._down = _Stream(up), _Stream(down)
        self._up_sizes, self._down_sizes = deque(up_sizes.tolist()), deque(down_sizes.tolist())
        self._sends: deque[tuple[Any, Array]] = deque()
        self._receives: deque[tuple[Any, Array]] = deque()
        self._free = [np.empty(CELL_BYTES, np.uint8) for _ in range(min(_DEPTH, len(self._up_sizes)))]
        self._answer = np.empty(RECORD_BYTES, np.uint8)
        post.send_record(server, STEP, record)
        self._last = post.comm.Irecv([self._answer, MPI.BYTE], server, ANSWER)
        for _ in range(min(_DEPTH, len(self._down_sizes))):
            self._await_cell(np.empty(CELL_BYTES, np.uint8))
        self.done()

    def _await_cell(self, buffer: Array) -> None:
        cell = buffer[: self._down_sizes.popleft()]
        self._receives.append((self._post.comm.Irecv([cell, MPI.BYTE], self._server, DOWN), cell))

    def done(self) -> bool:
        self._post.tend()
        while self._sends and self._sends[0][0].Test():
            self._free.append(self._sends.popleft()[1])
            self.progress_count += 1
        while self._up_sizes and self._free:
            buffer = self._free.pop()
            cell = buffer[: self._up_sizes.popleft()]
            self._up.copy(cell, out=False)
            self._sends.append((self._post.comm.Issend([cell, MPI.BYTE], self._server, UP), buffer))
        while self._receives and self._receives[0][0].Test():
            _, cell = self._receives.popleft()
            self._down.copy(cell, out=True)
            self.progress_count += 1
            if self._down_sizes:
                self._await_cell(cell.base if cell.base is not None else cell)
        if self._receives or self._sends or self._up_sizes or not self._last.Test():
            return False
        self.reply = self._answer.tobytes()
        return True

    def spin_wait(self) -> bool:
        return spin_wait(self.done)


class _Room:
    """A condition, to wait for."""

    waits_for_peers = False
    progress_count = 0

    def __init__(self, done: Callable[[], bool]) -> None:
        self.done = done

    def spin_wait(self) -> bool:
        return spin_wait(self.done)


class MpiPort:
    """A server's end of the same."""

    waits_for_peers = False

    def __init__(self, post: Post, worker: int) -> None:
        self.progress_count = 0
        self._post, self._worker = post, worker
        self._sizes: deque[int] = deque()
        self._receives: deque[tuple[Any, Array]] = deque()
        self._sends: deque[tuple[Any, Array]] = deque()

    def open(self, sizes: Array) -> None:
        """Cells of so many bytes are about to come."""
        self._sizes.extend(sizes.tolist())
        while self._sizes and len(self._receives) < _DEPTH:
            self._await_cell()

    def _await_cell(self) -> None:
        cell = np.empty(self._sizes.popleft(), np.uint8)
        self._receives.append((self._post.comm.Irecv([cell, MPI.BYTE], self._worker, UP), cell))

    def cell(self) -> Array | None:
        """The bytes of the next one, if it has come."""
        self._post.tend()
        return self._receives[0][1] if _complete(self._receives[0][0]) else None

    def take(self) -> None:
        """That one is done with."""
        self._receives.popleft()
        self.progress_count += 1
        if self._sizes:
            self._await_cell()

    def done(self) -> bool:
        """Whether a cell has come."""
        return self.cell() is not None

    def spin_wait(self) -> bool:
        return spin_wait(self.done)

    @property
    def room(self) -> "_Room":
        """Until another cell can be given, to wait for."""
        return _Room(self._has_room)

    def _has_room(self) -> bool:
        while self._sends and _complete(self._sends[0][0]):
            self._sends.popleft()
        return len(self._sends) < _DEPTH

    def give(self, cell: Array) -> bool:
        """Send a cell of parameters, a copy of it; False while too many are under way."""
        if not self._has_room():
            return False
        copy = cell.copy()
        self._sends.append((self._post.comm.Issend([copy, MPI.BYTE], self._worker, DOWN), copy))
        return True

    def answer(self, record: bytes) -> None:
        self._post.send_record(self._worker, ANSWER, record)

    def has_read(self, number: int) -> bool:
        """Whether the worker still needs a cell that was given."""
        return True
