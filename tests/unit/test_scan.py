"""The kernels that look through tensors: C and numpy give the same answers, and the right ones."""

import zlib

import ml_dtypes
import numpy as np
import pytest

from allred import arrays, native
from allred.native import twins

KERNELS = [
    pytest.param(twins, id="numpy"),
    pytest.param(native, id="C", marks=pytest.mark.skipif(not native.available, reason=native.reason)),
]
EXCEEDS = [pytest.param(twins.exceeds, id="numpy")] + [
    pytest.param(lambda *of, variant=variant: native.exceeds(*of, variant), id=variant) for variant in native.variants
]
INFINITY = {"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F800000, "float64": 0x7FF00000}


def formula(data):
    """The hash as csrc/scan.h has it, in Python's own numbers."""
    words = [int.from_bytes(data[i : i + 4], "little") for i in range(0, len(data), 4)]
    words += [0] * (len(words) % 2)
    total = len(data) * 0xC2B2AE3D27D4EB4F
    for j, (a, b) in enumerate(zip(words[::2], words[1::2], strict=True)):
        total += (a + j * 0x9E3779B1) % 2**32 * ((b + j * 0x85EBCA77) % 2**32) + a + 2**32 * b
    return total % 2**64


@pytest.mark.parametrize("kernels", KERNELS)
def test_the_hash_is_its_formula(kernels):
    rng = np.random.default_rng(0)
    memory = np.frombuffer(rng.bytes(5000), np.uint8)
    for length in [*range(40), 1009, 4999]:
        for start in (0, 1):
            assert kernels.hashes([memory[start : start + length]]) == [
                formula(memory[start : start + length].tobytes())
            ]
    assert kernels.hashes([]) == []
    assert kernels.hashes([memory[:3], memory[3:5]]) == [formula(memory[:3].tobytes()), formula(memory[3:5].tobytes())]


@pytest.mark.skipif(not native.available, reason=native.reason)
def test_the_crc_is_that_of_zlib():
    memory = np.random.default_rng(2).bytes(5000)
    for length in [*range(200), 1023, 1024, 1040, 4999]:
        for start in (0, 1, 7):
            part = memory[start : start + length]
            for value in (0, 1, 0xFFFFFFFF, 0x12345678):
                assert native.crc32(part, value) == zlib.crc32(part, value), (length, start, value)
    assert native.crc32(b"") == 0
    assert native.crc32(memory[1234:], native.crc32(memory[:1234])) == zlib.crc32(memory)


@pytest.mark.skipif(not native.available, reason=native.reason)
@pytest.mark.parametrize("nbytes", [2**20 - 4, 2**20, 2**20 + 12, 3 * 2**20 + 5])
def test_long_memory_has_one_hash(nbytes):
    memory = np.frombuffer(np.random.default_rng(1).bytes(nbytes), np.uint8)
    assert native.hashes([memory]) == twins.hashes([memory])


@pytest.mark.parametrize("kernels", KERNELS)
def test_what_differs_has_another_hash(kernels):
    """One bit anywhere, zeros more or less, two elements that changed places."""
    values = np.zeros(300, np.float32)
    values[1::7] = 1.0
    variants = [values, values[:-1], np.append(values, np.float32(0)), -values, np.roll(values, 1), np.roll(values, 2)]
    for element in range(300):
        for bit in (0, 22, 31):
            other = values.copy()
            other.view(np.uint32)[element] ^= 1 << bit
            variants.append(other)
    hashes = kernels.hashes(variants)
    assert len(set(hashes)) == len(hashes)


@pytest.mark.parametrize("exceeds", EXCEEDS)
@pytest.mark.parametrize("dtype", INFINITY)
@pytest.mark.parametrize("count", [0, 1, 31, 1024, 2500])
def test_an_element_that_is_not_finite_is_found_wherever_it_is(exceeds, dtype, count):
    values = np.full(count, -ml_dtypes.finfo(dtype).max, dtype)
    values[::2] = 0
    element_bytes, limit = values.itemsize, INFINITY[dtype] - 1
    assert not exceeds([arrays.as_buffer(values)] * 2, element_bytes, limit)
    for where in {place for place in (0, 1, count // 2, count - 1) if 0 <= place < count}:
        for bad in (np.nan, np.inf, -np.inf):
            with_it = values.copy()
            with_it[where] = bad
            assert exceeds([arrays.as_buffer(values), arrays.as_buffer(with_it)], element_bytes, limit)


@pytest.mark.parametrize("exceeds", EXCEEDS)
def test_the_limit_is_the_last_that_passes(exceeds):
    for dtype, value, bits in ((np.float16, 1.5, 0x3E00), (np.float32, 1.5, 0x3FC00000), (np.float64, 1.5, 0x3FF80000)):
        for sign in (1, -1):
            values = np.full(70, sign * value, dtype)
            assert not exceeds([values], values.itemsize, bits)
            assert exceeds([values], values.itemsize, bits - 1)


@pytest.mark.parametrize("exceeds", EXCEEDS)
def test_memory_in_fortrans_order_or_misaligned_is_looked_through(exceeds):
    memory = np.zeros(4 * 60 + 1, np.uint8)
    values = memory[1:].view(np.float32).reshape(6, 10)
    values[5, 9] = np.nan
    for array in (values, values.T, np.array(np.nan, np.float32)):
        assert exceeds([array], 4, INFINITY["float32"] - 1)


@pytest.mark.parametrize("kernels", KERNELS)
def test_what_the_kernels_refuse(kernels):
    with pytest.raises(ValueError, match="elements must have 2, 4 or 8 bytes, got 3"):
        kernels.exceeds([np.zeros(3)], 3, 1)
    for element_bytes, limit in ((2, 2**15), (4, 2**31)):
        with pytest.raises(ValueError, match=f"the limit {limit} has the sign's bit or more"):
            kernels.exceeds([np.zeros(4)], element_bytes, limit)


@pytest.mark.skipif(not native.available, reason=native.reason)
def test_c_refuses_what_is_not_contiguous():
    for call in (native.hashes, lambda tensors: native.exceeds(tensors, 8, 1)):
        with pytest.raises((BufferError, ValueError), match=r"(?i)contiguous"):
            call([np.zeros((4, 4))[:, ::2]])
        with pytest.raises(TypeError, match="list of contiguous buffers"):
            call((np.zeros(1),))
