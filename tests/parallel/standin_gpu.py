"""A stand-in for a GPU, cupy and NCCL, for the tests on machines without: numpy arrays that say they are on a device.

It stands in for the thin calls alone (cupy's functions, streams and events, the kernels of fuse.cu, NCCL's
communicator, adopt); all decisions are the library's own. NCCL's functions are done at once, with plain MPI over a
communicator of its own, which is what ranks need that really have to meet. cuda_stand_in.py checks that work on streams
has the order that it needs. What cannot be stood in for: converting cupy's arrays to numpy raises, converting these
does not. The real thing is tested by tests/gpu; tests/cuda holds the calls against the real cupy.
"""

import copy
import ctypes
import itertools
import os
import sys
from unittest import mock

import cuda_stand_in as cuda
import ml_dtypes
import numpy as np
from mpi4py import MPI

from allred.comm import create, device_operation, device_reduce
from allred.gpu import device_arrays, kernels, streams
from allred.modes.detect import finite


class DeviceArray(np.ndarray):
    """Host memory that claims to be a GPU's."""

    @property
    def __cuda_array_interface__(self):
        return {**self.__array_interface__, "data": (self.ctypes.data, not self.flags.writeable), "version": 3}

    def __setitem__(self, where, value):
        cuda.use_array(self, True, "an assignment by the caller")
        super().__setitem__(where, value)


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
    made = np.array(value, order="K").view(DeviceArray)
    cuda.use_array(made, True, "the caller's computation")
    return made


def host(value):
    """The values of an array on the stand-in GPU."""
    array = value.array if isinstance(value, Tensor) else value
    if isinstance(value, Tensor | DeviceArray):
        cuda.use_array(array, False, "the caller's computation")
    return np.asarray(array)


def adopt(value):
    """Replaces device_arrays.adopt for stand-in arrays."""
    array, kind = (value.array, Tensor) if isinstance(value, Tensor) else (value, lambda made: made.view(DeviceArray))
    bare = cuda.allocated(array.view(Pointed))
    if array.dtype.name == "bfloat16":
        bare = bare.view(np.uint16)
    return device_arrays.Adopted(
        bare, array.dtype, array.flags.writeable, lambda made, dtype: kind(np.asarray(made).view(dtype))
    )


def layouts(group):
    """Replaces device_arrays.layouts for stand-in arrays."""
    if any(type(value) is not DeviceArray for value in group):
        return None
    return [(value.ctypes.data, value.shape, value.strides, value.dtype) for value in group]


def zeros(like, shape, dtype):
    """Replaces device_arrays.zeros for stand-in arrays."""
    made = np.zeros(shape, dtype)
    return adopt(like).convert(made, dtype) if device_arrays.is_device(like) else made


def install(put):
    """Where the library asks for what only a GPU has, this answers. put: setattr, or a test's own."""
    scan = kernels.Kernels(Namespace)
    for module in (device_arrays, device_operation):
        put(module, "adopt", adopt)
    put(device_reduce, "layouts", layouts)
    put(device_arrays, "zeros", zeros)
    put(device_arrays, "current_stream", lambda value: cuda.current())
    put(device_arrays, "layouts", layouts)
    put(device_arrays, "all_on_gpu", lambda values: layouts(values) is not None and len(values) > 0)
    put(device_arrays, "squares_on_gpu", lambda parts: sum(map(squares, parts)))
    put(finite, "exceeds_on_gpu", lambda parts, *a: bool(scan.exceeds(list(map(_numbers, parts)), *a)))


def _numbers(value):
    return device_arrays.real_numbers(adopt(value).flat())


def attach(make_device):
    """Before allred.init(): this process sees a GPU that no other sees, which `make_device` returns."""
    streams.visible_gpus = lambda: streams.VisibleGpus((f"GPU-{os.getpid()}",), cupy=True)
    create.Device = lambda *_: make_device()


def squares(part):
    """In place of device_arrays.squares_on_gpu, of one array."""
    value, low, high = part
    return float(np.square(np.abs(host(value).reshape(-1)[low:high]).astype(np.float64)).sum())


