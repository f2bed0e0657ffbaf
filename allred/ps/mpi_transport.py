"""MPI transport between workers and servers: control requests of all workers, and cells where memory is not shared.

No operation blocks: a send is kept until it is complete, and receives are tested. Cells pass through buffers of this
module, so after an interrupted step MPI never writes into a user's array.

Cells are sent with Issend, which completes only when the receiver has matched the message. So at most _DEPTH cells of a
sender are unexpected messages, even while the receiver serves other workers. Isend completes as soon as TCP has taken
the bytes, and limits nothing: libfabric's tcp provider stops reading a connection after 64 unexpected messages
(FI_TCP_MAX_SAVED), and MPICH then hangs if data flows in both directions. An object is sent in
at most 33 parts, and in one more for each 256 MiB.
"""

import pickle
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from allred import world
from allred.arrays import Array
from allred.comm.work import Steps, spin_wait
from allred.ps.protocol import RECORD_BYTES, Leave
from allred.ps.run_steps import Condition
from allred.ps.shard import CELL_BYTES
from allred.runtime.timings import LAST_MESSAGE_S

CALL, REPLY, BODY, STEP, STEP_REPLY, UP, DOWN = range(1, 8)  # tags
_DEPTH = 4  # cells in flight in each direction
# Errors of a dead peer in an MPI that continues without it (Open MPI's ULFM). In other MPIs mpi4py maps them to
# ERR_UNKNOWN.
_DEATHS = {MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING} - {MPI.ERR_UNKNOWN}
LOST = (ConnectionResetError, MPI.Exception)  # errors of a dead peer, for both transports
_PART_BYTES = 2**28  # of a large object, so that counts stay below 2**31
_UNCOPIED_BYTES, _UNCOPIED = 2**20, 32  # arrays from this size are sent without copies; at most this number


def _complete(request: Any, lost: bool = False) -> bool:
    """Whether a send or receive is complete. Raises ConnectionResetError if the peer has died, but True with `lost`."""
    try:
        return bool(request.Test())
    except MPI.Exception as error:
        if error.Get_error_class() not in _DEATHS:
            raise
        if lost:
            return True
        raise ConnectionResetError from error


class _Tested:
    """Base class of a `Pending` that tests MPI requests. Its `done` is a method, so it forms no reference cycle."""

    waits_for_peers = False
    progress_count = 0

    def done(self) -> bool:
        raise NotImplementedError

    def spin_wait(self) -> bool:
        return spin_wait(self.done)


class Arrival(_Tested):
    """A `Pending` for a message of a rank with this tag. waits_for_peers: the sender may be late."""

    def __init__(self, comm: Any, source: int, tag: int, waits_for_peers: bool = False) -> None:
        self.waits_for_peers = waits_for_peers
        self.nbytes = 0  # of the message, once it has arrived
        self._comm, self._source, self._tag = comm, source, tag

    def done(self) -> bool:
        status = MPI.Status()
        if not self._comm.Iprobe(self._source, self._tag, status):
            return False
        self.nbytes = status.Get_count(MPI.BYTE)
        return True


class MpiTransport:
    """Sends and receives objects over an mpi4py communicator that has no other user."""

    def __init__(self, comm: Any) -> None:
        self.comm = comm
        self._sending: deque[tuple[Any, Any]] = deque()  # requests, and their data

    def send(self, to: int, tag: int, value: Any, copies: bool = True) -> None:
        """Send an object. copies: whether its large arrays are copied. If not, they must not change until the receiver
        has them."""
        buffers: list[Any] = []

        def is_copied(buffer: pickle.PickleBuffer) -> bool:
            if copies or len(buffers) == _UNCOPIED or (raw := buffer.raw()).nbytes < _UNCOPIED_BYTES:
                return True
            buffers.append(raw)
            return False

        pickled = pickle.dumps(value, pickle.HIGHEST_PROTOCOL, buffer_callback=is_copied)
        self.send_parts(to, tag, [pickled, *buffers])

    def send_parts(self, to: int, tag: int, parts: Sequence[Any]) -> None:
        """Send buffers without a copy: they must not change until `progress` returns True."""
        arrays = [np.frombuffer(part, np.uint8) for part in parts]
        self._start(np.array([array.size for array in arrays], np.int64).view(np.uint8), to, tag)
        for data in arrays:
            for at in range(0, data.size, _PART_BYTES):
                self._start(data[at : at + _PART_BYTES], to, BODY)

    def send_record(self, to: int, tag: int, record: bytes) -> None:
        self._start(np.frombuffer(record, np.uint8), to, tag)

    def _start(self, data: Array, to: int, tag: int) -> None:
        self.progress()
        self._sending.append((self.comm.Isend([data, MPI.BYTE], to, tag), data))

    def progress(self) -> bool:
        """Make progress with sends; True when all are complete."""
        while self._sending and _complete(self._sending[0][0], lost=True):
            self._sending.popleft()
        return not self._sending

    def flush(self, limit_s: float) -> None:
        """Make progress until all sends are complete, for at most `limit_s` seconds."""
        until = time.monotonic() + limit_s
        while not self.progress() and time.monotonic() < until:
            pass

    def arrived(self, tag: int) -> int | None:
        """Return the source of a message with this tag that has arrived; None if there is none."""
        status = MPI.Status()
        try:
            return status.Get_source() if self.comm.Iprobe(MPI.ANY_SOURCE, tag, status) else None
        except MPI.Exception as error:
            if error.Get_error_class() not in _DEATHS or world.watcher() is None:
                raise
            self.comm.Ack_failed()  # the watcher reports it
            return None

    def receive_record(self, source: int, tag: int) -> bytes:
        record = np.empty(RECORD_BYTES, np.uint8)
        self.comm.Recv([record, MPI.BYTE], source, tag)
        return record.tobytes()

    def receive(self, source: int, tag: int, waits_for_peers: bool = False) -> Steps[Any]:
        pickled, *buffers = yield from self.receive_parts(source, tag, waits_for_peers)
        return pickle.loads(pickled.data, buffers=buffers)

    def receive_parts(self, source: int, tag: int, waits_for_peers: bool = False) -> Steps[list[Array]]:
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


