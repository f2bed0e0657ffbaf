"""Backend nccl: arrays on GPUs through NCCL, enqueued on the communication stream.

The NCCL communicator is created when it is first used. NCCL blocks until all ranks create it, so a thread does that,
and this rank waits as for any operation, with the time limit and its messages.

NCCL gets other dtypes and operators for some, so that results are those of the other backends (ops.py):

    bool                            as uint8: Min and Product are its minimum, Max its maximum
    int16                           as int32; truncation makes it wrap around
    floats, Min and Max             as integers of the same order, NaN the extreme: NCCL ignores NaN
    16-bit floats, other ops        each rank sums a part in float32 and rounds it once (`halves_dtype`)
    everything else                 unchanged

Arrays of bfloat16 are uint16 here. In the functions that convert arrays, `xp` is cupy, or numpy in tests.
"""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from allred import arrays
from allred.comm.backends.backend import Backend, DeviceBackend, pickled
from allred.comm.backends.nccl_guard import HINT, Guard
from allred.comm.ops import ReduceOp
from allred.comm.work import Steps, WorkQueue
from allred.errors import AllredError
from allred.gpu.device_arrays import HALF_DTYPES, half_to_float32, round_to_half, storage_dtype
from allred.gpu.streams import Completion, Device, StreamLease

_OPS = {ReduceOp.SUM: "NCCL_SUM", ReduceOp.PRODUCT: "NCCL_PROD", ReduceOp.MIN: "NCCL_MIN", ReduceOp.MAX: "NCCL_MAX"}

_WIDE = {"bool": "uint8", "int16": "int32"}
_KEYS = {"float16": "int32", "bfloat16": "int32", "float32": "int32", "float64": "int64"}
_FLOATS = {"int32": "float32", "int64": "float64"}
# NCCL's names of dtypes, as in cupy.
TYPES = {name: f"NCCL_{name.upper()}" for name in ("uint8", "int8", "int32", "int64", "float16", "float32", "float64")}


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


