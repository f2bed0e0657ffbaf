"""The fused updates: the bits that the optimizers' numpy code gives, and no array that they do not suit."""

import functools
import sys

import ml_dtypes
import numpy as np
import pytest
from test_native import _runs_during

from allred import native, optim
from allred.native import twins

pytestmark = pytest.mark.skipif(not native.available, reason=native.reason)
VARIANTS, KERNEL = native.variants, native.update
DTYPES = [np.dtype(np.float32), np.dtype(np.float64)]
# Around the vectors of all variants, and a prime larger than the GIL is held for.
LENGTHS = [0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 129, 1009, 100003]
STEPS = 4
TINY = {"f": 1e-41, "d": 1e-312}  # denormal

# Every loop that is compiled, with numbers that are no float32; and numbers at which terms vanish or grow. A decay of
# 1e-60 is 0 as a float32, and yet inf * 0 is NaN.
MADE = [
    functools.partial(optim.SGD, **hyper)
    for hyper in [
        {"lr": 0.1},
        {"lr": 0.1, "weight_decay": 0.01},
        {"lr": 0.0, "weight_decay": 1e30},
        {"lr": 0.1, "weight_decay": 1e-60},
        {"lr": 0.1, "momentum": 0.9},
        {"lr": 1e-41, "momentum": 0.9, "weight_decay": 0.01},
        {"lr": 0.1, "momentum": 0.9, "nesterov": True},
        {"lr": 0.1, "momentum": 0.7, "nesterov": True, "weight_decay": 0.3},
    ]
]
MADE += [
    functools.partial(optim.Adagrad, **hyper)
    for hyper in [{"lr": 0.1}, {"lr": 0.1, "eps": 0.0, "weight_decay": 1e-60}, {"lr": 0.1, "weight_decay": 0.01}]
]
MADE += [
    functools.partial(optim.RMSProp, lr=0.1, centered=centered, momentum=momentum, weight_decay=weight_decay, eps=eps)
    for centered in (False, True)
    for momentum, eps in ((0.0, 1e-8), (0.9, 0.0))
    for weight_decay in (0.0, 0.01, 1e-60)
]
MADE += [
    functools.partial(made, lr=0.1, **hyper)
    for made in (optim.Adam, optim.AdamW)
    for hyper in [
        {"weight_decay": 0.0},
        {"weight_decay": 0.01},
        {"betas": (0.0, 0.3), "eps": 0.0, "weight_decay": 1e-60},
    ]
]


def name_of(made):
    return f"{made.func.__name__}({','.join(f'{name}={value}' for name, value in made.keywords.items())})"


@functools.cache
def values(dtype, count, seed):
    """Ordinary numbers, small and large ones whose squares are not, denormals, any bit pattern, the special ones."""
    rng = np.random.default_rng(seed)
    with np.errstate(all="ignore"):
        result = rng.normal(size=count).astype(dtype)
        result[1::4] *= dtype.type(10.0) ** rng.integers(-25, 25, result[1::4].size).astype(dtype)
        result[2::16] *= dtype.type(TINY[dtype.char])
        result[3::16] = np.frombuffer(rng.bytes(result[3::16].nbytes), dtype)
        result[7::16] = rng.choice([np.nan, np.inf, -np.inf, 0.0, -0.0], result[7::16].size)
    return result


def bits(array):
    """What must be equal: all bits, but one NaN is as good as another."""
    return np.where(np.isnan(array), np.nan, array).astype(array.dtype).tobytes()


def place(array, misaligned):
    """A copy that starts `misaligned` bytes behind where numpy would put it, between bytes that must stay."""
    memory = np.full(array.nbytes + 144, 0xAB, np.uint8)
    at = memory[64 + misaligned : 64 + misaligned + array.nbytes].view(array.dtype)
    at[:] = array
    return memory, at


class Recorder:
    """Stands in for native.update: what each call returned."""

    def __init__(self, update, variant=""):
        self.update, self.variant, self.returned = update, variant, []

    def __call__(self, rule, arrays, numbers):
        self.returned.append(self.update(rule, arrays, numbers, self.variant))
        return self.returned[-1]


def trajectory(monkeypatch, recorder, made, dtype, length, misaligned=0):
    """The bits of parameter and slots after each of a few updates."""
    monkeypatch.setattr(native, "update", recorder)
    optimizer, result = made(), []
    param_memory, param = place(values(dtype, length, 0), misaligned)
    held = {name: np.abs(values(dtype, length, 100 + i)) for i, name in enumerate(optimizer.slots(param))}
    placed = {name: place(slot, misaligned) for name, slot in held.items()}
    slots = {name: at for name, (_, at) in placed.items()}
    for step in range(1, STEPS + 1):
        grad = values(dtype, length, step)
        _, read = place(grad, misaligned)
        read.flags.writeable = False
        with np.errstate(all="ignore"):
            optimizer.update(param, read, slots, optimizer.learning_rate, step)
        assert read.tobytes() == grad.tobytes()
        result.append([bits(array) for array in (param, *slots.values())])
    for memory in (param_memory, *(memory for memory, _ in placed.values())):
        size = length * dtype.itemsize
        assert (memory[: 64 + misaligned] == 0xAB).all()
        assert (memory[64 + misaligned + size :] == 0xAB).all()
    return result


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("made", MADE, ids=name_of)
def test_every_variant_gives_the_bits_of_numpy(monkeypatch, made, dtype):
    for length in LENGTHS:
        numpy = Recorder(twins.update)
        expected = trajectory(monkeypatch, numpy, made, dtype, length)
        assert numpy.returned == [False] * STEPS
        for variant in VARIANTS:
            for misaligned in (0, 1, 4, 32) if length < 200 else (0, 4):
                kernel = Recorder(KERNEL, variant)
                found = trajectory(monkeypatch, kernel, made, dtype, length, misaligned)
                assert kernel.returned == [True] * STEPS
                assert found == expected, (length, variant, misaligned)


