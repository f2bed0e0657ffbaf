"""Streams, events and memory of a stand-in GPU, which checks their order.

Work is done at once. What is checked is whether it would be correct on a GPU, where the streams run independently:

    order       Work that reads or writes memory must follow all earlier work that wrote it; work that writes it must
                also follow all earlier work that read it: on the same stream, by an event, or because the host knows
                that the earlier work has ended.
    lifetime    Memory is freed into the pool of the stream that allocated it, and the next allocation there reuses it
                at once. So this stream must follow all work that uses the memory, or the host must know that it has
                ended.

Each stream and each event knows how many works of each stream are before it (a vector clock). What is wrong is
appended to `problems`. While `gpu.stuck`, no event is complete.
"""

import bisect
import threading
import weakref

import numpy as np

problems = []
_lock = threading.RLock()


class Gpu:
    """State of the stand-in GPU of this process."""

    def __init__(self):
        self.stuck = False
        self.ordered = 0  # waits that were added to the default stream
        self.synchronized = 0  # waits of the host
        self.copied_down = 0  # arrays copied to pinned memory
        self.ended = {}  # for each stream, the number of its works that the host knows to have ended


gpu = Gpu()


def _merge(clock, other):
    for ptr, count in other.items():
        clock[ptr] = max(clock.get(ptr, 0), count)


_streams = weakref.WeakValueDictionary()


class Stream:
    """cupy.cuda.Stream."""

    def __init__(self, null=False, non_blocking=False, ptds=False, priority=None):
        self.ptr, self.before = id(self), {}
        _streams[self.ptr] = self

    @classmethod
    def at(cls, ptr):
        return _streams[ptr]

    def work(self):
        """Enqueue work; returns what must be before the work that uses its result."""
        self.before[self.ptr] = self.before.get(self.ptr, 0) + 1
        return self.ptr, self.before[self.ptr]

    def follows(self, work):
        ptr, count = work
        return max(self.before.get(ptr, 0), gpu.ended.get(ptr, 0)) >= count

    def record(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event):
        with _lock:
            gpu.ordered += self is default
            _merge(self.before, event.before)

    def synchronize(self):
        with _lock:
            gpu.synchronized += 1
            _merge(gpu.ended, self.before)

    def is_capturing(self):
        return False

    def __enter__(self):
        assert self is default or self not in _stack(), "two operations on the stream at once, or one that waits inside"
        _stack().append(self)
        return self

    def __exit__(self, *_):
        assert _stack().pop() is self


_events = weakref.WeakValueDictionary()


class Event:
    """cupy.cuda.Event."""

    def __init__(self, block=False, disable_timing=False, interprocess=False):
        self.ptr, self.before = id(self), {}
        _events[self.ptr] = self

    @classmethod
    def at(cls, ptr):
        return _events[ptr]

    def record(self, stream=None):
        with _lock:
            self.before = dict((stream or current()).before)

    @property
    def done(self):
        if not gpu.stuck:
            with _lock:
                _merge(gpu.ended, self.before)
        return not gpu.stuck

    def synchronize(self):
        with _lock:
            gpu.synchronized += 1
            _merge(gpu.ended, self.before)


def synchronize():
    """Wait for all streams."""
    with _lock:
        for stream in list(_streams.values()):
            _merge(gpu.ended, stream.before)


default = Stream()
_threads = threading.local()


def _stack():
    if not hasattr(_threads, "stack"):
        _threads.stack = [default]
    return _threads.stack


def current(device_id=-1):
    return _stack()[-1]


class Memory:
    """An allocation: its addresses, the stream in whose pool it is, and the works that used it last."""

    def __init__(self, owner, stream):
        self.start = owner.ctypes.data
        self.stop = self.start + owner.nbytes
        self.stream = stream
        self.uses = []  # (start, stop, whether it writes, work, title)

    def use(self, start, stop, writes, stream, title):
        """Note a use by the stream."""
        left = []
        for use in self.uses:
            low, high, wrote, work, earlier = use
            if low < stop and start < high and (writes or wrote) and not stream.follows(work):
                problems.append(f"{title} does not wait for {earlier}, which uses the same memory on another stream")
            if not (start <= low and high <= stop and (writes or (not wrote and work[0] == stream.ptr))):
                left.append(use)
        self.uses = [*left, (start, stop, writes, stream.work(), title)]

    def free(self):
        for *_, work, title in self.uses:
            if not self.stream.follows(work):
                problems.append(f"memory is freed before {title} has used it")
                return


_memories = []  # by address
_starts = []


def allocated(array):
    """Note the memory of a new array, in the pool of the current stream. Returns the array."""
    owner = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    with _lock:
        if owner.nbytes and _at(owner.ctypes.data) is None:
            memory = Memory(owner, current())
            position = bisect.bisect(_starts, memory.start)
            _starts.insert(position, memory.start)
            _memories.insert(position, memory)
            weakref.finalize(owner, _freed, memory).atexit = False
    return array


def _freed(memory):
    with _lock:
        position = bisect.bisect_left(_starts, memory.start)
        del _starts[position], _memories[position]
        memory.free()


def _at(address):
    position = bisect.bisect(_starts, address) - 1
    return _memories[position] if position >= 0 and address < _memories[position].stop else None


def use(address, nbytes, writes, title, stream=None):
    """Note that work on a stream (the current one) reads or writes memory."""
    with _lock:
        memory = _at(address) if nbytes else None
        if memory is not None:
            assert address + nbytes <= memory.stop, f"{title} goes beyond the memory of its array"
            memory.use(address, address + nbytes, writes, stream or current(), title)


def use_array(array, writes, title, stream=None):
    """The same for an array of any layout, which is also noted if it is new."""
    if array.size:
        allocated(array)
        low, high = np.lib.array_utils.byte_bounds(array)
        use(low, high - low, writes, title, stream)
