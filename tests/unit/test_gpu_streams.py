"""Order of streams and ownership of memory on a GPU, with stand-ins for streams (fake_cupy.py)."""

import sys
import threading
import types
import weakref

import fake_cupy
import numpy as np
import pytest
from fake_cupy import Array, Stream, stack

from allred.errors import InputError
from allred.gpu import device_arrays, streams
from allred.gpu.device_arrays import compute
from allred.gpu.launch_order import LaunchOrder
from allred.gpu.streams import GpuBinding


@pytest.fixture
def cupy(monkeypatch):
    made = fake_cupy.module()
    for name, module in {"cupy": made, "cupy.cuda": made.cuda}.items():
        monkeypatch.setitem(sys.modules, name, module)
    streams.external_stream.cache_clear()
    return made


@pytest.fixture
def device(cupy):
    return streams.Device(GpuBinding(0), rank=0)


def test_a_rank_that_cannot_compile_the_kernels_fails_in_init(cupy, monkeypatch):
    def fails(_):
        raise RuntimeError("Failed to find CUDA headers")

    monkeypatch.setattr(fake_cupy.RawModule, "compile", fails)
    with pytest.raises(RuntimeError, match="Failed to find CUDA headers"):
        streams.Device(GpuBinding(0), rank=0)


class Other:
    """A framework with a current stream of its own."""

    def __init__(self):
        self.stream = Stream(77)
        Stream.known = {77: self.stream, 78: Stream(78)}

    def handle(self):
        return self.stream.ptr


@pytest.mark.parametrize("foreign", [False, True])
def test_an_operation_is_ordered_after_its_caller_and_before_its_waiters(device, foreign):
    other = Other()
    caller, handle = (other.stream, other.handle) if foreign else (stack[-1], None)
    before = caller.work()
    lease = device.lease([handle, handle])
    later = caller.work()  # as a backward pass goes on: nobody waits for that
    with lease.enter() as stream:
        assert stream.follows(before)
        assert not stream.follows(later)
        moved = stream.work()
    end = lease.end(None)
    assert not caller.follows(moved)
    other.stream = Stream.known[78]  # the caller waits inside `with torch.cuda.stream(...)`
    end.order_callers()
    assert (other.stream if foreign else caller).follows(moved)
    assert stack[-1].follows(moved)


@pytest.mark.parametrize("foreign", [False, True])
def test_a_result_is_memory_of_the_callers_stream_which_may_be_in_use_there(device, foreign):
    """What gave it back may still be enqueued. And when the caller gives the result back, the next to get it is an
    array on the caller's stream, not one on the communication stream, which may be ahead."""
    other = Other()
    caller = other.stream if foreign else stack[-1]
    lease = device.lease([other.handle] if foreign else [None])
    reader = caller.work()
    (made,) = lease.empty([((3,), np.float32)])
    assert made.pool is caller
    with lease.enter() as stream:
        assert stream.follows(reader)
        assert stack[-1] is stream
    assert stack[-1] is not stream


def test_memory_is_kept_until_the_gpu_is_through(device):
    lease = device.lease()
    first, second = object(), object()
    end = lease.end(first)
    lease.end(second)
    assert [what for _, what in device._kept] == [first, second]
    end.event.status = 0
    lease.end(None)
    assert [what for _, what in device._kept] == [second, None]


@pytest.mark.parametrize("call", ["order_callers", "done", "synchronize"])
def test_the_memory_of_the_last_operation_is_released_without_another(device, call):
    array = Array((3,))
    end, left = device.lease().end(array), weakref.ref(array)
    del array
    assert left() is not None
    assert end.done() is False
    end.event.status = 0
    getattr(end, call)()
    assert left() is None


def test_a_gpu_that_has_failed_is_an_error(device):
    end = device.lease().end(None)
    end.event.status = 700
    for call in (end.done, end.order_callers):
        with pytest.raises(RuntimeError, match="CUDA error 700"):
            call()


def test_each_communicator_has_a_stream_of_high_priority(device):
    other = device.sibling()
    assert other.communication.priority == device.communication.priority < 0
    assert other.communication is not device.communication
    assert other.kernels is not device.kernels
    assert other.launches is device.launches
    end = device.lease().end(None)
    assert device._kept
    assert not other._kept
    del end


def test_each_thread_that_takes_a_stream_uses_the_gpu_of_the_rank(cupy, monkeypatch):
    device, used = streams.Device(GpuBinding(3), rank=0), []
    lease = device.lease()
    end = lease.end(None)

    def enqueue():
        with lease.enter():
            used.append(fake_cupy.current.gpu)

    for call in (device.lease, enqueue, end.order_callers, device.sibling):
        thread = threading.Thread(target=lambda call=call: (call(), used.append(fake_cupy.current.gpu)))
        thread.start()
        thread.join()
    assert used == [3] * 5


def test_events_can_be_queried_while_another_thread_captures_a_graph(cupy, monkeypatch):
    modes = []
    driver = types.SimpleNamespace(cuThreadExchangeStreamCaptureMode=lambda mode: modes.append(mode._obj.value))
    monkeypatch.setattr(streams, "_driver", lambda: driver)
    streams.Device(GpuBinding(2), rank=0).use_in_watching_thread()
    assert (fake_cupy.current.gpu, modes) == (2, [1])


