"""`bench --device cuda`: arrays on GPUs, against what a user would write by hand with cupy's NcclCommunicator.

nccl                       allReduce in place on cupy's current stream
nccl per tensor            one such call a tensor, in a group, which NCCL may put together
nccl concatenate + split   cupy.concatenate, one call, everything back. The flat array is made anew in every call, from
                           cupy's pool

A sample ends when the GPU is through; in a sample of several calls they are queued one behind the other. `fused` tells
as well how long the host takes to enqueue a call (enqueue_us, p50), and how fast the kernels pack a bucket and unpack
it, beside a copy on the device: in GB/s read and written (pack_GBps, unpack_GBps, and scaled; copy_GBps), on rank 0.
"""

import functools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

import allred
from allred import arrays
from allred.bench import measure
from allred.bench.measure import Call
from allred.bench.table import short
from allred.comm import functions
from allred.comm.backends.nccl_types import TYPES
from allred.gpu.device import Device
from allred.gpu.values import adopt

NCCL, PER_TENSOR, CONCATENATED = "nccl", "nccl per tensor", "nccl concatenate + split"
_ENQUEUED = 100  # samples


def _device() -> Device:
    devices = functions.current().devices
    assert devices is not None  # --device cuda requires it
    return devices.device


def settle() -> None:
    """Wait until the GPU is through."""
    _device().xp.cuda.Device().synchronize()


def describe() -> dict[str, Any]:
    """What it runs on, for the record."""
    device = _device()
    name = device.xp.cuda.runtime.getDeviceProperties(device.index)["name"]
    return {"gpu": name.decode(), "nccl": device.nccl.get_version(), "cupy": device.xp.__version__}


def allocate(shapes: Sequence[tuple[int, ...]], dtype: np.dtype[Any]) -> list[Any]:
    """Arrays of zeros on this rank's GPU."""
    return [_device().xp.zeros(shape, dtype) for shape in shapes]


class Raw:
    """NCCL without allred, over the ranks of the mpi4py communicator `comm`."""

    def __init__(self, comm: Any, dtype: np.dtype[Any]) -> None:
        nccl = _device().nccl
        unique_id = comm.bcast(nccl.get_unique_id() if comm.Get_rank() == 0 else None)
        self._nccl = _device().communicator(comm.Get_size(), unique_id, comm.Get_rank())
        self._kind, self._sum = getattr(nccl, TYPES[arrays.name_of(dtype)]), nccl.NCCL_SUM

    def allreduce(self, address: int, count: int) -> None:
        stream = _device().current().ptr
        self._nccl.allReduce(address, address, count, self._kind, self._sum, stream)

    def of_array(self, array: Any) -> dict[str, Call]:
        return {NCCL: functools.partial(self.allreduce, adopt(array).array.data.ptr, array.size)}

    def of_group(self, group: list[Any]) -> dict[str, Call]:
        nccl, concatenate = _device().nccl, _device().xp.concatenate
        there = [(adopt(array).array.data.ptr, array.size) for array in group]
        flats = [array.reshape(-1) for array in group]
        ends = np.cumsum([flat.size for flat in flats]).tolist()

        def per_tensor() -> None:
            nccl.groupStart()
            for address, count in there:
                self.allreduce(address, count)
            nccl.groupEnd()

        def concatenated() -> None:
            whole = concatenate(flats)
            self.allreduce(whole.data.ptr, whole.size)
            for flat, end in zip(flats, ends, strict=True):
                flat[...] = whole[end - flat.size : end]

        return {PER_TENSOR: per_tensor, CONCATENATED: concatenated}

    def close(self) -> None:
        """Collective."""
        settle()
        self._nccl.destroy()


def enqueue_us(call: Call, comm: Any) -> float:
    """How long the host is in a call, on the slowest rank; p50."""
    times = []
    for _ in range(_ENQUEUED):
        settle()
        comm.Barrier()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    settle()
    return float(np.median(measure.slowest(times, comm))) * 1e6


def packing(group: list[Any], comm: Any, seconds: float) -> dict[str, float]:
    """GB/s, read and written, of packing a group and unpacking it, and of copying as many bytes."""
    xp, kernels = _device().xp, _device().kernels
    name, flats = arrays.name_of(group[0].dtype), [adopt(array).flat() for array in group]
    table = kernels.table(flats, flats[0].itemsize)
    buffer, other = (xp.zeros(table.room, flats[0].dtype) for _ in range(2))
    ways: dict[str, Call] = {
        "copy": lambda: xp.copyto(other, buffer),
        "pack": lambda: kernels.pack(table, name, buffer, None),
        "unpack": lambda: kernels.unpack(buffer, table, name, None),
    }
    if arrays.accumulator(group[0].dtype) == group[0].dtype and arrays.is_float(group[0].dtype):
        ways["pack_scaled"] = lambda: kernels.pack(table, name, buffer, 0.5)
        ways["unpack_divided"] = lambda: kernels.unpack(buffer, table, name, 2.0)
    samples = measure.measure(ways, comm, seconds, settle)
    nbytes = 2 * sum(flat.nbytes for flat in flats)
    return {f"{way}_GBps": short(measure.algbw(nbytes, found.us(50))) for way, found in samples.items()}


def host_and_kernels(group: list[Any], comm: Any, seconds: float) -> dict[str, float]:
    """Of `fused`: both of these."""
    call = functools.partial(allred.grouped_allreduce_, group, allred.Sum)
    return {"enqueue_us": short(enqueue_us(call, comm)), **packing(group, comm, seconds)}
