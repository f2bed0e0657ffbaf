"""As much of cupy as orders streams: each stream knows, of every other, how much of its work it comes after.

Arrays are numpy's, with the stream from whose memory they are. Nothing runs: what is tested is what waits for what.
"""

import ctypes
import threading
import types

import numpy as np


class Stream:
    def __init__(self, ptr=0, non_blocking=False, priority=0):
        self.ptr, self.priority, self.done_before = ptr or id(self), priority, {}

    def work(self):
        """Enqueue something; what others have to come after."""
        self.done_before[self.ptr] = self.done_before.get(self.ptr, 0) + 1
        return self.ptr, self.done_before[self.ptr]

    def follows(self, work):
        return self.done_before.get(work[0], 0) >= work[1]

    def record(self):
        event = Event()
        event.record(self)
        return event

    def wait_event(self, event):
        for ptr, count in event.done_before.items():
            self.done_before[ptr] = max(self.done_before.get(ptr, 0), count)

    def is_capturing(self):
        return False

    def __enter__(self):
        stack.append(self)
        return self

    def __exit__(self, *_):
        stack.pop()

    known = {}  # noqa: RUF012

    @classmethod
    def from_external(cls, stream):
        version, ptr = stream.__cuda_stream__()
        assert version == 0
        return cls.known.setdefault(ptr, cls(ptr))


class Event:
    status = 600  # of eventQuery: not ready

    def __init__(self, disable_timing=False):
        self.ptr, self.done_before = self, {}

    def record(self, stream):
        self.done_before = dict(stream.done_before)

    def synchronize(self):
        assert self.status == 0


stack = [Stream()]
current = threading.local()  # `gpu` of each thread


class CUDARuntimeError(RuntimeError):
    def __init__(self, status):
        super().__init__(f"CUDA error {status}")


class Device:
    def __init__(self, index):
        self.index = index

    def use(self):
        current.gpu = self.index


class Array(np.ndarray):
    pool = None

    def get(self):
        self.read_on = stack[-1]
        return np.array(self)


def empty(shape, dtype):
    made = np.empty(shape, dtype).view(Array)
    made.pool = stack[-1]
    return made


def view(shape, dtype, pointer, strides):
    memory = (ctypes.c_char * pointer.extent).from_address(pointer.address)
    made = np.ndarray(shape, dtype, memory, 0, strides).view(Array)
    made.kept = pointer.owner
    return made


class UnownedMemory:
    def __init__(self, address, nbytes, owner, index):
        self.address, self.owner, self.extent = address, owner, 16 * nbytes  # numpy wants to know; strides reach beyond


class Meta(type):
    def __instancecheck__(cls, value):
        return isinstance(value, Array)

    def __call__(cls, *arguments):
        return view(*arguments)


class ndarray(metaclass=Meta):  # noqa: N801  (cupy's spelling)
    pass


class RawModule:
    def __init__(self, code, *, options=()):
        pass

    def compile(self):
        pass


def module():
    """To stand in sys.modules for cupy."""
    made = types.ModuleType("cupy")
    made.ndarray, made.empty, made.RawModule = ndarray, empty, RawModule
    made.zeros = lambda shape, dtype: np.zeros(shape, dtype).view(Array)
    made.asarray = lambda value: np.asarray(value).view(Array)
    nccl = types.SimpleNamespace(get_version=lambda: 23000)
    made.cuda = types.ModuleType("cupy.cuda")
    made.cuda.nccl, made.cuda.Stream, made.cuda.Event = nccl, Stream, Event
    made.cuda.get_current_stream = lambda: stack[-1]
    made.cuda.Device = Device
    made.cuda.runtime = types.SimpleNamespace(eventQuery=lambda event: event.status, CUDARuntimeError=CUDARuntimeError)
    made.cuda.UnownedMemory, made.cuda.MemoryPointer = UnownedMemory, lambda memory, offset: memory
    return made