def test_torch_returns_memory_that_it_does_not_use(device, cupy, monkeypatch):
    left = []

    def empty(*arguments):
        if not left:
            raise MemoryError("out of memory")
        return fake_cupy.empty(*arguments)

    monkeypatch.setattr(cupy, "empty", empty)
    with pytest.raises(MemoryError):
        device.empty(3, np.float32)
    allocator = types.SimpleNamespace(is_initialized=lambda: True, empty_cache=lambda: left.append("memory"))
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=allocator))
    assert device.empty(3, np.float32).shape == (3,)


def test_turns_come_in_the_order_in_which_they_were_taken():
    order, void = LaunchOrder(), []
    first, second, third, last = (order.take(lambda: void) if i == 1 else order.take(bool) for i in range(4))
    assert [turn.is_first() for turn in (first, second, third, last)] == [True, False, False, False]
    third.end()
    assert first.is_first()
    first.end()
    assert [turn.is_first() for turn in (second, last)] == [True, False]
    void.append("its communicator cannot be used any more")
    assert last.is_first()
    last.end()
    assert order.first() is None


class Foreign:
    """Another framework's array, by CUDA's array interface."""

    def __init__(self, array, **more):
        self.array = array
        self.__cuda_array_interface__ = {**array.__array_interface__, "version": 3, **more}


@pytest.mark.parametrize("layout", [np.s_[:], np.s_[::2], np.s_[:, 1:]])
def test_another_frameworks_array_is_seen_as_it_lies_and_its_stream_is_known(cupy, layout):
    other = Other()
    value = np.arange(24.0).reshape(4, 6)[layout]
    foreign = Foreign(value, strides=value.strides, stream=77)
    found = device_arrays.adopt(foreign)
    assert isinstance(found.array, Array)
    assert found.array.kept is foreign
    np.testing.assert_array_equal(found.array, value)
    assert np.shares_memory(found.array, value)
    assert (found.shape, found.dtype, found.writable, found.stream()) == (value.shape, value.dtype, True, 77)
    read = device_arrays.to_host(foreign)
    np.testing.assert_array_equal(read, value)
    device_arrays.fill(foreign, -value)
    np.testing.assert_array_equal(value, -read)
    del other


def test_it_is_read_on_the_stream_it_is_computed_on(cupy, monkeypatch):
    other, seen = Other(), []
    monkeypatch.setattr(Array, "get", lambda self: seen.append(stack[-1]) or np.array(self))
    device_arrays.to_host(Foreign(np.ones(3), stream=77))
    device_arrays.to_host(Foreign(np.ones(3), stream=None))
    assert seen == [other.stream, stack[0]]
    given = Foreign(np.ones(3), stream=77), Foreign(np.ones(3), stream=None), np.ones(3).view(Array)
    assert list(map(device_arrays.current_stream, given)) == [other.stream, stack[0], stack[0]]


def test_a_thread_uses_the_gpu_of_its_tensors(cupy, monkeypatch):
    """The kernels of a scan are launched there, before any operation has made it current."""
    stream, used = Stream(77), []
    torch = types.SimpleNamespace(current_stream=lambda index: types.SimpleNamespace(cuda_stream=stream.ptr))
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=torch))
    tensor = device_arrays.Adopted(np.ones(3), np.dtype(float), True, None, device_arrays._torch_stream.__wrapped__(3))
    monkeypatch.setattr(device_arrays, "adopt", lambda value: tensor)
    monkeypatch.setattr(device_arrays, "_kernels", lambda stream: None)
    monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda: used.append(fake_cupy.current.gpu) or stack[-1])
    thread = threading.Thread(target=device_arrays.with_kernels, args=([None],))
    thread.start()
    thread.join()
    assert used == [3]


@pytest.mark.parametrize("out", [False, True])
@pytest.mark.parametrize("wide", [np.float32, np.float64])
def test_arithmetic_is_done_on_the_stream_of_the_array(cupy, out, wide):
    other, seen = Other(), []
    value = Foreign(np.full(3, 2, np.float32), stream=77)

    def times(*arguments, **more):
        seen.append(stack[-1])
        return np.multiply(*arguments, **more)

    made = compute(times, value, 1.5, wide=np.dtype(wide), out=value if out else None)
    assert seen == [other.stream]
    assert (made is value) == out
    np.testing.assert_array_equal(value.array, 3 if out else 2)
    np.testing.assert_array_equal(value.array if out else made, np.full(3, 3, np.float32 if out else wide), strict=True)


def test_a_masked_array_is_refused_and_an_empty_one_has_no_address(cupy):
    with pytest.raises(InputError, match="would lose its mask"):
        device_arrays.adopt(Foreign(np.ones(3), mask=object()))
    empty = Foreign(np.ones((0, 3)), data=(0, False))
    assert device_arrays.adopt(empty).shape == (0, 3)


class Jaxs(Foreign):
    """It has both protocols."""

    def __dlpack__(self, **_):
        raise AssertionError("cupy.from_dlpack is the stand-in's")


@pytest.mark.parametrize(
    ("locked", "stream", "by_dlpack"), [(True, None, True), (True, 77, False), (False, None, False)]
)
def test_of_two_protocols_the_one_that_knows_the_stream(cupy, locked, stream, by_dlpack):
    value = np.ones(3)
    foreign = Jaxs(value, data=(value.ctypes.data, locked), stream=stream)
    cupy.from_dlpack = lambda given: given.array.copy().view(Array)
    found = device_arrays.adopt(foreign)
    assert np.shares_memory(found.array, value) is not by_dlpack
    assert (found.writable, found.stream is None) == (not locked, stream is None)
