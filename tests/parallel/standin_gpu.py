"""A stand-in for a GPU, cupy and NCCL, for the tests on machines without: numpy arrays that say they are on a device.

It stands in for the thin calls alone (Device, its kernels, NCCL's communicator, adopt); all decisions are the library's
own. NCCL's functions are done at once, with plain MPI over a communicator of its own, which is what ranks need that
really have to meet: ranks that launch operations in different orders get an error. What cannot be stood in for:
converting cupy's arrays to numpy raises, converting these does not. The real thing is tested by tests/gpu.
"""

import contextlib
import copy
import ctypes
import itertools
import time

import numpy as np
from mpi4py import MPI

from allred.comm import device_reduce
from allred.gpu import device_arrays, kernels
from allred.gpu.launch_order import LaunchOrder
from allred.modes.detect import finite


class DeviceArray(np.ndarray):
    """Host memory that claims to be a GPU's."""

    @property
    def __cuda_array_interface__(self):
        return {**self.__array_interface__, "data": (self.ctypes.data, not self.flags.writeable), "version": 3}


class Tensor:
    """The same of another framework: numpy's functions do not take it, and its names are others, as torch's are."""

    __array_ufunc__ = None

    def __init__(self, array):
        self.array = np.asarray(array)
        self.shape, self.dtype = self.array.shape, f"framework.{self.array.dtype}"

    __cuda_array_interface__ = None  # it is adopted by a way of its own

    def __array__(self, *_):
        raise TypeError("can't convert device memory to numpy")

    def size(self):
        return self.shape


def on_gpu(value):
    """A copy of a host array as one on the GPU; its memory is kept in the same layout."""
    return np.array(value, order="K").view(DeviceArray)


def host(value):
    """The values of an array on the stand-in GPU."""
    return value.array if isinstance(value, Tensor) else np.asarray(value)


def adopt(value):
    """Replaces device_arrays.adopt for stand-in arrays."""
    array, kind = (value.array, Tensor) if isinstance(value, Tensor) else (value, on_gpu)
    bare = array.view(Pointed)
    if array.dtype.name == "bfloat16":
        bare = bare.view(np.uint16)
    return device_arrays.Adopted(
        bare, array.dtype, array.flags.writeable, lambda made, dtype: kind(host(made).view(dtype))
    )


def layouts(group):
    """Replaces device_arrays.layouts for stand-in arrays."""
    if any(type(value) is not DeviceArray for value in group):
        return None
    return [(value.ctypes.data, Data.device_id, value.shape, value.strides, value.dtype) for value in group]


def zeros(like, shape, dtype):
    """Replaces device_arrays.zeros for stand-in arrays."""
    made = np.zeros(shape, dtype)
    return adopt(like).convert(made, dtype) if device_arrays.is_device(like) else made


def install(put):
    """Where the library asks for what only a GPU has, this answers. put: setattr, or a test's own."""
    scan = Kernels()
    for module in (device_arrays, device_reduce):
        put(module, "adopt", adopt)
    put(device_reduce, "layouts", layouts)
    put(device_arrays, "zeros", zeros)
    put(device_arrays, "current_stream", lambda value: CALLER)
    put(device_arrays, "layouts", layouts)
    put(device_arrays, "squares_on_gpu", lambda parts: sum(map(squares, parts)))
    put(finite, "exceeds_on_gpu", lambda parts, *a: bool(scan.exceeds(list(map(host, parts)), *a)))


def squares(part):
    """In place of device_arrays.squares_on_gpu, of one array."""
    value, low, high = part
    return float(np.square(host(value).astype(np.float64).reshape(-1)[low:high]).sum())


class Pointed(np.ndarray):
    """What allred works on: numpy with cupy's `data.ptr`, and its `get`."""

    @property
    def data(self):
        return Data(self.ctypes.data)

    def get(self):
        return np.array(self)


class Data:
    device_id = 0

    def __init__(self, ptr):
        self.ptr = ptr


class Namespace:
    """As much of cupy as is used."""

    isnan, divide, copyto, zeros_like, empty_like = np.isnan, np.divide, np.copyto, np.zeros_like, np.empty_like
    __version__ = "0"

    @staticmethod
    def concatenate(parts):
        return np.concatenate(parts).view(Pointed)

    class cuda:  # noqa: N801
        class Device:
            def synchronize(self):
                pass

        class runtime:  # noqa: N801
            @staticmethod
            def getDeviceProperties(index):  # noqa: N802
                return {"name": b"stand-in"}

    @staticmethod
    def where(condition, one, other):
        return np.where(condition, one, other).view(Pointed)

    @staticmethod
    def asarray(value, dtype=None):
        return np.asarray(value, dtype).view(Pointed)

    @staticmethod
    def zeros(shape, dtype):
        return np.zeros(shape, dtype).view(Pointed)

    @staticmethod
    def empty(shape, dtype):
        """With what nobody should see."""
        array = np.empty(shape, dtype)
        array.reshape(-1).view(np.uint8)[:] = 0xA5
        return array.view(Pointed)