class Pointed(np.ndarray):
    """What allred works on: numpy with cupy's `data.ptr`, and its `get` and `set`. Work on it is noted."""

    @property
    def data(self):
        return Data(self.ctypes.data)

    def get(self, stream=None, order="C", out=None, blocking=True):
        cuda.use_array(self, False, "get", stream)
        if out is None:
            return np.array(self)
        cuda.gpu.copied_down += 1
        out[...] = self
        return out

    def set(self, arr, stream=None):
        cuda.use_array(self, True, "set", stream)
        _plain(self)[...] = arr

    def __setitem__(self, where, value):
        if isinstance(value, Pointed):
            cuda.use_array(value, False, "a copy")
        cuda.use_array(self[where] if where is not Ellipsis else self, True, "a copy")
        super().__setitem__(where, value)

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **more):
        for array in inputs:
            if isinstance(array, Pointed):
                cuda.use_array(array, False, ufunc.__name__)
        for array in out or ():
            cuda.use_array(array, True, ufunc.__name__)
            more["out"] = array.view(np.ndarray)
        made = getattr(ufunc, method)(*map(_plain, inputs), **more)
        if out:
            return out[0]
        return _made(made, ufunc.__name__) if isinstance(made, np.ndarray) else made

    def astype(self, dtype, order="K", *, copy=True):
        cuda.use_array(self, False, "astype")
        return _made(_plain(self).astype(dtype, order, copy=copy), "astype")

    def copy(self, order="C"):
        cuda.use_array(self, False, "copy")
        return _made(_plain(self).copy(order), "copy")

    def flatten(self, order="C"):
        return self.copy().reshape(-1)

    def fill(self, value):
        self[...] = value


def _plain(array):
    return array.view(np.ndarray) if isinstance(array, Pointed) else array


def _made(array, title):
    array = array.view(Pointed)
    cuda.use_array(array, True, title)
    return array


class Data:
    device_id = 0

    def __init__(self, ptr):
        self.ptr = ptr


class Namespace:
    """As much of cupy as is used."""

    isnan, divide = np.isnan, np.divide
    __version__ = "0"

    @staticmethod
    def concatenate(tup):
        return np.concatenate(tup).view(Pointed)

    @staticmethod
    def copyto(dst, src):
        dst[...] = src

    @staticmethod
    def where(condition, x, y):
        for array in (condition, x, y):
            cuda.use_array(array, False, "where")
        return _made(np.where(*map(_plain, (condition, x, y))), "where")

    @staticmethod
    def asarray(a, dtype=None):
        return _made(np.array(a, dtype), "asarray")

    @staticmethod
    def zeros(shape, dtype):
        return _made(np.zeros(shape, dtype), "zeros")

    @staticmethod
    def empty(shape, dtype):
        """With what nobody should see."""
        array = np.empty(shape, dtype)
        array.reshape(-1).view(np.uint8)[:] = 0xA5
        return cuda.allocated(array.view(Pointed))

    @staticmethod
    def empty_like(prototype):
        return Namespace.empty(prototype.shape, prototype.dtype)

    @staticmethod
    def zeros_like(a):
        return Namespace.zeros(a.shape, a.dtype)

    class RawModule:
        """fuse.cu."""

        def __init__(self, code, *, options=()):
            assert code == kernels.SOURCE.read_text()

        def compile(self, log_stream=None):
            pass

        def get_function(self, name):
            direction, _, name = name.partition("_")
            return lambda grid, block, args: FUSE[direction](name, *args)

    class cuda:  # noqa: N801
        Stream, Event, get_current_stream = cuda.Stream, cuda.Event, cuda.current
        alloc_pinned_memory = bytearray

        class Device:
            def __init__(self, device=0):
                pass

            def use(self):
                pass

            def synchronize(self):
                cuda.synchronize()

        class runtime:  # noqa: N801
            @staticmethod
            def getDeviceProperties(device):  # noqa: N802
                return {"name": b"stand-in"}

            @staticmethod
            def eventQuery(event):  # noqa: N802
                return 0 if cuda.Event.at(event).done else 600  # cudaErrorNotReady


