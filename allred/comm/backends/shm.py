"""The backend of one node: arrays pass through memory that its ranks share, in C (csrc/operation.h says how).

Results are the same on all ranks and from run to run, bit for bit: every element is reduced in rank order. A group of
arrays passes as one stream of chunks, straight from and into the arrays: that is the fusion, without a fusion buffer.

Contiguous numpy arrays take a short way: one call into C checks them, exchanges headers and moves the bytes. All else
(other layouts, bfloat16, errors, a wait of more than a millisecond) goes the way of all backends. Each rank goes its
own: the headers and the bytes are the same.
"""

import mmap
from collections.abc import Callable
from typing import Any

import numpy as np

from allred import arrays
from allred.arrays import Array
from allred.comm import ops
from allred.comm.arguments import array_call, group_call
from allred.comm.backends.segment import share
from allred.comm.communicator import Communicator
from allred.comm.header import Call, quoted
from allred.comm.ops import ReduceOp
from allred.comm.work import Steps
from allred.compression import Compression
from allred.errors import AllredError
from allred.native._kernels import Operation, Segment, segment_bytes
from allred.timeline.track import Track

CHUNK_BYTES = 2**17  # 32 to 512 KiB are about equal

_DTYPES = tuple(None if name == "bfloat16" else np.dtype(name) for name in arrays.DTYPES)
_OPS = (None, *ops.CODES)
_PLAIN = Compression.none
_PART = None  # in place of a header: a part of the operation under way


def segment_memory(comm: Any) -> mmap.mmap | None:
    """Memory for a ShmCommunicator of the ranks of an mpi4py communicator; None if they cannot have it. Collective."""
    return share(comm, segment_bytes(comm.Get_size(), CHUNK_BYTES))


