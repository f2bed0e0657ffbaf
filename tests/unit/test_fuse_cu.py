"""csrc/fuse.cu compiled as plain C, where a launch is a loop over blocks and threads, against numpy.

The text of the kernels is the one that a GPU runs; what this cannot show is how they run there (tests/gpu).
"""

import ctypes
import itertools
import shutil
import subprocess

import ml_dtypes
import numpy as np
import pytest

from allred.gpu import kernels

THREADS = 7  # any number serves, except for combine
COMPILER = shutil.which("cc") or shutil.which("gcc")
NAMES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}
COUNTS = [3, 0, 8192, 1, 20001, 4]

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C compiler")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    target = tmp_path_factory.mktemp("fuse") / "fuse.so"
    flags = "-x c -DEMULATED -std=c11 -Wall -Wextra -Werror -fno-strict-aliasing -ffp-contract=off -shared -fPIC -O1"
    subprocess.run([COMPILER, *flags.split(), str(kernels.SOURCE), "-o", str(target)], check=True, timeout=60)
    return ctypes.CDLL(str(target))


class Array(np.ndarray):
    """With cupy's `data.ptr`."""

    @property
    def data(self):
        return type("Data", (), {"ptr": self.ctypes.data})


class Cupy:
    """What kernels.py asks of cupy, over the emulation."""

    def __init__(self, library):
        self._library = library

    def RawModule(self, **_):  # noqa: N802
        return self

    def asarray(self, value):
        return np.asarray(value)

    def zeros(self, shape, dtype):
        return np.zeros(shape, dtype)

    def get_function(self, name):
        def launch(grid, block, arguments):
            threads = block[0] if name.startswith("combine") else THREADS
            types = {
                np.float64: ctypes.c_double,
                np.uint32: ctypes.c_uint32,
                np.int64: ctypes.c_int64,
                np.uintp: ctypes.c_void_p,
            }
            given = [
                types[type(a)](a.item()) if type(a) in types else ctypes.c_void_p(a.ctypes.data) for a in arguments
            ]
            for number, thread in itertools.product(range(grid[0]), range(threads)):
                self._library.allred_emulate(number, thread, threads)
                getattr(self._library, name)(*given)

        return launch


@pytest.fixture
def fuse(library):
    return kernels.Kernels(Cupy(library))


def pack(fuse, parts, name, buffer, moved, factor):
    fuse.pack(fuse.table(parts, buffer.itemsize), name, buffer, moved, factor)


def unpack(fuse, buffer, parts, name, moved, divisor, flags=None):
    fuse.unpack(buffer, fuse.table(parts, buffer.itemsize), name, moved, divisor, flags)


def tensors(dtype, offset=0):
    """Of COUNTS elements each, starting `offset` elements into memory that is aligned to 64 bytes."""
    made = []
    for seed, count in enumerate(COUNTS):
        memory = np.zeros(count + 64, dtype)
        first = -memory.ctypes.data % 64 // memory.itemsize + offset
        part = memory[first : first + count].view(Array)
        part[:] = np.random.default_rng(seed).normal(size=count).astype(dtype)
        made.append(part)
    return made


def bits(array):
    return np.asarray(array).view(f"u{array.itemsize}")


def packed(parts, buffer):
    begin = kernels.aligned_offsets([part.size for part in parts], buffer.itemsize)
    return [buffer[start : start + part.size] for start, part in zip(begin, parts, strict=False)]


def buffer_for(dtype):
    size = kernels.aligned_offsets(COUNTS, np.dtype(dtype).itemsize)[-1]
    memory = np.zeros(size + 64, dtype)
    first = -memory.ctypes.data % 64 // memory.itemsize
    return memory[first : first + size].view(Array)


@pytest.mark.parametrize("offset", [0, 1, 4])
@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32, np.float64])
def test_copies(fuse, dtype, offset):
    parts, back = tensors(dtype, offset), tensors(dtype, offset)
    buffer = buffer_for(dtype)
    name = np.dtype(dtype).name
    pack(fuse, parts, name, buffer, name, None)
    for part, there in zip(parts, packed(parts, buffer), strict=True):
        np.testing.assert_array_equal(bits(there), bits(part))
    for part in back:
        part[:] = 0
    unpack(fuse, buffer, back, name, name, None)
    for part, other in zip(parts, back, strict=True):
        np.testing.assert_array_equal(bits(other), bits(part))


