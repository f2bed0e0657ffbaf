"""Backend shm: the ranks of one node exchange arrays through shared memory, in C (csrc/operation.h has the protocol).

Results are the same on all ranks and from run to run, bit for bit: every element is reduced in rank order. A group of
arrays passes as one stream of chunks, directly from and into the arrays: that is the fusion, without a fusion buffer.

Contiguous numpy arrays take the fast path: one call into C checks them, exchanges headers and reduces. Everything else
(other layouts, bfloat16, errors, a wait of more than a millisecond) takes the general path of all backends. Ranks that
take different paths match: headers and bytes are the same.
"""

import mmap

import numpy as np

from allred import arrays
from allred.arrays import Array
from allred.comm import ops
from allred.comm.backends.backend import Backend
from allred.comm.backends.segment import share
from allred.comm.bootstrap import Bootstrap
from allred.comm.ops import ReduceOp
from allred.comm.work import Steps
from allred.native._kernels import Operation, Segment, segment_bytes
from allred.timeline.recorder import Track

MAX_RANKS = 1024  # as ALLRED_MAX_RANKS in csrc/segment.h
CHUNK_BYTES = 2**17  # 32 to 512 KiB are about equal

_DTYPES = tuple(None if name == "bfloat16" else np.dtype(name) for name in arrays.DTYPES)
_OPS = (None, *ops.CODES)


def segment_memory(bootstrap: Bootstrap) -> mmap.mmap | None:
    """Create the memory of a ShmBackend of the ranks of `bootstrap`; None if they cannot share memory. Collective."""
    return share(bootstrap, segment_bytes(bootstrap.size, CHUNK_BYTES))


class ShmBackend(Backend):
    """The `size` ranks that share `memory`. bootstrap: the Bootstrap of these ranks, or None. The backend owns both.
    arenas: one per rank, for arrays that are reduced in place (allred/arena.py), or None."""

    name = "shm"
    fuses = True
    checks_finite = True
    weighs = True

    def __init__(
        self,
        rank: int,
        size: int,
        memory: mmap.mmap,
        bootstrap: Bootstrap | None = None,
        arenas: list[mmap.mmap] | None = None,
    ) -> None:
        super().__init__(rank, size)
        self.messages = None if bootstrap is None else bootstrap.messages()
        self._bootstrap = bootstrap
        self._memory = memory
        self.segment = Segment(memory, rank, size, CHUNK_BYTES, np.zeros((2, 3)), _DTYPES, _OPS)
        if arenas is not None:
            self.segment.set_arenas(arenas)
        self.engine = self.fast_path = self.traffic = self.segment
        self.with_header = self

    def record(self, track: Track) -> None:
        self.segment.set_tracing(True)
        track.gather(self.segment.take_trace)

    def stop_recording(self) -> None:
        self.segment.set_tracing(False)

    def close(self, sound: bool) -> None:
        self.segment.halt()
        self.segment.close()
        self._memory.close()
        if sound and self._bootstrap is not None:
            self._bootstrap.close()

    def start_progress_thread(self) -> None:
        if not self.segment.has_progress_thread:
            self.segment.start_progress_thread()

    def set_generation(self, generation: int) -> None:
        self.segment.generation = generation

    def let_callers_sleep(self) -> None:
        self.segment.let_callers_sleep()

    @property
    def outside(self) -> list[tuple[int, int]]:
        return self.segment.outside

    # The primitives with a header. Without one (None), a primitive is a part of the operation under way.

    @property
    def number(self) -> int:
        return self.segment.number

    def begin_exchange(self, record: bytes) -> Operation:
        return self.segment.begin_exchange(record, False)

    def begin_allreduce(
        self,
        record: bytes | None,
        sources: list[Array],
        targets: list[Array],
        op: ReduceOp,
        wires: list[int],
        checks_finite: bool = False,
        residual: Array | None = None,
    ) -> Operation:
        codes = [arrays.dtype_code(source.dtype) for source in sources]
        from_buffers, to_buffers = ([arrays.as_buffer(array) for array in side] for side in (sources, targets))
        return self.segment.begin_allreduce(
            record, from_buffers, to_buffers, codes, wires, ops.CODES[op], checks_finite, residual
        )

    def begin_broadcast(self, record: bytes | None, data: Array, root: int) -> Operation:
        return self.segment.begin_broadcast(record, data, root)

    def begin_allgather(self, record: bytes | None, send: Array, recv: Array, counts: list[int]) -> Operation:
        return self.segment.begin_allgather(record, send, recv, counts)

    def begin_reducescatter(
        self, record: bytes | None, flat: Array, out: Array, counts: list[int], op: ReduceOp
    ) -> Operation:
        sizes = [count * flat.itemsize for count in counts]
        code = arrays.dtype_code(flat.dtype)
        buffers = arrays.as_buffer(flat), arrays.as_buffer(out)
        return self.segment.begin_reducescatter(record, *buffers, sizes, code, ops.CODES[op])

    # The primitives without a header.

    def exchange(self, record: bytes) -> Steps[list[bytes]]:
        operation = self.segment.begin_exchange(record, True)
        yield operation
        return operation.headers()

    def allreduce(self, flat: Array, op: ReduceOp, wire: int = 0) -> Steps[None]:
        yield from _finish(self.begin_allreduce(None, [flat], [flat], op, [wire]))

    def broadcast(self, data: Array, root: int) -> Steps[None]:
        yield from _finish(self.begin_broadcast(None, data, root))

    def allgather(self, send: Array, recv: Array, counts: list[int]) -> Steps[None]:
        yield from _finish(self.begin_allgather(None, send, recv, counts))

    def alltoall(self, send: Array, recv: Array, counts: Array) -> Steps[None]:
        to, come = counts[self.rank].tolist(), counts[:, self.rank].tolist()
        yield from _finish(self.segment.begin_alltoall(None, send, recv, to, come, int(counts.max())))

    def reducescatter(self, flat: Array, out: Array, counts: list[int], op: ReduceOp) -> Steps[None]:
        yield from _finish(self.begin_reducescatter(None, flat, out, counts, op))


def _finish(operation: Operation) -> Steps[None]:
    """Wait for an operation without a header. The ranks already agreed: if they differ here, allred has a bug."""
    yield operation
    if not operation.headers_agree:
        raise RuntimeError("the ranks are in different operations")
