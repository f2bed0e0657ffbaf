"""Every variant of the C reductions against their numpy twin, and both against what numpy and ml_dtypes compute."""

import functools
import itertools
import sys

import ml_dtypes  # registers bfloat16 with numpy
import numpy as np
import pytest
from test_native import _runs_during

from allred import arrays, native
from allred.comm.ops import CODES, ReduceOp, refusal
from allred.native import twins

VARIANTS = native.variants or [pytest.param("", marks=pytest.mark.skip(reason=native.reason))]
REDUCES = [
    pytest.param(twins.reduce, id="numpy"),
    pytest.param(native.reduce, id="C", marks=pytest.mark.skipif(not native.available, reason=native.reason)),
]
DTYPES = [np.dtype(name) for name in arrays.DTYPES]
DEFINED = [(dtype, op) for dtype in DTYPES for op in ReduceOp if refusal(op, dtype) is None]
# One more than a block of 8, 4 and 1 bytes, and a prime, are among them.
LENGTHS = [0, 1, 7, 8, 63, 64, 257, 513, 1023, 2049, 4099]
SPECIAL = [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 1e-40, -1e-40, 3.3e38, 1e-310]
SPECIAL += [65504.0, -65504.0, 65519.0, 65520.0, 2.0**-24, 2.0**-25, 3 * 2.0**-25]
SPECIAL += [2.0**-14, 1 + 2.0**-11, 1 + 3 * 2.0**-11, 1 + 2.0**-8]


@functools.cache
def values(dtype, count, seed):
    """Ordinary values, any bit pattern, and the hard cases, in every combination over two sources."""
    rng = np.random.default_rng(seed)
    if dtype.kind == "b":
        return rng.integers(0, 2, count).astype(bool)
    result = np.frombuffer(rng.bytes(count * dtype.itemsize), dtype).copy()
    if arrays.is_inexact(dtype):
        with np.errstate(all="ignore"):
            result[1::2] = rng.normal(size=count // 2).astype(dtype)
            hard = np.array(SPECIAL).astype(dtype)
            pairs = np.array(list(itertools.product(hard, hard)), dtype)[:, seed % 2]
        result[: min(count, len(pairs))] = pairs[:count]
    return result


def bits(array, dtype):
    """What must be equal: all bits, but one NaN is as good as another."""
    array = array.view(dtype).copy()
    if arrays.is_inexact(dtype):
        with np.errstate(invalid="ignore"):  # ml_dtypes compares
            array[np.isnan(array)] = np.nan
    return array.tobytes()


def run(reduce, dtype, op, sources, variant="", alias=None, misaligned=0, divisor=None):
    """The reduction of copies that start `misaligned` bytes into their memory; nothing else may be written."""
    size = sources[0].nbytes
    memories = [np.full(size + 72, 0xAB, np.uint8) for _ in range(len(sources) + 1)]
    places = [memory[misaligned : misaligned + size] for memory in memories]
    for place, source in zip(places, sources, strict=False):
        place[:] = source.view(np.uint8)
    out = places[-1] if alias is None else places[alias]
    reduce(places[:-1], out, arrays.dtype_code(dtype), CODES[op], divisor or len(sources), variant)
    for memory in memories:
        assert (memory[:misaligned] == 0xAB).all()
        assert (memory[misaligned + size :] == 0xAB).all()
    for i, (place, source) in enumerate(zip(places, sources, strict=False)):
        assert i == alias or place.tobytes() == source.tobytes()
    return out


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("dtype", "op"), DEFINED, ids=str)
def test_c_gives_the_bits_of_its_twin(variant, dtype, op):
    for count, length in itertools.product([1, 2, 3, 5], LENGTHS):
        sources = [values(dtype, length, seed) for seed in range(count)]
        expected = bits(run(twins.reduce, dtype, op, sources), dtype)
        for alias, misaligned in zip([None, None, *range(count)], itertools.cycle([0, 1, 4, 33]), strict=False):
            found = run(native.reduce, dtype, op, sources, variant, alias, misaligned)
            assert bits(found, dtype) == expected, (count, length, alias, misaligned)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if arrays.is_inexact(dtype)], ids=str)
@pytest.mark.parametrize("divisor", [1, 2, 3, 7, 1024, 1025, 2**24 - 1, 2**24])
def test_an_average_is_a_division_by_any_divisor(variant, dtype, divisor):
    sources = [values(dtype, 1023, seed) for seed in range(2)]
    found = run(native.reduce, dtype, ReduceOp.AVERAGE, sources, variant, divisor=divisor)
    twin = run(twins.reduce, dtype, ReduceOp.AVERAGE, sources, divisor=divisor)
    with np.errstate(all="ignore"):
        wide = arrays.view_as_real(np.add(*(source.astype(arrays.accumulator(dtype)) for source in sources)))
        expected = (wide / wide.dtype.type(divisor)).astype(arrays.view_as_real(sources[0]).dtype)
    assert bits(found, dtype) == bits(twin, dtype) == bits(expected, dtype)