MOVED = {  # dtypes of the buffer, by the dtype of the tensors
    "float16": ["float32"],
    "bfloat16": ["float32"],
    "float32": ["float32", "float16", "bfloat16"],
    "float64": ["float64", "float16", "bfloat16"],
}
PAIRS = [(held, moved) for held, many in MOVED.items() for moved in many]


def held_as(parts, name):
    """bfloat16 as uint16, as in cupy."""
    return [part.view(np.uint16) if name == "bfloat16" else part for part in parts]


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize(("name", "moved"), PAIRS)
def test_scaled_by_factor_and_divisor(fuse, name, moved, offset):
    """The results are numpy's, bit for bit. The arithmetic is in the wider one of the two dtypes."""
    wide = np.float64 if name == "float64" else np.float32
    parts = tensors(NAMES[name], offset)
    held = held_as(parts, name)
    expected = [
        (np.asarray(part).astype(wide) * wide(0.7)).astype(np.promote_types(wide, np.float32)) for part in parts
    ]
    expected = [part.astype(np.float32) if moved in ("float16", "bfloat16") else part for part in expected]
    expected = [part.astype(NAMES[moved]) for part in expected]
    buffer = buffer_for(NAMES[moved])
    raw = held_as([buffer], moved)[0]
    pack(fuse, held, name, raw, moved, 0.7)
    for there, part in zip(packed(parts, buffer), expected, strict=True):
        np.testing.assert_array_equal(bits(there), bits(part))
    unpack(fuse, raw, held, name, moved, 3.0)
    for part, numbers in zip(parts, expected, strict=True):
        np.testing.assert_array_equal(bits(part), bits((numbers.astype(wide) / wide(3)).astype(NAMES[name])))


def test_a_factor_of_zero_makes_zeros_of_anything(fuse):
    for name, moved in PAIRS:
        parts = tensors(NAMES[name])
        for part in parts:
            part[:] = np.nan
        buffer = buffer_for(NAMES[moved])
        buffer[:] = 5
        pack(fuse, held_as(parts, name), name, held_as([buffer], moved)[0], moved, 0.0)
        assert not any(np.asarray(there).any() for there in packed(parts, buffer))


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize(("name", "moved"), [*PAIRS, ("float16", "float16"), ("bfloat16", "bfloat16")])
def test_results_that_are_not_finite_are_not_written(fuse, name, moved, offset):
    """Each tensor has a flag. A sum that is finite may exceed the dtype of the tensor."""
    numbers = tensors(NAMES[name], offset)
    buffer = buffer_for(NAMES[moved])
    for there, part in zip(packed(numbers, buffer), numbers, strict=True):
        there[:] = part.astype(NAMES[moved])
    raw, flags = held_as([buffer], moved)[0], np.zeros(len(COUNTS), np.uint32).view(Array)
    parts = [part * 0 + 7 for part in numbers]
    unpack(fuse, raw, held_as(parts, name), name, moved, None, flags)
    assert not flags.any()
    for part, there in zip(parts, packed(numbers, buffer), strict=True):
        np.testing.assert_array_equal(bits(part), bits(there.astype(NAMES[name])))
    third, fifth = packed(parts, buffer)[2], packed(parts, buffer)[4]
    third[[0, 8191]], fifth[9000] = [np.nan, -np.inf], np.inf
    if (name, moved) == ("float16", "float32"):
        fifth[9000] = 65520
    before = [part * 0 + 7 for part in numbers]
    parts = [part.copy() for part in before]
    unpack(fuse, raw, held_as(parts, name), name, moved, 2.0 if moved == "float64" else None, flags)
    assert flags.tolist() == [0, 0, 1, 0, 1, 0]
    kept = [np.flatnonzero(part == 7).tolist() for part in parts]
    assert kept == [[], [], [0, 8191], [], [9000], []]


