"""Host time of reductions of ResNet-50's 161 gradients on a GPU, on a machine without one: `make bench-gpu-host`.

The arrays are cupy arrays over host memory; no data is read. All calls of CUDA and NCCL do nothing. So the time is that
of Python and of the header exchange between the ranks. Each line also shows the number of calls and the time that they
need here. The ranks start each sample together; its time is that of the slowest rank.
"""

import collections
import os
import time
from typing import Any

import cupy
import numpy as np

import allred
from allred.bench import measure, verify
from allred.comm import create, functions
from allred.comm.device_buckets import NonfiniteFlags
from allred.gpu import device_arrays, streams

WARM_UP, SAMPLES = 20, 300
calls: collections.Counter[str] = collections.Counter()


class NullObject:
    """A stream, an event, a communicator or a module of CUDA whose functions do nothing and are counted."""

    done = True

    def __init__(self, *_: Any, **__: Any) -> None:
        self.ptr = id(self)

    def __getattr__(self, name: str) -> Any:
        def call(*_: Any, **__: Any) -> Any:
            calls[name] += 1

        return call

    def __enter__(self) -> "NullObject":
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def get_function(self, name: str) -> Any:
        return lambda *_: calls.update(["launch"])


def on_gpu(value: Any) -> Any:
    """Return a cupy array over the memory of a numpy array, which reports GPU 0."""
    return device_arrays._view(value.ctypes.data, value.shape, value.dtype, value.strides, value, 0)


class Runtime:
    """cupy.cuda.runtime."""

    @staticmethod
    def eventQuery(_: int) -> int:  # noqa: N802
        calls["eventQuery"] += 1
        return 0


class Cuda:
    """cupy.cuda."""

    Stream = Event = Device = NullObject
    runtime = Runtime
    default = NullObject()

    @staticmethod
    def get_current_stream() -> NullObject:
        return Cuda.default


class Cupy:
    """cupy."""

    cuda, RawModule, ndarray = Cuda, NullObject, cupy.ndarray

    @staticmethod
    def zeros(shape: Any, dtype: Any) -> Any:
        return on_gpu(np.zeros(shape, dtype))

    empty, asarray = zeros, staticmethod(on_gpu)


class NullDevice(streams.Device):
    """The GPU of this rank, whose calls do nothing."""

    def __init__(self) -> None:
        self.xp, self.index, self._gpu, self.launches = Cupy, 0, NullObject(), streams.LaunchOrder()
        self.nccl = type("Nccl", (NullObject,), {f"NCCL_{n}": 0 for n in ("UINT8", "FLOAT32", "SUM", "FLOAT16")})()
        self._add_streams()

    def communicator(self, *_: Any) -> Any:
        return NullObject()

    def pinned(self, count: int) -> Any:
        return np.zeros(count, np.uint8)

    def to_host(self, source: Any, target: Any) -> None:
        calls["copy"] += 1


class NoUpdate:
    """An optimizer that changes nothing."""

    def step(self, params: Any, grads: Any) -> None:
        pass


def empty_calls_us(made: dict[str, int]) -> float:
    """Time of these calls here, in microseconds."""
    nothing = NullObject()
    times = []
    for _ in range(SAMPLES):
        start = time.perf_counter()
        for name, count in made.items():
            for _ in range(count):
                getattr(nothing, name)(None, None)
        times.append(time.perf_counter() - start)
    return 1e6 * float(np.median(times))


def main() -> None:
    streams.visible_gpus = lambda: streams.VisibleGpus((f"GPU-{os.getpid()}",), cupy=True)
    create.Device = lambda *_: NullDevice()
    allred.init(banner=False, check_steps=0)
    NonfiniteFlags.clear = lambda _: calls.update(["memset"])  # the real array calls CUDA
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    grads = [on_gpu(np.ones(shape, np.float32)) for shape in verify.SETS["resnet50"]()]
    params = {str(number): grad for number, grad in enumerate(grads)}
    opt = allred.distributed(NoUpdate())
    group = functions.current()
    cases = {
        "grouped_allreduce_(Sum)": lambda: group.grouped_allreduce(grads, allred.Sum, in_place=True).wait(),
        "grouped_allreduce_(Average)": lambda: group.grouped_allreduce(grads, allred.Average, in_place=True).wait(),
        "step() of an optimizer that does nothing": lambda: opt.step(params, dict(params)),
    }
    for title, call in cases.items():
        times = []
        for _ in range(WARM_UP):
            call()
        for _ in range(SAMPLES):
            calls.clear()
            comm.Barrier()
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        slowest = measure.slowest(times, comm)
        if comm.Get_rank() == 0:
            median, p10 = (1e6 * float(np.quantile(slowest, part)) for part in (0.5, 0.1))
            made = {
                name: count for name, count in calls.copy().items() if name != "eventQuery"
            }  # the guard's thread adds some
            print(f"{title}: {median:.0f} us, p10 {p10:.0f}; of these {empty_calls_us(made):.0f} for calls: {made}")


if __name__ == "__main__":
    main()
