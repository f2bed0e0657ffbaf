"""Backend nccl: arrays on GPUs through NCCL, enqueued on the communication stream.

The NCCL communicator is created when it is first used. NCCL blocks until all ranks create it, so a thread does that,
and this rank waits as for any operation, with the time limit and its messages. Meanwhile the ranks exchange their
errors on the host: if one rank fails, the others would wait for it in NCCL.

Some dtypes and operators are converted before NCCL, so that results equal those of the other backends (ops.py):

    bool                            as uint8: Min and Product are its minimum, Max its maximum
    int16, uint16                   as int32, uint32; truncation makes them wrap around
    floats, Min and Max             as integers of the same order, NaN the extreme: NCCL ignores NaN
    16-bit floats, other ops        each rank reduces a part in float32 and rounds it once, without NCCL's operators;
                                    unchanged with ALLRED_NCCL_16BIT=native
    everything else                 unchanged; complex numbers are twice as many floats (device_reduce.py)

Arrays of bfloat16 are uint16 here. In the functions that convert arrays, `xp` is cupy, or numpy in tests.
"""

import contextlib
import dataclasses
import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from allred import arrays
from allred.comm.backends.backend import Backend, DeviceBackend, pickled
from allred.comm.backends.nccl_guard import HINT, Guard
from allred.comm.ops import ReduceOp
from allred.comm.work import Polled, Steps, WorkQueue
from allred.errors import AllredError
from allred.gpu.device_arrays import HALF_DTYPES, half_to_float32, round_to_half
from allred.gpu.kernels import ALIGNED_HALVES
from allred.gpu.streams import Completion, Device, StreamLease

_OPS = {
    ReduceOp.SUM: "NCCL_SUM",
    ReduceOp.PRODUCT: "NCCL_PROD",
    ReduceOp.MIN: "NCCL_MIN",
    ReduceOp.MAX: "NCCL_MAX",
    ReduceOp.AVERAGE: "NCCL_AVG",
}

_SLICE_ELEMENTS = 2**24  # of 16-bit floats: 32 MiB
_EXCHANGE_S = 0.5  # interval at which ranks that create the communicator exchange their errors

_WIDE = {"bool": "uint8", "int16": "int32", "uint16": "uint32"}
_KEYS = {"float16": "int32", "bfloat16": "int32", "float32": "int32", "float64": "int64"}
_FLOATS = {"int32": "float32", "int64": "float64"}
# NCCL's names of dtypes, as in cupy.
TYPES = {
    name: f"NCCL_{name.upper()}"
    for name in (
        *("uint8", "int8", "int32", "uint32", "int64", "uint64"),
        *("float16", "bfloat16", "float32", "float64"),
    )
}


class BlockingNcclCall:
    """A blocking call in a thread, which an operation can wait for (work.Pending)."""

    waits_for_peers, progress_count = True, 0

    def __init__(self, make: Callable[[], Any]) -> None:
        self.made: Any = None
        self.problem = ""

        def run() -> None:
            try:
                self.made = make()
            except Exception as error:
                self.problem = f"{type(error).__name__}: {error}"

        self._thread = threading.Thread(target=run, name="allred-nccl-start", daemon=True)
        self._thread.start()

    def done(self) -> bool:
        return not self._thread.is_alive()

    def spin_wait(self) -> bool:
        self._thread.join(0.001)
        return self.done()

    def ends_within(self, limit_s: float) -> Polled:
        """To wait for the end of the call, or for `limit_s` seconds."""
        until = time.monotonic() + limit_s
        return Polled(lambda: self.done() or time.monotonic() > until, waits_for_peers=True)