@pytest.mark.parametrize("count", [1, 8, 1003, 8 * 256 + 9])
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_combine(fuse, name, offset, count):
    """In float32, in the order of the ranks, rounded once; also into the array of this rank."""
    dtype, stride = NAMES[name], -(-count // 8) * 8
    whole = np.zeros(3 * stride + 64, dtype).view(Array)
    rows = whole[-whole.ctypes.data % 64 // 2 :][: 3 * stride]
    rows[:] = (100 * np.random.default_rng(0).normal(size=3 * stride)).astype(dtype)
    place = np.zeros(count + 64, dtype).view(Array)
    own = place[-place.ctypes.data % 64 // 2 + offset :][:count]
    values = [np.asarray(rows[rank * stride :][:count]).astype(np.float32) for rank in range(3)]
    values[1] = np.linspace(-3, 3, count, dtype=dtype).astype(np.float32)
    for multiplies, divisor in ((False, 1.0), (False, 3.0), (True, 1.0)):
        own[:] = values[1].astype(dtype)
        pointers = held_as([rows, own], name)
        fuse.combine(name, pointers[0], 3, 1, pointers[1], pointers[1], multiplies, divisor)
        with np.errstate(over="ignore"):
            total = values[0] * values[1] * values[2] if multiplies else values[0] + values[1] + values[2]
            expected = (total / np.float32(divisor)).astype(dtype)
        np.testing.assert_array_equal(bits(own), bits(expected))
    assert not place[: -place.ctypes.data % 64 // 2 + offset].any()


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_every_16_bit_number_there_and_back(fuse, name):
    """All 65536, with infinities, subnormals and NaN; and numbers between two of them."""
    dtype = NAMES[name]
    every = np.arange(2**16, dtype=np.uint16).view(Array)
    buffer = np.zeros(2**16, np.float32).view(Array)
    pack(fuse, [every], name, buffer, "float32", 1.0)
    expected = np.asarray(every).view(dtype).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(buffer), expected)
    with np.errstate(all="ignore"):
        next_one = np.roll(expected, -1)
        between = [expected * np.float32(0.5) + next_one * np.float32(part) for part in (0.499, 0.5, 0.501)]
    for numbers in (expected, *between):
        buffer[:] = numbers
        with np.errstate(all="ignore"):
            rounded = numbers.astype(dtype)
        unpack(fuse, buffer, [every], name, "float32", 1.0)
        got = np.asarray(every).view(dtype)
        np.testing.assert_array_equal(np.isnan(got), np.isnan(rounded))
        numbers_there = ~np.isnan(rounded)
        np.testing.assert_array_equal(bits(got)[numbers_there], bits(rounded)[numbers_there])


@pytest.mark.parametrize(("dtype", "limit"), [(np.float16, 0x7BFF), (np.float32, 0x7F7FFFFF), (np.float64, 0x7FEFFFFF)])
def test_exceeds(fuse, dtype, limit):
    parts = tensors(dtype)
    assert not fuse.exceeds(parts, np.dtype(dtype).itemsize, limit).any()
    for bad in (np.nan, -np.inf):
        parts[4][-1] = bad
        assert fuse.exceeds(parts, np.dtype(dtype).itemsize, limit).any()


@pytest.mark.parametrize("name", NAMES)
def test_squares(fuse, name):
    """In float64: float32's own would overflow, and lose what is small."""
    dtype, parts = NAMES[name], tensors(np.float32, 1)
    parts = [(np.asarray(part) / 20 * (1e30 if name in ("float32", "float64") else 1)).astype(dtype) for part in parts]
    exact = sum(float(np.square(part.astype(np.float64)).sum()) for part in parts)
    held = [(part.view(np.uint16) if name == "bfloat16" else part).view(Array) for part in parts]
    assert fuse.squares(held, name) == pytest.approx(exact, rel=1e-12)
    assert exact > 0


def test_tables_are_kept_for_tensors_that_stay(fuse):
    parts, buffer = tensors(np.float32), buffer_for(np.float32)
    for _ in range(3):
        pack(fuse, parts, "float32", buffer, "float32", None)
    assert len(fuse._tables) == 1
    pieces, tiles = kernels.pieces_and_tiles([64, 128], [0, 8], [kernels.TILE + 1, 2])
    assert pieces.tolist() == [[64, 0, kernels.TILE + 1], [128, 8, 2]]
    assert tiles.tolist() == [[0, 0], [0, 1], [1, 0]]