def send_leave(comm: Any, servers: int) -> None:
    """Tell the servers that this worker makes no more requests."""
    transport = MpiTransport(comm)
    for server in range(servers):
        transport.send(server, CALL, Leave())
    transport.flush(LAST_MESSAGE_S)


class _ByteStream:
    """Byte arrays as one stream."""

    def __init__(self, parts: Sequence[Array]) -> None:
        self._parts, self._number, self._offset = parts, 0, 0

    def copy(self, cell: Array, out: bool) -> None:
        """Copy the next bytes of the stream into `cell`; with `out`, copy `cell` into the stream."""
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


class Exchange(_Tested):
    """A worker's step request by MPI, as a `Pending`. up, down: byte arrays to push and to fill, with the sizes of
    their cells in bytes."""

    def __init__(
        self, transport: MpiTransport, server: int, record: bytes, up: Sequence[Array], up_sizes: Array,
        down: Sequence[Array], down_sizes: Array,
    ) -> None:  # fmt: skip
        self.reply = b""
        self._transport, self._server = transport, server
        self._up, self._down = _ByteStream(up), _ByteStream(down)
        self._up_sizes, self._down_sizes = deque(up_sizes.tolist()), deque(down_sizes.tolist())
        self._sends: deque[tuple[Any, Array]] = deque()
        self._receives: deque[tuple[Any, Array]] = deque()
        self._free = [np.empty(CELL_BYTES, np.uint8) for _ in range(min(_DEPTH, len(self._up_sizes)))]
        self._answer = np.empty(RECORD_BYTES, np.uint8)
        transport.send_record(server, STEP, record)
        self._last = transport.comm.Irecv([self._answer, MPI.BYTE], server, STEP_REPLY)
        for _ in range(min(_DEPTH, len(self._down_sizes))):
            self._await_cell(np.empty(CELL_BYTES, np.uint8))
        self.done()

    def _await_cell(self, buffer: Array) -> None:
        cell = buffer[: self._down_sizes.popleft()]
        self._receives.append((self._transport.comm.Irecv([cell, MPI.BYTE], self._server, DOWN), cell))

    def done(self) -> bool:
        self._transport.progress()
        while self._sends and self._sends[0][0].Test():
            self._free.append(self._sends.popleft()[1])
            self.progress_count += 1
        while self._up_sizes and self._free:
            buffer = self._free.pop()
            cell = buffer[: self._up_sizes.popleft()]
            self._up.copy(cell, out=False)
            self._sends.append((self._transport.comm.Issend([cell, MPI.BYTE], self._server, UP), buffer))
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


class MpiPort(_Tested):
    """A server's end of the MPI traffic with a worker. It is a `Pending` that is complete when a cell has arrived."""

    def __init__(self, transport: MpiTransport, worker: int) -> None:
        self._transport, self._worker = transport, worker
        self._sizes: deque[int] = deque()
        self._receives: deque[tuple[Any, Array]] = deque()
        self._sends: deque[tuple[Any, Array]] = deque()

    def open(self, sizes: Array) -> None:
        """Begin to receive cells of these sizes in bytes."""
        self._sizes.extend(sizes.tolist())
        while self._sizes and len(self._receives) < _DEPTH:
            self._await_cell()

    def _await_cell(self) -> None:
        cell = np.empty(self._sizes.popleft(), np.uint8)
        self._receives.append((self._transport.comm.Irecv([cell, MPI.BYTE], self._worker, UP), cell))

    def cell(self) -> Array | None:
        """Return the first cell; None if it has not arrived."""
        self._transport.progress()
        return self._receives[0][1] if _complete(self._receives[0][0]) else None

    def take(self) -> None:
        """Release the first cell."""
        self._receives.popleft()
        self.progress_count += 1
        if self._sizes:
            self._await_cell()

    def done(self) -> bool:
        return self.cell() is not None

    @property
    def room(self) -> Condition:
        """The wait until another cell can be given."""
        return Condition(self._has_room)

    def _has_room(self) -> bool:
        while self._sends and _complete(self._sends[0][0]):
            self._sends.popleft()
        return len(self._sends) < _DEPTH

    def give(self, cell: Array, of_shard: bool = True) -> bool:
        """Send a copy of a cell; False while _DEPTH cells are in flight."""
        if not self._has_room():
            return False
        copy = cell.copy()
        self._sends.append((self._transport.comm.Issend([copy, MPI.BYTE], self._worker, DOWN), copy))
        return True

    def room_for(self, start: int, nbytes: int, before: int) -> Array:
        """Return memory for a cell of a lookup, which `give` sends."""
        return np.empty(nbytes, np.uint8)

    def answer(self, record: bytes) -> None:
        self._transport.send_record(self._worker, STEP_REPLY, record)

    def has_read(self, number: int) -> bool:
        """Always True: `give` copies."""
        return True