class NcclBackend(DeviceBackend):
    """NCCL between the GPUs of all ranks of `host`, the host backend.

    ranks: their numbers, for messages. native_halves: whether NCCL reduces 16-bit floats (setting `nccl_16bit`).
    """

    name = "nccl"

    def __init__(
        self, host: Backend, ranks: Sequence[int], device: Device, queue: WorkQueue, native_halves: bool
    ) -> None:
        super().__init__(device)
        self._native_halves = native_halves
        self._host, self._ranks = host, ranks
        self._guard = Guard(queue)
        self._nccl: Any = None

    def ready(self) -> Steps[None]:
        """Create the NCCL communicator if there is none. Collective. Raises AllredError on all ranks."""
        self._guard.check()
        if self._nccl is not None:
            return
        starting = BlockingNcclCall(self.device.nccl.get_unique_id if self._host.rank == 0 else lambda: None)
        yield starting
        unique_id, problem = yield from self._host.broadcast_object(pickled((starting.made, starting.problem)), 0)
        if not problem:
            starting = BlockingNcclCall(lambda: self.device.communicator(self._host.size, unique_id, self._host.rank))
            problem = yield from self._first_problem(starting)
        if problem:
            raise AllredError(f"NCCL cannot start: {problem}; {HINT}")
        self._nccl = starting.made
        self._guard.begin(self._nccl, self.device.use_in_watching_thread)

    def _first_problem(self, starting: BlockingNcclCall) -> Steps[str]:
        """Wait until the calls of all ranks have returned, or one has failed. Return its error, or ""."""
        while True:
            yield starting.ends_within(_EXCHANGE_S)
            states = yield from self._host.allgather_object(pickled((starting.done(), starting.problem)))
            for rank, (_, problem) in zip(self._ranks, states, strict=True):
                if problem:
                    return f"rank {rank}: {problem}"
            if all(done for done, _ in states):
                return ""

    def watch(self, end: Completion, title: str) -> Completion:
        return self._guard.watch(end, title)

    def close(self, sound: bool) -> None:
        sound = self._guard.close() and sound
        if self._nccl is not None:
            if sound:
                self.device.synchronize()
                self._nccl.destroy()
            else:
                self._nccl.abort()
        self._nccl = None

    def allreduce(self, lease: StreamLease, pairs: Sequence[tuple[Any, Any]], name: str, op: ReduceOp) -> Steps[None]:
        yield from ()
        xp = self.device.xp
        with lease.enter() as stream:
            if self._sums_halves(name, op):
                for source, target in pairs:
                    self._allreduce_halves(stream, source, target, name, op)
                return
            how = wire_format(name, op)
            encoded = [(encode(xp, source, name, how), source, target) for source, target in pairs]
            results = [_result(name, moved, source, target) for moved, source, target in encoded]
            dtype, nccl_op = self._type(how.name), self._op(how.op)
            with self._group() if len(pairs) > 1 else contextlib.nullcontext():
                for (moved, _, _), result in zip(encoded, results, strict=True):
                    self._call("allReduce", moved, result, moved.size, dtype, nccl_op, stream.ptr)
            for (_, _, target), result in zip(encoded, results, strict=True):
                self._finish(result, target, name, op, how)

    def _finish(self, result: Any, target: Any, name: str, op: ReduceOp, how: "NcclDtype") -> None:
        """Convert a result of NCCL, and divide an average."""
        decode(self.device.xp, result, target, name, how)
        if op is ReduceOp.AVERAGE and how.op is not ReduceOp.AVERAGE:
            self.device.xp.divide(target, self._host.size, out=target)

    def _sums_halves(self, name: str, op: ReduceOp) -> bool:
        """Whether the ranks sum 16-bit floats in float32, instead of NCCL."""
        return name in HALF_DTYPES and op not in (ReduceOp.MIN, ReduceOp.MAX) and not self._native_halves

    def _allreduce_halves(self, stream: Any, source: Any, target: Any, name: str, op: ReduceOp) -> None:
        """Reduce 16-bit floats: each rank receives one part of the elements of all ranks, reduces it, and sends the
        result to all. In slices of 32 MiB, because the parts that arrive need memory."""
        rank, size = self._host.rank, self._host.size
        slices, multiple = -(-source.size // _SLICE_ELEMENTS), size * ALIGNED_HALVES
        step = -(-source.size // (slices * multiple)) * multiple  # parts of the same size, except at the end
        for start in range(0, source.size, step):
            stop = min(source.size, start + step)
            share = -(-(stop - start) // multiple) * ALIGNED_HALVES
            ends = [min(start + share * each, stop) for each in range(size + 1)]
            parts = [source[low:high] for low, high in itertools.pairwise(ends)]
            results = [target[low:high] for low, high in itertools.pairwise(ends)]
            self._combine(stream, parts, results[rank], share, name, op)
            self._allgather(stream, results[rank], target[start:stop], results)

    def _combine(self, stream: Any, parts: list[Any], result: Any, stride: int, name: str, op: ReduceOp) -> None:
        """Send part r of 16-bit floats to rank r, and reduce the parts that this rank receives. stride: at least the
        elements of the largest part, a multiple of 8."""
        rank, size, uint8 = self._host.rank, self._host.size, self._type("uint8")
        rows = self.device.empty(size * stride, parts[rank].dtype)
        with self._group():
            for peer in range(size):
                if peer != rank and parts[peer].size:
                    self._call("send", parts[peer], parts[peer].nbytes, uint8, peer, stream.ptr)
                if peer != rank and result.size:
                    row = rows[peer * stride : peer * stride + result.size]
                    self._call("recv", row, row.nbytes, uint8, peer, stream.ptr)
        if result.size:
            divisor = float(size) if op is ReduceOp.AVERAGE else 1.0
            multiplies = op is ReduceOp.PRODUCT
            self.device.kernels.combine(name, rows, size, rank, parts[rank], result, multiplies, divisor)

    def broadcast(self, lease: StreamLease, data: Any, root: int) -> Steps[None]:
        yield from ()
        with lease.enter() as stream:
            self._call("broadcast", data, data, data.size, self._type("uint8"), root, stream.ptr)

    def allgather(self, lease: StreamLease, send: Any, recv: Any, counts: list[int]) -> Steps[None]:
        yield from ()
        parts = [recv[low:high] for low, high in itertools.pairwise(itertools.accumulate(counts, initial=0))]
        with lease.enter() as stream:
            self._allgather(stream, send, recv, parts)

    def _allgather(self, stream: Any, send: Any, recv: Any, parts: list[Any]) -> None:
        """parts: of `recv`, for each rank; `send` may be that of this rank."""
        uint8, each = self._type("uint8"), send.nbytes
        if all(part.nbytes == each for part in parts):
            self._call("allGather", send, recv, each, uint8, stream.ptr)
            return
        with self._group():
            for root, part in enumerate(parts):
                if part.size:
                    source = send if root == self._host.rank else part
                    self._call("broadcast", source, part, part.nbytes, uint8, root, stream.ptr)

    def alltoall(self, lease: StreamLease, send: Any, recv: Any, counts: arrays.Array) -> Steps[None]:
        yield from ()
        rank, uint8 = self._host.rank, self._type("uint8")
        send_counts, recv_counts = counts[rank].tolist(), counts[:, rank].tolist()
        sent, received = (
            [whole[low:high] for low, high in itertools.pairwise(itertools.accumulate(each, initial=0))]
            for whole, each in ((send, send_counts), (recv, recv_counts))
        )
        with lease.enter() as stream:
            received[rank][...] = sent[rank]
            with self._group():
                for peer in range(self._host.size):
                    if peer != rank and send_counts[peer]:
                        self._call("send", sent[peer], send_counts[peer], uint8, peer, stream.ptr)
                    if peer != rank and recv_counts[peer]:
                        self._call("recv", received[peer], recv_counts[peer], uint8, peer, stream.ptr)

    def reducescatter(
        self, lease: StreamLease, flat: Any, out: Any, name: str, counts: list[int], op: ReduceOp
    ) -> Steps[None]:
        yield from ()
        xp, rank = self.device.xp, self._host.rank
        bounds = list(itertools.pairwise(itertools.accumulate(counts, initial=0)))
        with lease.enter() as stream:
            if self._sums_halves(name, op):
                stride = -(-max(counts) // ALIGNED_HALVES) * ALIGNED_HALVES
                self._combine(stream, [flat[low:high] for low, high in bounds], out, stride, name, op)
                return
            how = wire_format(name, op)
            moved = encode(xp, flat, name, how)
            if moved is flat or name == "bool":
                result = _result(name, flat, flat, out)
            else:
                result = self.device.empty(out.size, moved.dtype)
            dtype, nccl_op = self._type(how.name), self._op(how.op)
            if len(set(counts)) == 1:
                self._call("reduceScatter", moved, result, counts[0], dtype, nccl_op, stream.ptr)
            else:
                with self._group():
                    for root, (low, high) in enumerate(bounds):
                        if high > low:
                            target = result if root == rank else moved[low:high]  # the others receive nothing
                            self._call("reduce", moved[low:high], target, high - low, dtype, nccl_op, root, stream.ptr)
            self._finish(result, out, name, op, how)

    def _call(self, function: str, *arguments: Any) -> None:
        """Call a function of NCCL; arrays are passed as their addresses. No count may be 0."""
        addresses = [a.data.ptr if hasattr(a, "dtype") else a for a in arguments]
        self._enter(function, getattr(self._nccl, function), *addresses)

    @contextlib.contextmanager
    def _group(self) -> Iterator[None]:
        """Calls of NCCL that are launched together, at the end. NCCL gets the end also after an error, because an open
        group would include all later calls of this thread."""
        with self._guard.calling():
            self._enter("groupStart", self.device.nccl.groupStart)
            try:
                yield
            finally:
                self._enter("groupEnd", self.device.nccl.groupEnd)

    def _enter(self, title: str, function: Callable[..., Any], *arguments: Any) -> None:
        with self._guard.calling():
            try:
                function(*arguments)
            except Exception as error:
                self._guard.fail(f"NCCL's {title}: {error}; {HINT}")
        self._guard.check()

    def _type(self, name: str) -> int:
        return int(getattr(self.device.nccl, TYPES[name]))

    def _op(self, op: ReduceOp) -> int:
        return int(getattr(self.device.nccl, _OPS[op]))


@dataclasses.dataclass(frozen=True)
class NcclDtype:
    """The array that NCCL reduces. name: its dtype; as_ordered_integers: floats as ordered integers."""

    name: str
    op: ReduceOp
    as_ordered_integers: bool = False


@functools.cache
def wire_format(name: str, op: ReduceOp) -> NcclDtype:
    """Return the conversion for a reduction of dtype `name` by NCCL.

    >>> wire_format("int16", ReduceOp.SUM).name, wire_format("bool", ReduceOp.PRODUCT).op
    ('int32', allred.Min)
    >>> wire_format("float32", ReduceOp.MAX).name
    'int32'
    """
    if name == "bool":
        return NcclDtype("uint8", ReduceOp.MAX if op is ReduceOp.MAX else ReduceOp.MIN)
    if name in _KEYS and op in (ReduceOp.MIN, ReduceOp.MAX):
        return NcclDtype(_KEYS[name], op, as_ordered_integers=True)
    if op is ReduceOp.AVERAGE and name not in HALF_DTYPES:  # whose sum may overflow; NCCL divides before it adds
        op = ReduceOp.SUM
    return NcclDtype(_WIDE.get(name, name), op)


def encode(xp: Any, flat: Any, name: str, how: NcclDtype) -> Any:
    """Return the array that NCCL reduces: `flat` itself if no conversion is necessary."""
    if how.as_ordered_integers:
        return _to_keys(xp, half_to_float32(flat, name) if name in HALF_DTYPES else flat, how)
    if name == "bool":
        return flat.view(np.uint8)
    return flat if how.name == name else flat.astype(how.name)


def decode(xp: Any, moved: Any, flat: Any, name: str, how: NcclDtype) -> None:
    """Convert the result of NCCL into `flat`, which may be `moved`."""
    if how.as_ordered_integers:
        limits = np.iinfo(how.name)  # the inverse of `_to_keys`; the extreme integers are the bits of a NaN
        value = xp.where(moved < 0, moved ^ limits.max, moved).view(_FLOATS[how.name])
        flat[...] = round_to_half(xp, value, name) if name in HALF_DTYPES else value
    elif moved is not flat and name != "bool":
        flat[...] = moved.astype(name)


def _result(name: str, moved: Any, source: Any, target: Any) -> Any:
    """Return the array that NCCL writes: `target` if there was no conversion, else `moved`."""
    if name == "bool":
        return target.view(np.uint8)
    return target if moved is source else moved


def _to_keys(xp: Any, value: Any, how: NcclDtype) -> Any:
    """Map floats to integers of the same order: the bits of negative numbers are inverted, except the sign."""
    bits, limits = value.view(how.name), np.iinfo(how.name)
    keys = xp.where(bits < 0, bits ^ limits.max, bits)
    outermost = limits.max if how.op is ReduceOp.MAX else limits.min
    return xp.where(xp.isnan(value), xp.asarray(outermost, how.name), keys)
