"""Each C kernel against its numpy twin."""

import importlib
import pathlib
import sys
import threading
import time

import ml_dtypes
import numpy as np
import pytest

from allred import arrays, native
from allred.fusion import Tensor
from allred.native import twins

KERNELS = [
    pytest.param(twins, id="numpy"),
    pytest.param(native, id="C", marks=pytest.mark.skipif(not native.available, reason=native.reason)),
]
LENGTHS = [[], [0], [1], [3, 0, 5], [1, 2, 3, 4], [1009, 64, 1]]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("dtype", [np.uint8, np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("misaligned", [0, 1])
def test_pack_and_unpack_are_inverse_and_exact(kernels, lengths, dtype, misaligned):
    rng = np.random.default_rng(0)
    dtype = np.dtype(dtype)
    tensors = [np.frombuffer(rng.bytes(n * dtype.itemsize), np.uint8).view(dtype) for n in lengths]  # NaNs included
    total = sum(tensor.nbytes for tensor in tensors)
    memory = np.full(total + 16, 0xAB, np.uint8)
    buffer = memory[misaligned : misaligned + total]
    kernels.pack([arrays.as_buffer(tensor) for tensor in tensors], buffer)
    assert buffer.tobytes() == b"".join(tensor.tobytes() for tensor in tensors)
    assert (memory[misaligned + total :] == 0xAB).all()
    again = [np.zeros_like(tensor) for tensor in tensors]
    kernels.unpack([arrays.as_buffer(tensor) for tensor in again], buffer)
    assert [tensor.tobytes() for tensor in again] == [tensor.tobytes() for tensor in tensors]


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_buffer_that_is_too_small_is_an_error_and_not_written(kernels):
    buffer = np.zeros(2, np.float32)
    with pytest.raises(ValueError, match="the tensors take 12 bytes but the fusion buffer has 8"):
        kernels.pack([np.ones(3, np.float32)], buffer)
    with pytest.raises(ValueError, match="the tensors take 12 bytes but the fusion buffer has 8"):
        kernels.unpack([np.ones(3, np.float32)], buffer)
    assert (buffer == 0).all()


@pytest.mark.skipif(not native.available, reason=native.reason)
def test_the_normal_build_has_no_failure_points():
    """Each point calls a function of csrc/chaos.c."""
    library = importlib.import_module("allred.native._kernels").__file__
    assert b"allred_chaos" not in pathlib.Path(library).read_bytes()


@pytest.mark.parametrize("kernels", KERNELS)
def test_numbers_are_added_from_a_position_on(kernels):
    values = np.arange(4.0)
    kernels.add_numbers(memoryview(values), 1, 1.5, 2, True)
    kernels.add_numbers(values, 4)
    np.testing.assert_array_equal(values, [0.0, 2.5, 4.0, 4.0])
    for first, numbers in ((2, (1, 2, 3)), (-1, (1,)), (5, ())):
        with pytest.raises(ValueError, match="do not fit into 4"):
            kernels.add_numbers(values, first, *numbers)
    np.testing.assert_array_equal(values, [0.0, 2.5, 4.0, 4.0])


@pytest.mark.parametrize("kernels", KERNELS)
def test_read_only_targets_are_refused(kernels):
    locked = np.zeros(3)
    locked.flags.writeable = False
    with pytest.raises((BufferError, ValueError), match=r"(?i)read-?only|not writable"):
        kernels.unpack([locked], np.ones(3))
    with pytest.raises((BufferError, ValueError), match=r"(?i)read-?only|not writable"):
        kernels.pack([np.ones(3)], locked)
    kernels.pack([locked], np.ones(3))


@pytest.mark.skipif(not native.available, reason=native.reason)
def test_c_refuses_what_is_not_contiguous_or_no_list():
    with pytest.raises((BufferError, ValueError), match=r"(?i)contiguous"):
        native.pack([np.zeros((4, 4))[:, ::2]], np.zeros(8))
    with pytest.raises(TypeError, match="list of contiguous buffers"):
        native.pack((np.zeros(1),), np.zeros(1))
    with pytest.raises(TypeError, match="bytes-like"):
        native.pack([3], np.zeros(1))


@pytest.mark.skipif(not native.available, reason=native.reason)
@pytest.mark.parametrize(
    "call",
    [
        lambda memory: native.pack([memory], np.empty(2**26, np.uint8)),
        lambda memory: native.hashes([memory]),
        lambda memory: native.exceeds([memory], 4, 2**31 - 1),
        lambda memory: native.crc32(memory),
    ],
    ids=["pack", "hashes", "exceeds", "crc32"],
)
def test_the_gil_is_released_while_c_works(call):
    """A thread that waits for the GIL gets it during a copy; without a release it could not before the copy's end."""
    memory = np.ones(2**26, np.uint8)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)  # nobody is made to give the GIL away: only who releases it
    try:
        assert any(_runs_during(lambda: call(memory)) for _ in range(100))
        assert not any(_runs_during(lambda: sum(range(10**6))) for _ in range(10))  # the test can fail
    finally:
        sys.setswitchinterval(interval)


def _runs_during(call):
    """Whether a thread that is ready to run did so before `call` returned."""
    go, ran = threading.Event(), []
    thread = threading.Thread(target=lambda: (go.wait(), ran.append(1)))
    thread.start()
    time.sleep(0.001)  # the thread is in go.wait() now
    go.set()
    call()
    result = bool(ran)
    thread.join()
    return result


class Sub(np.ndarray):
    pass


def read_only(array):
    array.flags.writeable = False
    return array


F4 = np.float32
ODD = {  # in place of np.zeros((2, 3), F4): as the parameter, as the gradient
    "another shape": (np.zeros((3, 2), F4), False, False),
    "fewer dimensions": (np.zeros(6, F4), False, False),
    "more dimensions": (np.zeros((2, 3, 1), F4), False, False),
    "another dtype": (np.zeros((2, 3), np.int32), False, False),
    "another byte order": (np.zeros((2, 3), ">f4"), False, False),
    "strided": (np.zeros((2, 6), F4)[:, ::2], False, False),
    "transposed": (np.zeros((3, 2), F4).T, False, False),
    "a view": (np.zeros((4, 3), F4)[1:3], True, True),
    "read-only": (read_only(np.zeros((2, 3), F4)), False, True),
    "a subclass": (np.zeros((2, 3), F4).view(Sub), False, False),
    "no array": ([[0.0] * 3] * 2, False, False),
    "nothing": (None, False, False),
}


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("what", ODD)
def test_whether_arrays_are_alike(kernels, what):
    tensors = [Tensor(name, (2, 3), np.dtype(F4)) for name in "abc"]
    plain = [np.zeros((2, 3), F4) for _ in tensors]
    array, as_param, as_grad = ODD[what]
    for place in range(3):
        odd = [*plain[:place], array, *plain[place + 1 :]]
        assert kernels.match(tensors, odd, plain) is as_param
        assert kernels.match(tensors, plain, odd) is as_grad
    assert kernels.match(tensors, plain, plain)


@pytest.mark.parametrize("kernels", KERNELS)
def test_alike_of_scalars_empty_arrays_and_lists_of_other_lengths(kernels):
    tensors = [Tensor("a", (), np.dtype(np.float64)), Tensor("b", (0, 2), np.dtype(ml_dtypes.bfloat16))]
    group = [np.zeros(()), np.zeros((0, 2), ml_dtypes.bfloat16)]
    assert kernels.match(tensors, group, group)
    assert not kernels.match(tensors, group, group[:1])
    assert not kernels.match(tensors[:1], group, group)
    assert kernels.match([], [], [])


@pytest.mark.skipif(not native.available, reason=native.reason)
def test_c_reads_numpys_arrays_here():
    assert native.match is not twins.match
    with pytest.raises(TypeError, match="tensor 0 is not"):
        native.match([("a", (1,))], [np.zeros(1)], [np.zeros(1)])
    with pytest.raises(TypeError):
        native.match([("a", ("one",), np.dtype(float))], [np.zeros(1)], [np.zeros(1)])