class ShmCommunicator(Communicator):
    """The `size` ranks that share `memory`, which becomes this object's own."""

    name = "shm"
    fuses = True

    def __init__(self, rank: int, size: int, memory: mmap.mmap, timeout_s: float) -> None:
        self._memory = memory
        self._segment = Segment(memory, rank, size, CHUNK_BYTES, np.zeros((2, 3)), _DTYPES, _OPS)
        super().__init__(rank, size, timeout_s, engine=self._segment)

    def record(self, track: Track) -> None:
        super().record(track)
        self._segment.note(True)
        track.gather(self._segment.noted)

    def close(self) -> None:
        super().close()
        self._segment.close()
        self._memory.close()

    def attend(self) -> None:
        if not self._segment.attended:
            self._segment.attend()

    @property
    def _short(self) -> bool:
        """Whether the short way is open: it looks at arrays only, and at nothing that is under way."""
        return self.queue.idle and not self.checks_places

    @property
    def sent_bytes(self) -> int:
        return self._segment.sent

    def allreduce_now(
        self, value: Any, in_place: bool, op: ReduceOp, name: str, compression: Compression = _PLAIN
    ) -> Array:
        target = None
        if self._short and type(value) is np.ndarray:
            target = value if in_place else _empty(value)
        if target is not None:
            try:
                if compression is _PLAIN:
                    way = self._segment.allreduce(value, target, op, name)
                else:
                    way = self._segment.allreduce(value, target, op, name, _wire(compression))
                if way is True:
                    return target
                if way is not None:
                    steps = self._reduced(
                        way, lambda: array_call("allreduce", value, name, op, compression=compression),
                        [value], [target], op, compression,
                    )  # fmt: skip
                    self.queue.start(f"allreduce{quoted(name)}", steps).wait()
                    return target
            except BaseException as error:
                self._cut_short(error)
                raise
        return super().allreduce_now(value, in_place, op, name, compression)

    def grouped_allreduce_now(
        self, group: Any, in_place: bool, op: ReduceOp, name: str, compression: Compression = _PLAIN
    ) -> list[Array]:
        targets: list[Any] | None = None
        if self._short and type(group) is list:
            targets = group if in_place else [_empty(value) for value in group if type(value) is np.ndarray]
        if targets is not None and len(targets) == len(group):
            try:
                way = self._segment.grouped_allreduce(group, targets, op, name, _wire(compression))
                if way is True:
                    return targets
                if way is not None:
                    steps = self._reduced(
                        way, lambda: group_call(group, name, op, compression), group, targets, op, compression
                    )
                    self.queue.start(f"grouped_allreduce{quoted(name)}", steps).wait()
                    return targets
            except BaseException as error:
                self._cut_short(error)
                raise
        return super().grouped_allreduce_now(group, in_place, op, name, compression)

    def _reduced(
        self,
        operation: Operation,
        call: Callable[[], Call],
        sources: list[Array],
        targets: list[Array],
        op: ReduceOp,
        compression: Compression,
    ) -> Steps[None]:
        """Wait for an allreduce that has begun. If it was refused for ranks that have joined, do it without them."""
        group = yield from self._settle(operation, call)
        if group is not self:
            yield from group._reduce_all(sources, targets, op, compression)

    def _settle(self, operation: Operation, call: Callable[[], Call]) -> Steps[Communicator]:
        """Wait for an operation with a header: this communicator, or the narrower one on which its bytes have still to
        be moved. Raises what all ranks raise if the headers differ."""
        self._under_way(call, lambda: self._segment.number)
        yield operation
        if operation.agreed:
            self._active = None
            return self
        group, _ = yield from self._narrowed(call())
        return group

    def _cut_short(self, error: BaseException) -> None:
        """What ended the short way, other than what all ranks raise, may have left the others in an operation."""
        if not isinstance(error, AllredError) and self._segment.pending:
            self.queue.poison(f"an allreduce was cut short by {type(error).__name__}")

    def _reduce(
        self, call: Call, sources: list[Array], targets: list[Array], op: ReduceOp, compression: Compression
    ) -> Steps[None]:
        flats = [arrays.flat(target) for target in targets]
        origins = [
            flat if source is target else arrays.flat(source)
            for source, target, flat in zip(sources, targets, flats, strict=True)
        ]
        begun = self._begin_reduce(self._announce(call), origins, flats, op, compression.value)
        yield from self._reduced(begun, lambda: call, origins, flats, op, compression)
        for target, flat in zip(targets, flats, strict=True):
            arrays.put_back(target, flat)

    def _begin_reduce(
        self, record: bytes | None, sources: list[Array], targets: list[Array], op: ReduceOp, wire: int
    ) -> Operation:
        codes = [arrays.dtype_code(source.dtype) for source in sources]
        from_buffers, to_buffers = ([arrays.as_buffer(array) for array in side] for side in (sources, targets))
        return self._segment.begin_allreduce(record, from_buffers, to_buffers, codes, ops.CODES[op], wire)

    def _meet(self, call: Call) -> Steps[None]:
        yield from self._settle(self._segment.begin_exchange(self._announce(call), False), lambda: call)

    def _agree_and_broadcast(self, call: Call, flat: Array, root: int) -> Steps[None]:
        data = arrays.as_bytes(flat)
        begun = self._segment.begin_broadcast(self._announce(call), data, root)
        group = yield from self._settle(begun, lambda: call)
        if group is not self:
            yield from group._broadcast(data, self._root_in(group, root, call))

    def _agree_and_reducescatter(
        self, call: Call, flat: Array, out: Array, counts: list[int], op: ReduceOp
    ) -> Steps[None]:
        group = yield from self._settle(self._begin_scatter(self._announce(call), flat, out, counts, op), lambda: call)
        self._require_all(group, call)

    def _begin_scatter(
        self, record: bytes | None, flat: Array, out: Array, counts: list[int], op: ReduceOp
    ) -> Operation:
        sizes = [count * flat.itemsize for count in counts]
        code = arrays.dtype_code(flat.dtype)
        buffers = arrays.as_buffer(flat), arrays.as_buffer(out)
        return self._segment.begin_reducescatter(record, *buffers, sizes, code, ops.CODES[op])

    def _moved(self, operation: Operation) -> Steps[None]:
        """Wait for an operation without a header: one that some rank is not in would be a mistake of ours."""
        yield operation
        if not operation.agreed:
            raise RuntimeError("the ranks are in different operations")

    def _exchange(self, record: bytes) -> Steps[list[bytes]]:
        operation = self._segment.begin_exchange(record, True)
        yield operation
        return operation.headers()

    def _allreduce(self, flat: Array, op: ReduceOp, wire: int = 0) -> Steps[None]:
        yield from self._moved(self._begin_reduce(_PART, [flat], [flat], op, wire))

    def _broadcast(self, data: Array, root: int) -> Steps[None]:
        yield from self._moved(self._segment.begin_broadcast(_PART, data, root))

    def _allgather(self, send: Array, recv: Array, counts: list[int]) -> Steps[None]:
        yield from self._moved(self._segment.begin_allgather(_PART, send, recv, counts))

    def _alltoall(self, send: Array, recv: Array, counts: Array) -> Steps[None]:
        to, come = counts[self.rank].tolist(), counts[:, self.rank].tolist()
        yield from self._moved(self._segment.begin_alltoall(_PART, send, recv, to, come, int(counts.max())))

    def _reducescatter(self, flat: Array, out: Array, counts: list[int], op: ReduceOp) -> Steps[None]:
        yield from self._moved(self._begin_scatter(_PART, flat, out, counts, op))


def _wire(compression: Any) -> int:
    """Its code; what is no Compression is one that C does not take, and the long way has the words for it."""
    return compression.value if type(compression) is Compression else -1


def _empty(value: Array) -> Array | None:
    """A new array for the result; None without memory for it, which the long way tells the other ranks."""
    try:
        return np.empty(value.shape, value.dtype)
    except MemoryError:
        return None
