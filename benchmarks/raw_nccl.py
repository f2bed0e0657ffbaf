"""benchmarks/bench.py --device cuda --against nccl: baselines by cupy's NcclCommunicator without allred.

nccl                       allReduce in place on cupy's current stream
nccl per tensor            one allReduce per tensor, inside one NCCL group
nccl concatenate + split   cupy.concatenate, one allReduce, copy back; the flat array is allocated from cupy's pool in
                           every call

`fused` also measures the host time to enqueue a call (enqueue_us, p50), and on rank 0 the bandwidth of the kernels that
pack and unpack a bucket, and of a copy on the device: GB/s read and written (copy_GBps, pack_GBps, unpack_GBps,
pack_scaled_GBps, unpack_divided_GBps).
"""

import functools
import time
from typing import Any

import numpy as np

import allred
from allred import arrays
from allred.bench import measure
from allred.bench.allreduce import gpu, synchronize_gpu
from allred.bench.measure import Call
from allred.bench.output import rounded
from allred.comm.backends.nccl import TYPES
from allred.gpu.device_arrays import adopt

NCCL, PER_TENSOR, CONCATENATED = "nccl", "nccl per tensor", "nccl concatenate + split"
_ENQUEUE_SAMPLES = 100


class NcclBaseline:
    """NCCL without allred, on the ranks of the mpi4py communicator `comm`. Collective."""

    def __init__(self, comm: Any, dtype: np.dtype[Any]) -> None:
        nccl = gpu().nccl
        unique_id = comm.bcast(nccl.get_unique_id() if comm.Get_rank() == 0 else None)
        self._nccl = gpu().communicator(comm.Get_size(), unique_id, comm.Get_rank())
        self._comm, self._sum = comm, nccl.NCCL_SUM
        self._dtype = getattr(nccl, TYPES[arrays.name_of(dtype)])

    def allreduce(self, address: int, count: int) -> None:
        stream = gpu().current().ptr
        self._nccl.allReduce(address, address, count, self._dtype, self._sum, stream)

    def array_calls(self, array: Any) -> dict[str, Call]:
        return {NCCL: functools.partial(self.allreduce, adopt(array).array.data.ptr, array.size)}

    def group_calls(self, group: list[Any]) -> dict[str, Call]:
        nccl, concatenate = gpu().nccl, gpu().xp.concatenate
        addresses = [(adopt(array).array.data.ptr, array.size) for array in group]
        flats = [array.reshape(-1) for array in group]
        ends = np.cumsum([flat.size for flat in flats]).tolist()

        def per_tensor() -> None:
            nccl.groupStart()
            for address, count in addresses:
                self.allreduce(address, count)
            nccl.groupEnd()

        def concatenated() -> None:
            whole = concatenate(flats)
            self.allreduce(whole.data.ptr, whole.size)
            for flat, end in zip(flats, ends, strict=True):
                flat[...] = whole[end - flat.size : end]

        return {PER_TENSOR: per_tensor, CONCATENATED: concatenated}

    def details(self, group: list[Any], seconds: float) -> dict[str, float]:
        call = functools.partial(allred.grouped_allreduce_, group, allred.Sum)
        bandwidths = packing_bandwidths(group, self._comm, seconds)
        return {"enqueue_us": rounded(enqueue_us(call, self._comm)), **bandwidths}

    def close(self) -> None:
        synchronize_gpu()
        self._nccl.destroy()


def enqueue_us(call: Call, comm: Any) -> float:
    """Host time of one call in microseconds: the slowest rank, p50. Collective."""
    times = []
    for _ in range(_ENQUEUE_SAMPLES):
        synchronize_gpu()
        comm.Barrier()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    synchronize_gpu()
    return float(np.median(measure.slowest(times, comm))) * 1e6


def packing_bandwidths(group: list[Any], comm: Any, seconds: float) -> dict[str, float]:
    """GB/s, read and written, of packing and unpacking all arrays, and of a copy of the same size. Collective."""
    xp, kernels = gpu().xp, gpu().kernels
    dtype, flats = arrays.name_of(group[0].dtype), [adopt(array).flat() for array in group]
    table = kernels.table(flats, flats[0].itemsize)
    buffer, copied = (xp.zeros(table.buffer_elements, flats[0].dtype) for _ in range(2))
    calls: dict[str, Call] = {
        "copy": lambda: xp.copyto(copied, buffer),
        "pack": lambda: kernels.pack(table, dtype, buffer, dtype, None),
        "unpack": lambda: kernels.unpack(buffer, table, dtype, dtype, None),
    }
    if arrays.accumulator(group[0].dtype) == group[0].dtype and arrays.is_inexact(group[0].dtype):
        calls["pack_scaled"] = lambda: kernels.pack(table, dtype, buffer, dtype, 0.5)
        calls["unpack_divided"] = lambda: kernels.unpack(buffer, table, dtype, dtype, 2.0)
    times = measure.interleave(calls, comm, seconds, synchronize_gpu)
    nbytes = 2 * sum(flat.nbytes for flat in flats)
    return {f"{name}_GBps": rounded(measure.algbw(nbytes, each.us(50))) for name, each in times.items()}