class NcclBackend(DeviceBackend):
    """NCCL between the GPUs of all ranks of `host`, the host backend. ranks: their numbers, for messages."""

    name = "nccl"

    def __init__(self, host: Backend, ranks: Sequence[int], device: Device, queue: WorkQueue) -> None:
        super().__init__(device)
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
            yield starting
            problems = yield from self._host.allgather_object(pickled(starting.problem))
            problem = next((f"rank {self._ranks[r]}: {text}" for r, text in enumerate(problems) if text), "")
        if problem:
            raise AllredError(f"NCCL cannot start: {problem}; {HINT}")
        self._nccl = starting.made
        self._guard.begin(self._nccl, self.device.use)

    def watch(self, end: Completion, title: str) -> Completion:
        return self._guard.watch(end, title)

    def close(self, sound: bool) -> None:
        sound = self._guard.close() and sound
        if self._nccl is not None:
            if sound:
                self.device.stream.synchronize()
                self._nccl.destroy()
            else:
                self._nccl.abort()
        self._nccl = None
        super().close(sound)

    def allreduce(self, lease: StreamLease, flat: Any, name: str, op: ReduceOp, wire: str) -> Steps[None]:
        yield from ()
        xp, halves = self.device.xp, halves_dtype(name, op, wire)
        with lease.enter() as stream:
            if halves:
                self._allreduce_halves(stream, flat, name, op, halves)
                return
            how = wire_format(name, op)
            moved = encode(xp, flat, name, how)
            nccl_op = int(getattr(self.device.nccl, _OPS[how.op]))
            self._call("allReduce", moved, moved, moved.size, self._type(how.name), nccl_op, stream.ptr)
            decode(xp, moved, flat, name, how)
            if op is ReduceOp.AVERAGE:
                xp.divide(flat, self._host.size, out=flat)

    def _allreduce_halves(self, stream: Any, flat: Any, name: str, op: ReduceOp, halves: str) -> None:
        xp, size = self.device.xp, self._host.size
        share = -(-flat.size // size)
        out = xp.zeros(size * share, storage_dtype(halves))
        out[: flat.size] = flat if name == halves else round_to_half(xp, flat, halves)
        rows = xp.empty_like(out)
        part = share * 2
        self._alltoall(stream, out.view(np.uint8), rows.view(np.uint8), [part] * size, [part] * size)
        mine = combine(xp, rows.reshape(size, share), halves, op)
        count, kind = share * 2, self._type("uint8")
        self._call("allGather", mine, out, count, kind, stream.ptr)
        back = out[: flat.size]
        flat[...] = back if name == halves else half_to_float32(back, halves)

    def broadcast(self, lease: StreamLease, data: Any, root: int) -> Steps[None]:
        yield from ()
        with lease.enter() as stream:
            self._call("broadcast", data, data, data.size, self._type("uint8"), root, stream.ptr)

    def allgather(self, lease: StreamLease, send: Any, recv: Any, counts: list[int]) -> Steps[None]:
        yield from ()
        starts = np.cumsum([0, *counts]).tolist()
        with lease.enter() as stream:
            mine = recv[starts[self._host.rank] : starts[self._host.rank + 1]]
            mine[...] = send
            with self._group():
                for root, (start, count) in enumerate(zip(starts, counts, strict=False)):
                    part = recv[start : start + count]
                    if count:
                        self._call("broadcast", part, part, count, self._type("uint8"), root, stream.ptr)

    def alltoall(self, lease: StreamLease, send: Any, recv: Any, counts: arrays.Array) -> Steps[None]:
        yield from ()
        rank = self._host.rank
        with lease.enter() as stream:
            self._alltoall(stream, send, recv, counts[rank].tolist(), counts[:, rank].tolist())

    def _alltoall(self, stream: Any, send: Any, recv: Any, to: list[int], come: list[int]) -> None:
        out, back, kind = np.cumsum([0, *to]).tolist(), np.cumsum([0, *come]).tolist(), self._type("uint8")
        rank = self._host.rank
        recv[back[rank] : back[rank + 1]] = send[out[rank] : out[rank + 1]]
        with self._group():
            for peer in range(self._host.size):
                if peer != rank and to[peer]:
                    self._call("send", send[out[peer] : out[peer + 1]], to[peer], kind, peer, stream.ptr)
                if peer != rank and come[peer]:
                    self._call("recv", recv[back[peer] : back[peer + 1]], come[peer], kind, peer, stream.ptr)

    def reducescatter(
        self, lease: StreamLease, flat: Any, out: Any, name: str, counts: list[int], op: ReduceOp
    ) -> Steps[None]:
        """As an allreduce of a copy: simple, and the same bits."""
        with lease.enter():
            whole = flat.copy()
        yield from self.allreduce(lease, whole, name, op, "")
        start = sum(counts[: self._host.rank])
        with lease.enter():
            out[...] = whole[start : start + out.size]

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


@dataclasses.dataclass(frozen=True)
class NcclDtype:
    """The array that NCCL reduces. name: its dtype; keyed: floats as ordered integers."""

    name: str
    op: ReduceOp
    keyed: bool = False


@functools.cache
def wire_format(name: str, op: ReduceOp) -> NcclDtype:
    """Return the conversion for an allreduce of dtype `name`, unless `halves_dtype` applies.

    >>> wire_format("int16", ReduceOp.SUM).name, wire_format("bool", ReduceOp.PRODUCT).op
    ('int32', allred.Min)
    >>> wire_format("float32", ReduceOp.MAX).name
    'int32'
    """
    if name == "bool":
        return NcclDtype("uint8", ReduceOp.MAX if op is ReduceOp.MAX else ReduceOp.MIN)
    if name in _KEYS and op in (ReduceOp.MIN, ReduceOp.MAX):
        return NcclDtype(_KEYS[name], op, keyed=True)
    return NcclDtype(_WIDE.get(name, name), ReduceOp.SUM if op is ReduceOp.AVERAGE else op)


def halves_dtype(name: str, op: ReduceOp, wire: str) -> str:
    """Return the 16-bit dtype in which each rank receives a part to sum; "" if NCCL sums."""
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        return ""
    return wire or (name if name in HALF_DTYPES else "")


def encode(xp: Any, flat: Any, name: str, how: NcclDtype) -> Any:
    """Return the array that NCCL reduces: `flat` itself if no conversion is necessary."""
    if how.keyed:
        return _to_keys(xp, half_to_float32(flat, name) if name in HALF_DTYPES else flat, how)
    if name == "bool":
        return flat.view(np.uint8)
    return flat if how.name == name else flat.astype(how.name)


def decode(xp: Any, moved: Any, flat: Any, name: str, how: NcclDtype) -> None:
    """Convert the result of NCCL back into `flat`."""
    if how.keyed:
        limits = np.iinfo(how.name)  # the inverse of `_to_keys`; the extreme integers are the bits of a NaN
        value = xp.where(moved < 0, moved ^ limits.max, moved).view(_FLOATS[how.name])
        flat[...] = round_to_half(xp, value, name) if name in HALF_DTYPES else value
    elif moved is not flat and name != "bool":
        flat[...] = moved.astype(name)


def _to_keys(xp: Any, value: Any, how: NcclDtype) -> Any:
    """Map floats to integers of the same order: the bits of negative numbers are inverted, except the sign."""
    bits, limits = value.view(how.name), np.iinfo(how.name)
    keys = xp.where(bits < 0, bits ^ limits.max, bits)
    outermost = limits.max if how.op is ReduceOp.MAX else limits.min
    return xp.where(xp.isnan(value), xp.asarray(outermost, how.name), keys)


def combine(xp: Any, rows: Any, name: str, op: ReduceOp) -> Any:
    """Reduce 16-bit rows, one per rank, in float32; divide an average; round once."""
    wide = half_to_float32(rows.reshape(-1), name).reshape(rows.shape)
    total = wide.prod(axis=0) if op is ReduceOp.PRODUCT else wide.sum(axis=0)
    return round_to_half(xp, total / np.float32(len(rows)) if op is ReduceOp.AVERAGE else total, name)