class Completion:
    def __init__(self, device):
        self._device = device

    def order(self):
        self._device.ordered += 1

    def done(self):
        return not self._device.stuck

    def synchronize(self):
        self._device.synchronized += 1


def arrays_in(kept):
    """The host arrays in nested tuples and lists."""
    if isinstance(kept, (tuple, list)):
        return [one for each in kept for one in arrays_in(each)]
    return [kept] if type(kept) is np.ndarray else []


class StreamLease:
    def __init__(self, device):
        self._device = device

    @contextlib.contextmanager
    def enter(self):
        assert not self._device.inside, "two operations on the stream at once, or one that waits inside"
        self._device.inside = True
        try:
            yield self._device.stream
        finally:
            self._device.inside = False

    def empty(self, wanted):
        assert not self._device.inside, "results are the caller's stream's memory"
        return [Namespace.empty(shape, dtype) for shape, dtype in wanted]

    def end(self, kept):
        pages = self._device.pages
        self._device.kept_pages = sum(any(np.shares_memory(one, page) for page in pages) for one in arrays_in(kept))
        return Completion(self._device)


class Stream:
    numbers = itertools.count(7)

    def __init__(self):
        self.ptr = next(self.numbers)

    def synchronize(self):
        pass


CALLER = Stream()
MEETING_S = 5.0  # for ranks to launch the same operation
FACTORED = ("float16", "bfloat16", "float32", "float64")


class Kernels(kernels.Kernels):
    """What fuse.cu does, in numpy, where the tables say; tests/unit/test_fuse_cu.py holds fuse.cu against numpy."""

    def __init__(self):
        super().__init__(Namespace)

    def pack(self, table, name, buffer, factor):
        for part, there in self._parts(table, name, buffer):
            if factor is not None:
                assert name in FACTORED, f"fuse.cu has no pack_{name}"
                part = widened(part, name) * buffer.dtype.type(factor) if factor else 0
            there[...] = part

    def unpack(self, buffer, table, name, divisor):
        for part, held in self._parts(table, name, buffer):
            assert divisor is None or name in FACTORED, f"fuse.cu has no unpack_{name}"
            part[...] = held if divisor is None else narrowed(held / held.dtype.type(divisor), name)

    def _parts(self, table, name, buffer):
        """Each tensor, by its address alone, and its part of the buffer."""
        assert table.itemsize == buffer.itemsize
        dtype = device_arrays.storage_dtype(name)
        for address, start, count in zip(table.addresses, table.offsets, table.counts, strict=False):
            if count:
                memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
                yield np.frombuffer(memory, dtype), buffer[start : start + count]

    def exceeds(self, parts, element_bytes, limit):
        bits = [part.view(f"u{element_bytes}") for part in parts]
        upper = [(each >> 32).astype(np.uint32) if element_bytes == 8 else each for each in bits]
        mask = 0x7FFF if element_bytes == 2 else 0x7FFFFFFF
        return np.array([any(((each & mask) > limit).any() for each in upper)], np.uint32)


def widened(part, name):
    return device_arrays.half_to_float32(part, name) if name in device_arrays.HALF_DTYPES else part


def narrowed(part, name):
    return device_arrays.round_to_half(np, part, name) if name in device_arrays.HALF_DTYPES else part