# The kernels of fuse.cu that scale: the dtypes of tensors and buffer.
PACKED = [
    *(("float16", "float32"), ("bfloat16", "float32"), ("float32", "float32"), ("float64", "float64")),
    *((held, half) for held in ("float32", "float64") for half in device_arrays.HALF_DTYPES),
]
UNPACKED = [*PACKED, ("float16", "float16"), ("bfloat16", "bfloat16")]


def _parts(pieces, tiles, dtype, title, writes, buffer=None):
    """The number of each tensor, its elements, found by their address, and its part of the buffer.
    tests/unit/test_fuse_cu.py compares fuse.cu itself with numpy."""
    for table in (pieces, tiles):
        cuda.use_array(table, False, title)
    if buffer is not None:
        cuda.use_array(buffer, not writes, title)
    for number, (address, start, count) in enumerate(_plain(pieces).tolist()):
        if count:
            cuda.use(address, count * dtype.itemsize, writes, title)
            memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
            held = np.frombuffer(memory, dtype)
            moved = None if buffer is None else _plain(buffer)[start : start + count]
            yield number, held, moved


def _pack(name, pieces, tiles, buffer, factor=None):
    if name == "bytes":
        for _, part, there in _parts(pieces, tiles, np.dtype(np.uint8), "pack", False, buffer.view(np.uint8)):
            there[...] = part
        return
    held, moved = name.split("_")
    assert (held, moved) in PACKED, f"fuse.cu has no pack_{name}"
    assert buffer.dtype == device_arrays.storage_dtype(moved)
    for _, part, there in _parts(pieces, tiles, device_arrays.storage_dtype(held), "pack", False, buffer):
        wide = widened(part, held)
        there[...] = narrowed(wide * wide.dtype.type(factor) if factor else np.zeros_like(wide), moved)


def _unpack(name, pieces, tiles, buffer, divisor=None, flags=None):
    if name == "bytes":
        for _, part, there in _parts(pieces, tiles, np.dtype(np.uint8), "unpack", True, buffer.view(np.uint8)):
            part[...] = there
        return
    held, moved = name.split("_")
    assert (held, moved) in UNPACKED, f"fuse.cu has no unpack_{name}"
    assert buffer.dtype == device_arrays.storage_dtype(moved)
    checks = isinstance(flags, Pointed)
    if checks:
        cuda.use_array(flags, True, "unpack")
    wide = np.float64 if held == "float64" else np.float32
    for number, part, there in _parts(pieces, tiles, device_arrays.storage_dtype(held), "unpack", True, buffer):
        with np.errstate(all="ignore"):
            result = narrowed(widened(there, moved).astype(wide) / wide(divisor), held)
        finite = np.isfinite(widened(result, held))
        if checks and not finite.all():
            _plain(flags)[number] = 1
        part[finite if checks else slice(None)] = result[finite if checks else slice(None)]


def _combine(name, rows, stride, ranks, rank, own, out, count, multiplies, divisor):
    for array, writes in ((rows, False), (own, False), (out, True)):
        cuda.use_array(array, writes, "combine")
    assert own.size == out.size == count <= stride == rows.size // ranks
    values = [_plain(own if r == rank else rows[r * stride : r * stride + count]) for r in range(ranks)]
    wide = [device_arrays.half_to_float32(each, name) for each in values]
    with np.errstate(all="ignore"):
        total = (np.multiply if multiplies else np.add).reduce(wide, axis=0) / np.float32(divisor)
        _plain(out)[...] = device_arrays.round_to_half(np, total, name)