def ones(count=8, dtype=np.float32):
    return [np.ones(count, dtype) for _ in range(4)]


def adam(arrays, numbers=(0.1, 0.9, 0.99, 0.5, 1e-8, 0.0)):
    return KERNEL("adam", tuple(arrays), numbers)


UNSUITABLE = {
    "float16": ones(8, np.float16),
    "bfloat16": ones(8, ml_dtypes.bfloat16),
    "longdouble": ones(8, np.longdouble),
    "int32": ones(8, np.int32),
    "complex64": ones(8, np.complex64),
    "byte-swapped": ones(8, np.dtype(np.float32).newbyteorder()),
    "0-d": [np.array(1.0) for _ in range(4)],
    "another dtype": [*ones()[:3], np.ones(8)],
    "another dtype of as many bytes": [*ones()[:3], np.ones(8, np.int32)],
    "another length": [*ones()[:3], np.ones(9, np.float32)],
    "another shape": [array.reshape(shape) for array, shape in zip(ones(), [(2, 4)] * 3 + [(4, 2)], strict=True)],
    "more dimensions": [*ones()[:3], np.ones((8, 1), np.float32)],
    "strided": [*ones()[:3], np.ones(16, np.float32)[::2]],
    "in Fortran's order": [np.ones((2, 4), np.float32, order="F") for _ in range(4)],
    "a masked array": [np.ma.masked_equal(np.ones(8, np.float32), 0), *ones()[1:]],
    "another kind of memory": [*ones()[:3], bytearray(32)],
    "nothing where a slot must be": [*ones()[:3], None],
}


@pytest.mark.parametrize("arrays", UNSUITABLE.values(), ids=UNSUITABLE.keys())
def test_what_does_not_suit_is_left_alone(arrays):
    before = [array if array is None else np.array(array) for array in arrays]
    for rotation in range(4):  # the odd one is the parameter, the gradient and each slot in turn
        assert adam(arrays[rotation:] + arrays[:rotation]) is False
    for array, old in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(array, old)


@pytest.mark.parametrize("at", range(4))
def test_only_the_gradient_may_be_read_only(at):
    arrays = ones()
    arrays[1][:] = 2
    arrays[at].flags.writeable = False
    assert adam(arrays) is (at == 1)
    assert [(array == 1).all() for array in arrays] == ([False] * 4 if at == 1 else [True, False, True, True])


def test_arrays_that_overlap_are_left_alone_and_neighbours_are_not():
    line = np.ones(64, np.float32)
    apart = [line[start : start + 8] for start in (0, 8, 16, 24)]
    assert adam(apart)
    line[:] = 1
    for moved in range(4):
        for onto in range(4):
            if moved == onto:
                continue
            for shift in (-7, -1, 0, 1, 7):
                start = 8 + 8 * onto + shift
                arrays = [line[8 + 8 * i : 16 + 8 * i] for i in range(4)]
                arrays[moved] = line[start : start + 8]
                assert adam(arrays) is False
    assert (line == 1).all()
    assert adam([line[:0]] * 4)


@pytest.mark.parametrize(
    "number", [np.float64(0.1), np.float32(0.1), 1, True, np.array(0.1), None, np.nan, np.inf, 1e300]
)
def test_numbers_that_numpy_would_not_round_to_the_arrays_type_are_left_to_it(number):
    arrays = ones()
    for at in range(6):
        numbers = [0.1, 0.9, 0.99, 0.5, 1e-8, 0.0]
        numbers[at] = number
        assert adam(arrays, tuple(numbers)) is False
    assert all((array == 1).all() for array in arrays)


def test_a_number_beyond_float32_suits_float64():
    assert adam(ones(dtype=np.float64), (1e300, 0.9, 0.99, 0.5, 1e-8, 0.0))


def test_what_no_optimizer_asks_is_an_error():
    arrays, numbers = tuple(ones()), (0.1, 0.9, 0.99, 0.5, 1e-8, 0.0)
    with pytest.raises(ValueError, match="there is no rule 'lion'"):
        KERNEL("lion", arrays, numbers)
    with pytest.raises(ValueError, match="adam takes 4 arrays and 6 numbers, got 3 and 6"):
        KERNEL("adam", arrays[:3], numbers)
    with pytest.raises(ValueError, match="adam takes 4 arrays and 6 numbers, got 4 and 7"):
        KERNEL("adam", arrays, (*numbers, 0.0))
    with pytest.raises(ValueError, match="no kernels named 'sse9'"):
        KERNEL("adam", arrays, numbers, "sse9")
    for bad in ((list(arrays), numbers), (arrays, list(numbers))):
        with pytest.raises(TypeError, match="must be tuple, not list"):
            KERNEL("adam", *bad)


def test_the_gil_is_released_for_large_arrays_and_only_for_those():
    large, small = ones(2**20), ones(2**12)  # a parameter of 4 MiB, and of 16 KiB
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)  # nobody is made to give the GIL away: only who releases it
    try:
        assert any(_runs_during(lambda: adam(large)) for _ in range(100))
        assert not any(_runs_during(lambda: [adam(small) for _ in range(100)]) for _ in range(10))
    finally:
        sys.setswitchinterval(interval)