class Nccl:
    """The module cupy.cuda.nccl, and its communicator: MPI's collectives on the memory at the addresses."""

    NCCL_INT8, NCCL_UINT8, NCCL_INT32, NCCL_INT64, NCCL_FLOAT16, NCCL_FLOAT32, NCCL_FLOAT64 = (0, 1, 2, 4, 6, 7, 8)
    NCCL_SUM, NCCL_PROD, NCCL_MAX, NCCL_MIN = range(4)
    DTYPES = {0: "i1", 1: "u1", 2: "i4", 4: "i8", 6: "f2", 7: "f4", 8: "f8"}  # noqa: RUF012
    OPS = (np.add, np.multiply, np.fmax, np.fmin)  # those that drop a NaN, as NCCL's do

    def __init__(self):
        self.aborted, self.error, self.calls = False, None, []

    def get_version(self):
        return 23000

    numbers = itertools.count(1)  # of the unique ids of this process

    def get_unique_id(self):
        rank = MPI.COMM_WORLD.Get_rank()
        return rank, 1000 * rank + next(self.numbers)

    def start(self, size, unique_id, rank, stream):
        """A communicator of the ranks that have this id. The one that made the id hears from the others."""
        world, (first, tag) = MPI.COMM_WORLD, unique_id
        if rank:
            world.send((rank, world.Get_rank()), first, tag)
            members = world.recv(source=first, tag=tag)
        else:
            others = sorted(world.recv(tag=tag) for _ in range(size - 1))
            members = [first, *(number for _, number in others)]
            for number in members[1:]:
                world.send(members, number, tag)
        made = copy.copy(self)
        made.comm, made.stream = world.Create_group(world.Get_group().Incl(members), tag), stream
        return made

    grouped = []  # noqa: RUF012  (the module's, for all communicators)
    open_groups = 0

    def groupStart(self):  # noqa: N802
        assert not self.grouped
        Nccl.open_groups += 1

    def groupEnd(self):  # noqa: N802
        Nccl.open_groups -= 1
        for request in self.grouped:
            request.Wait()
        self.grouped.clear()

    def allReduce(self, source, target, count, kind, op, stream):  # noqa: N802
        self._note("allReduce", stream)
        mine = self._at(source, count, kind).copy()
        rows = np.empty((self.comm.Get_size(), count), mine.dtype)
        self.comm.Allgather(mine.view(np.uint8), rows.view(np.uint8))
        assert op in (self.NCCL_SUM, self.NCCL_PROD) or mine.dtype.kind in "iu", "NCCL's Min and Max drop a NaN"
        with np.errstate(all="ignore"):
            self._at(target, count, kind)[:] = self.OPS[op].reduce(rows, axis=0, dtype=mine.dtype)

    def broadcast(self, source, target, count, kind, root, stream):
        self._note("broadcast", stream)
        self.comm.Bcast(self._at(target, count, kind), root)

    def allGather(self, source, target, count, kind, stream):  # noqa: N802
        self._note("allGather", stream)
        self.comm.Allgather(self._at(source, count, kind).copy(), self._at(target, count * self.comm.Get_size(), kind))

    def send(self, source, count, kind, peer, stream):
        self._note("send", stream)
        self.grouped.append(self.comm.Isend(self._at(source, count, kind), peer))

    def recv(self, target, count, kind, peer, stream):
        self._note("recv", stream)
        self.grouped.append(self.comm.Irecv(self._at(target, count, kind), peer))

    def check_async_error(self):
        if self.error:
            raise self.error

    def abort(self):
        self.aborted = True

    def destroy(self):
        self.comm.Free()

    def _note(self, call, stream):
        """A launch: on the stream of the communicator, and on all of its ranks before the next one of any other."""
        assert stream == self.stream.ptr, "not on the communication stream"
        self.calls.append(call)
        if call in ("send", "recv"):
            return
        met, until = self.comm.Ibarrier(), time.monotonic() + MEETING_S
        while not met.Test():
            assert time.monotonic() < until, f"not all ranks launch {call} on stream {stream} now"
            time.sleep(0)

    def _at(self, address, count, kind):
        dtype = np.dtype(self.DTYPES[kind])
        memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
        return np.frombuffer(memory, dtype)


class Device:
    """Replaces gpu.streams.Device."""

    def __init__(self):
        self.xp, self.nccl, self.launches = Namespace, Nccl(), LaunchOrder()
        self.index = self.ordered = self.synchronized = self.copied_down = 0
        self.inside = self.stuck = False
        self.pages, self.kept_pages = [], 0  # of pinned memory; in how many arrays the last operation keeps it
        self._add_stream()

    def _add_stream(self):
        self.kernels, self.stream = Kernels(), Stream()

    def sibling(self):
        made = copy.copy(self)
        made._add_stream()
        return made

    def use(self):
        pass

    def current(self):
        return self.stream

    def lease(self, handles=()):
        return StreamLease(self)

    def communicator(self, size, unique_id, rank):
        return self.nccl.start(size, unique_id, rank, self.stream)

    def pinned(self, count):
        self.pages.append(np.zeros(max(count, 1), np.uint8))
        return self.pages[-1]

    def to_host(self, source, target):
        assert self.inside
        self.copied_down += 1
        target[:] = np.asarray(source)

    def to_device(self, source, target):
        assert self.inside
        target[:] = source