@pytest.mark.parametrize("reduce_variant", [(twins.reduce, ""), *((native.reduce, name) for name in native.variants)])
@pytest.mark.parametrize("dtype", [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)], ids=str)
def test_halves_are_widened_exactly_and_rounded_once_to_nearest_even(reduce_variant, dtype):
    """All 2**16 patterns alone; and each plus half a unit in its last place, a little less and a little more."""
    reduce, variant = reduce_variant
    every = np.arange(2**16, dtype=np.uint16).view(dtype)
    assert bits(run(reduce, dtype, ReduceOp.SUM, [every], variant), dtype) == bits(every, dtype)
    with np.errstate(all="ignore"):
        wide = every.astype(np.float32)
        half = (every.view(np.uint16) + np.uint16(1)).view(dtype).astype(np.float32) / 2 - wide / 2
        for fraction in [half, half * np.float32(0.99), half * np.float32(1.01)]:
            other = fraction.astype(dtype)
            found = run(reduce, dtype, ReduceOp.SUM, [every, other], variant)
            assert bits(found, dtype) == bits((wide + other.astype(np.float32)).astype(dtype), dtype)


@pytest.mark.parametrize("reduce", REDUCES)
def test_closed_forms(reduce):
    def of(dtype, op, *sources):
        return run(reduce, np.dtype(dtype), op, [np.array(s, dtype) for s in sources]).view(dtype).tolist()

    assert of("int8", ReduceOp.SUM, [127, -128], [1, -1]) == [-128, 127]
    assert of("int32", ReduceOp.PRODUCT, [2**31 - 1], [2], [3]) == [-6]
    assert of("uint8", ReduceOp.MAX, [200], [100]) == [200]
    assert of("int8", ReduceOp.MAX, [-56], [100]) == [100]
    for bits in (16, 32, 64):
        assert of(f"uint{bits}", ReduceOp.MIN, [2**bits - 1, 7], [1, 2**bits - 1]) == [1, 7]
        assert of(f"uint{bits}", ReduceOp.SUM, [2**bits - 1], [2]) == [1]
    for dtype in ("complex64", "complex128"):
        assert of(dtype, ReduceOp.PRODUCT, [1 + 2j], [3 - 1j], [1j]) == [-5 + 5j]
        assert of(dtype, ReduceOp.AVERAGE, [1 + 2j], [3 - 1j]) == [2 + 0.5j]
    assert of("bool", ReduceOp.MAX, [False, True], [False, False]) == [False, True]
    assert of("bool", ReduceOp.PRODUCT, [True, True], [False, True]) == [False, True]
    assert of("float64", ReduceOp.AVERAGE, [1.0], [2.0], [4.0]) == [7 / 3]
    assert of("float16", ReduceOp.SUM, [2048.0], [1.0], [1.0]) == [2050.0]  # two roundings would leave 2048
    assert of("float16", ReduceOp.SUM, [65504.0], [16.0]) == [np.inf]
    for dtype, op in itertools.product(["float16", "bfloat16", "float32", "float64"], [ReduceOp.MIN, ReduceOp.MAX]):
        assert repr(of(dtype, op, [-0.0, np.nan, 1], [-0.0, 1, np.nan])) == "[0.0, nan, nan]"


@pytest.mark.parametrize("reduce", REDUCES)
def test_what_cannot_be_reduced_is_refused_and_nothing_is_written(reduce):
    out, line = np.zeros(4, np.float32), np.ones(8, np.float32)
    ones, f32, total = line[:4], 8, CODES[ReduceOp.SUM]
    undefined = [(arrays.dtype_code(d), CODES[op]) for d in DTYPES for op in ReduceOp if (d, op) not in DEFINED]
    assert len(undefined) == 14
    for dtype, op in [*undefined, (f32, 0), (f32, 6), (f32, -1), (-1, total), (len(DTYPES), total)]:
        with pytest.raises(ValueError, match=f"operator {op} is not defined for dtype {dtype}"):
            reduce([ones], out, dtype, op, 1)
    for sources, target, divisor, message in [
        ([], out, 1, "there is no source to reduce"),
        ([ones, ones[:3]], out, 2, "source 1 has 12 bytes but out has 16"),
        ([ones.view(np.uint8)[:7]], out.view(np.uint8)[:7], 1, "out has 7 bytes, not a multiple of its elements' 4"),
        ([out, line[1:5]], ones, 2, "out overlaps source 1; it must be that source's memory or none of it"),
        ([ones], out, 0, r"the divisor must be from 1 to 2\*\*24, got 0"),
        ([ones], out, 2**24 + 1, r"the divisor must be from 1 to 2\*\*24, got 16777217"),
    ]:
        with pytest.raises(ValueError, match=message):
            reduce(sources, target, f32, total, divisor)
    assert (out == 0).all()
    assert (line == 1).all()


@pytest.mark.skipif(not native.available, reason=native.reason)
def test_c_refuses_unknown_variants_and_releases_the_gil():
    assert native.variants[0] == "baseline"
    with pytest.raises(ValueError, match="no kernels named 'sse9'"):
        native.reduce([np.ones(1)], np.ones(1), 9, 2, 1, "sse9")
    big, interval = np.ones(2**22), sys.getswitchinterval()
    sys.setswitchinterval(60)  # nobody is made to give the GIL away: only who releases it
    try:
        assert any(_runs_during(lambda: native.reduce([big] * 3, big, 9, 2, 1, "baseline")) for _ in range(100))
    finally:
        sys.setswitchinterval(interval)