def _exceeds(name, pieces, tiles, limit, flag):
    bits = np.dtype(f"u{name}")
    cuda.use_array(flag, True, "exceeds")
    for _, part, _ in _parts(pieces, tiles, bits, "exceeds", False):
        upper = (part >> 32).astype(np.uint32) if bits.itemsize == 8 else part
        if ((upper & (0x7FFF if bits.itemsize == 2 else 0x7FFFFFFF)) > limit).any():
            _plain(flag)[0] = 1


FUSE = {"pack": _pack, "unpack": _unpack, "exceeds": _exceeds, "combine": _combine}


def widened(part, name):
    return device_arrays.half_to_float32(part, name) if name in device_arrays.HALF_DTYPES else part


def narrowed(part, name):
    return device_arrays.round_to_half(np, part, name) if name in device_arrays.HALF_DTYPES else part


class Nccl:
    """The module cupy.cuda.nccl, and its communicator: MPI's collectives on the memory at the addresses."""

    NCCL_INT8, NCCL_UINT8, NCCL_INT32, NCCL_INT64, NCCL_FLOAT16, NCCL_FLOAT32, NCCL_FLOAT64 = (0, 1, 2, 4, 6, 7, 8)
    NCCL_UINT32, NCCL_UINT64, NCCL_BFLOAT16 = 3, 5, 9
    NCCL_SUM, NCCL_PROD, NCCL_MAX, NCCL_MIN, NCCL_AVG = range(5)
    DTYPES = {  # noqa: RUF012
        **{0: "i1", 1: "u1", 2: "i4", 3: "u4", 4: "i8", 5: "u8", 6: "f2", 7: "f4", 8: "f8"},
        9: ml_dtypes.bfloat16,
    }
    OPS = (np.add, np.multiply, np.fmax, np.fmin, np.add)  # those that drop a NaN, as NCCL's do

    def __init__(self):
        self.aborted, self.error, self.calls = False, None, []

    def get_version(self):
        return 23000

    _numbers = itertools.count(1)

    def get_unique_id(self):
        rank = MPI.COMM_WORLD.Get_rank()
        return f"{rank} {1000 * rank + next(self._numbers)}".encode()

    def start(self, size, unique_id, rank):
        """A communicator of the ranks that have this id. The one that made the id hears from the others."""
        world, (first, tag) = MPI.COMM_WORLD, map(int, unique_id.split())
        if rank:
            world.send((rank, world.Get_rank()), first, tag)
            members = world.recv(source=first, tag=tag)
        else:
            others = sorted(world.recv(tag=tag) for _ in range(size - 1))
            members = [first, *(number for _, number in others)]
            for number in members[1:]:
                world.send(members, number, tag)
        made = copy.copy(self)
        made.comm, made.unique_id = world.Create_group(world.Get_group().Incl(members), tag), unique_id
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

    def allReduce(self, sendbuf, recvbuf, count, datatype, op, stream):  # noqa: N802
        self._note("allReduce", stream, (count, datatype, op), (sendbuf, count), (recvbuf, count))
        self._at(recvbuf, count, datatype)[:] = self._reduced(sendbuf, count, datatype, op)

    def reduceScatter(self, sendbuf, recvbuf, recvcount, datatype, op, stream):  # noqa: N802
        size, rank = self.comm.Get_size(), self.comm.Get_rank()
        arguments = recvcount, datatype, op
        self._note("reduceScatter", stream, arguments, (sendbuf, recvcount * size), (recvbuf, recvcount))
        whole = self._reduced(sendbuf, recvcount * size, datatype, op)
        self._at(recvbuf, recvcount, datatype)[:] = whole[rank * recvcount :][:recvcount]

    def reduce(self, sendbuf, recvbuf, count, datatype, op, root, stream):
        target = (recvbuf, count) if self.comm.Get_rank() == root else None
        self._note("reduce", stream, (count, datatype, op, root), (sendbuf, count), target)
        whole = self._reduced(sendbuf, count, datatype, op)
        if target is not None:
            self._at(recvbuf, count, datatype)[:] = whole

    def _reduced(self, sendbuf, count, datatype, op):
        mine = self._at(sendbuf, count, datatype).copy()
        rows = np.empty((self.comm.Get_size(), count), mine.dtype)
        self.comm.Allgather(mine.view(np.uint8), rows.view(np.uint8))
        assert op in (self.NCCL_SUM, self.NCCL_PROD, self.NCCL_AVG) or mine.dtype.kind in "iu", "it drops a NaN"
        with np.errstate(all="ignore"):
            whole = self.OPS[op].reduce(rows, axis=0, dtype=mine.dtype)
            return (whole / len(rows)).astype(mine.dtype) if op == self.NCCL_AVG else whole

    def broadcast(self, sendbuff, recvbuff, count, datatype, root, stream):
        source = (sendbuff, count) if self.comm.Get_rank() == root else None
        self._note("broadcast", stream, (count, datatype, root), source, (recvbuff, count))
        if source is not None:
            ctypes.memmove(recvbuff, sendbuff, count * np.dtype(self.DTYPES[datatype]).itemsize)
        self.comm.Bcast(self._at(recvbuff, count, datatype), root)

    def allGather(self, sendbuf, recvbuf, count, datatype, stream):  # noqa: N802
        size = self.comm.Get_size()
        self._note("allGather", stream, (count, datatype), (sendbuf, count), (recvbuf, count * size))
        self.comm.Allgather(self._at(sendbuf, count, datatype).copy(), self._at(recvbuf, count * size, datatype))

    def send(self, sendbuf, count, datatype, peer, stream):
        self._note("send", stream, (count, datatype), (sendbuf, count), None)
        self.grouped.append(self.comm.Isend(self._at(sendbuf, count, datatype), peer))

    def recv(self, recvbuf, count, datatype, peer, stream):
        self._note("recv", stream, (count, datatype), None, (recvbuf, count))
        self.grouped.append(self.comm.Irecv(self._at(recvbuf, count, datatype), peer))

    def check_async_error(self):
        if self.error:
            raise self.error

    def abort(self):
        self.aborted = True

    def destroy(self):
        self.comm.Free()

    launches = []  # noqa: RUF012  (of all communicators: which, the call, its arguments)

    def _note(self, call, stream, arguments, source, target):
        """source, target: address and number of elements of what the call reads and writes."""
        stream = cuda.Stream.at(stream)
        itemsize = np.dtype(self.DTYPES[arguments[1]]).itemsize
        for memory, writes in ((source, False), (target, True)):
            if memory is not None:
                cuda.use(memory[0], memory[1] * itemsize, writes, call, stream)
        self.calls.append(call)
        if call not in ("send", "recv"):  # which are not the same on all ranks
            self.launches.append((self.unique_id, call, *arguments))

    def _at(self, address, count, kind):
        dtype = np.dtype(self.DTYPES[kind])
        memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
        return np.frombuffer(memory, dtype)


def launch_problem(comm):
    """Collective. Describe the first pair of ranks that did not call NCCL in the same order, and forget all calls. NCCL
    needs one order on all ranks, also of calls on several communicators, and the same arguments."""
    launches = comm.allgather(Nccl.launches)
    Nccl.launches.clear()
    for rank, mine in enumerate(launches):
        for other, theirs in enumerate(launches[:rank]):
            common = {each[0] for each in mine} & {each[0] for each in theirs}
            pairs = [[each for each in some if each[0] in common] for some in (theirs, mine)]
            for position, (one, two) in enumerate(itertools.zip_longest(*pairs)):
                if one != two:
                    return f"call {position} that ranks {other} and {rank} share is {one} and {two}"
    return ""


class Device(streams.Device):
    """gpu.streams.Device, on a stand-in for cupy."""

    def __init__(self):
        with (
            mock.patch.dict(sys.modules, {"cupy": Namespace, "cupy.cuda": Namespace.cuda}),
            mock.patch.object(Namespace.cuda, "nccl", Nccl(), create=True),
        ):
            super().__init__(streams.GpuBinding(0), rank=0)

    def communicator(self, size, unique_id, rank):
        return self.nccl.start(size, unique_id, rank)
