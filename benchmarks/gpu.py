"""Device arrays against raw NCCL, on all ranks of an mpirun: `make bench-gpu`. Not yet run on a GPU.

    allreduce of 4 KiB to 256 MiB    against cupy's NcclCommunicator on the same buffer
    the tensors of ResNet-50         against one NCCL call a tensor in a group, and cupy.concatenate + one call + split
    packing and unpacking            in GB/s read and written, against a copy on the device, in the same run
    host time                        of enqueueing a grouped allreduce of ResNet-50's gradients

Ways take turns; a sample is the time of a call with the device synchronized before and after, on the slowest rank; p50.
"""

import argparse
import json
import time

import cupy as cp
import numpy as np
from cupy.cuda import nccl
from mpi4py import MPI

import allred
from allred.bench import measure, sets
from allred.gpu.kernels import Kernels, starts


class Raw:
    """What a user would write by hand."""

    def __init__(self, comm):
        unique_id = comm.bcast(nccl.get_unique_id() if comm.Get_rank() == 0 else None)
        self._nccl = nccl.NcclCommunicator(comm.Get_size(), unique_id, comm.Get_rank())

    def allreduce(self, array):
        at, stream = array.data.ptr, cp.cuda.get_current_stream().ptr
        self._nccl.allReduce(at, at, array.size, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, stream)

    def per_tensor(self, group):
        nccl.groupStart()
        for array in group:
            self.allreduce(array)
        nccl.groupEnd()

    def concatenated(self, group):
        whole = cp.concatenate([array.ravel() for array in group])
        self.allreduce(whole)
        start = 0
        for array in group:
            array[...] = whole[start : start + array.size].reshape(array.shape)
            start += array.size


def timed(ways, comm, seconds):
    """Seconds of a call, p50, of each way."""
    found = {name: [] for name in ways}
    for call in ways.values():
        call()
    begin, last = time.perf_counter(), False
    while not last:
        for name, call in ways.items():
            call()
            for _ in range(10):
                cp.cuda.Device().synchronize()
                comm.Barrier()
                start = time.perf_counter()
                call()
                cp.cuda.Device().synchronize()
                found[name].append(time.perf_counter() - start)
        last = comm.bcast(time.perf_counter() - begin > seconds)
    return {name: float(np.median(measure.slowest(times, comm))) for name, times in found.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each line; default 3")
    seconds = parser.parse_args().seconds
    allred.init(backend="nccl")
    comm = MPI.COMM_WORLD.Dup()
    raw, speaks = Raw(comm), comm.Get_rank() == 0
    where = {"ranks": comm.Get_size(), "gpu": cp.cuda.runtime.getDeviceProperties(cp.cuda.Device().id)["name"].decode()}
    where |= {"nccl": nccl.get_version(), "cupy": cp.__version__, "mpi": MPI.Get_library_version().split("\n")[0]}

    def line(what, nbytes, times, **more):
        if speaks:
            us = {f"{name}_us": round(1e6 * value, 2) for name, value in times.items()}
            rate = {"algbw": round(nbytes / times["allred"] / 1e9, 2)} if "allred" in times else {}
            print(json.dumps({"what": what, "bytes": nbytes, **us, **rate, **more, **where}), flush=True)

    for nbytes in (2**12, 2**16, 2**20, 2**24, 100 * 10**6, 2**28):
        x = cp.zeros(nbytes // 4, cp.float32)
        ways = {"allred": lambda x=x: allred.allreduce_(x, allred.Sum), "nccl": lambda x=x: raw.allreduce(x)}
        line("allreduce", nbytes, timed(ways, comm, seconds))

    group = [cp.zeros(shape, cp.float32) for shape in sets.SETS["resnet50"]()]
    nbytes = sum(array.nbytes for array in group)
    ways = {
        "allred": lambda: allred.grouped_allreduce_(group, allred.Sum),
        "nccl_per_tensor": lambda: raw.per_tensor(group),
        "nccl_concatenated": lambda: raw.concatenated(group),
    }
    line("resnet50", nbytes, timed(ways, comm, seconds))
    host = []
    for _ in range(200):
        cp.cuda.Device().synchronize()
        comm.Barrier()
        start = time.perf_counter()
        work = allred.grouped_allreduce_async_(group, allred.Sum)
        work.wait()
        host.append(time.perf_counter() - start)
    line("resnet50, host time of enqueueing", nbytes, {"host": float(np.median(measure.slowest(host, comm)))})

    kernels, flats = Kernels(cp), [array.ravel() for array in group]
    begin = starts([flat.size for flat in flats], 4)
    buffer, other = cp.zeros(begin[-1], cp.float32), cp.zeros(begin[-1], cp.float32)
    ways = {
        "copy": lambda: cp.copyto(other, buffer),
        "pack": lambda: kernels.pack(flats, "float32", buffer, None),
        "pack_scaled": lambda: kernels.pack(flats, "float32", buffer, 0.5),
        "unpack": lambda: kernels.unpack(buffer, flats, "float32", None),
        "unpack_divided": lambda: kernels.unpack(buffer, flats, "float32", 2.0),
    }
    times = timed(ways, comm, seconds)
    line("packing", nbytes, times, GBps={name: round(2 * nbytes / t / 1e9) for name, t in times.items()})
    for array in (x, *group):
        assert not array.any(), "the sum of zeros is not zero"
    allred.shutdown()


if __name__ == "__main__":
    main()
