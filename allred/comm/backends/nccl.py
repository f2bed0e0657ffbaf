"""Backend nccl: arrays on GPUs through NCCL, enqueued on the communication stream.

The NCCL communicator is created when it is first used. NCCL blocks until all ranks create it, so a thread does that,
and this rank waits as for any operation, with the time limit and its messages.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from allred import arrays
from allred.comm import objects
from allred.comm.backends import nccl_types
from allred.comm.backends.backend import Backend
from allred.comm.backends.device_backend import DeviceBackend
from allred.comm.backends.nccl_guard import HINT, Guard
from allred.comm.ops import ReduceOp
from allred.comm.work import Steps
from allred.errors import AllredError
from allred.gpu.arithmetic import half_to_float32, round_to_half, storage_dtype
from allred.gpu.streams import Device, StreamLease

_OPS = {
    ReduceOp.SUM: "NCCL_SUM",
    ReduceOp.PRODUCT: "NCCL_PROD",
    ReduceOp.MIN: "NCCL_MIN",
    ReduceOp.MAX: "NCCL_MAX",
}


class Starting:
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

    def __init__(self, host: Backend, ranks: Sequence[int], device: Device, guard: Guard) -> None:
        super().__init__(device, guard)
        self._host, self._ranks = host, ranks
        self._nccl: Any = None

    def ready(self) -> Steps[None]:
        """Create the NCCL communicator if there is none. Collective. Raises AllredError on all ranks."""
        self.guard.check()
        if self._nccl is not None:
            return
        starting = Starting(self.device.nccl.get_unique_id if self._host.rank == 0 else lambda: None)
        yield starting
        unique_id, problem = yield from objects.broadcast(
            self._host, objects.dumps((starting.made, starting.problem)), 0
        )
        if not problem:
            starting = Starting(lambda: self.device.communicator(self._host.size, unique_id, self._host.rank))
            yield starting
            problems = yield from objects.gather(self._host, objects.dumps(starting.problem))
            problem = next((f"rank {self._ranks[r]}: {text}" for r, text in enumerate(problems) if text), "")
        if problem:
            raise AllredError(f"NCCL cannot start: {problem}; {HINT}")
        self._nccl = starting.made
        self.guard.begin(self._nccl, self.device.use)

    def _release(self, sound: bool) -> None:
        if self._nccl is not None:
            if sound:
                self.device.stream.synchronize()
                self._nccl.destroy()
            else:
                self._nccl.abort()
        self._nccl = None

    def allreduce(self, lease: StreamLease, flat: Any, name: str, op: ReduceOp, wire: str) -> Steps[None]:
        yield from ()
        xp, halves = self.device.xp, nccl_types.halves(name, op, wire)
        with lease.enter() as stream:
            if halves:
                self._allreduce_halves(stream, flat, name, op, halves)
                return
            how = nccl_types.travel(name, op)
            moved = nccl_types.encode(xp, flat, name, how)
            self._call("allReduce", moved, moved, moved.size, self._type(how.name), self._op(how.op), stream.ptr)
            nccl_types.decode(xp, moved, flat, name, how)
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
        mine = nccl_types.combine(xp, rows.reshape(size, share), halves, op)
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
            self._group()
            for root, (start, count) in enumerate(zip(starts, counts, strict=False)):
                part = recv[start : start + count]
                if count:
                    self._call("broadcast", part, part, count, self._type("uint8"), root, stream.ptr)
            self._group(end=True)

    def alltoall(self, lease: StreamLease, send: Any, recv: Any, counts: arrays.Array) -> Steps[None]:
        yield from ()
        rank = self._host.rank
        with lease.enter() as stream:
            self._alltoall(stream, send, recv, counts[rank].tolist(), counts[:, rank].tolist())

    def _alltoall(self, stream: Any, send: Any, recv: Any, to: list[int], come: list[int]) -> None:
        out, back, kind = np.cumsum([0, *to]).tolist(), np.cumsum([0, *come]).tolist(), self._type("uint8")
        rank = self._host.rank
        recv[back[rank] : back[rank + 1]] = send[out[rank] : out[rank + 1]]
        self._group()
        for peer in range(self._host.size):
            if peer != rank and to[peer]:
                self._call("send", send[out[peer] : out[peer + 1]], to[peer], kind, peer, stream.ptr)
            if peer != rank and come[peer]:
                self._call("recv", recv[back[peer] : back[peer + 1]], come[peer], kind, peer, stream.ptr)
        self._group(end=True)

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

    def _group(self, end: bool = False) -> None:
        nccl = self.device.nccl
        self._enter("groupEnd" if end else "groupStart", nccl.groupEnd if end else nccl.groupStart)

    def _enter(self, title: str, function: Callable[..., Any], *arguments: Any) -> None:
        try:
            self.guard.call(function, *arguments)
        except Exception as error:  # possibly because the guard has aborted it
            self.guard.failure = self.guard.failure or AllredError(f"NCCL's {title}: {error}; {HINT}")
        self.guard.check()

    def _type(self, name: str) -> int:
        return int(getattr(self.device.nccl, nccl_types.TYPES[name]))

    def _op(self, op: ReduceOp) -> int:
        return int(getattr(self.device.nccl, _OPS[op]))
