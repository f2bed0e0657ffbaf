"""Numbers that travel narrower than they are: every variant in C against its numpy twin and ml_dtypes, bit for bit."""

import itertools

import ml_dtypes
import numpy as np
import pytest
from test_reduce import LENGTHS, REDUCES, VARIANTS, bits, values

from allred import arrays, native
from allred.comm.ops import CODES, ReduceOp
from allred.native import twins

HALVES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
WIDE = [np.dtype(np.float32), np.dtype(np.float64)]
NARROWS = [pytest.param(twins.narrow, id="numpy"), *(pytest.param(native.narrow, id="C") for _ in native.variants[:1])]
code = arrays.dtype_code


def place(nbytes, misaligned):
    """Memory that starts `misaligned` bytes into a larger one, and what must stay as it was around it."""
    whole = np.full(nbytes + 72, 0xAB, np.uint8)
    return whole[misaligned : misaligned + nbytes], (whole[:misaligned], whole[misaligned + nbytes :])


def narrowed(narrow, source, wire, variant="", misaligned=0):
    given, _ = place(source.nbytes, misaligned)
    given[:] = source.view(np.uint8)
    out, around = place(2 * source.size, misaligned)
    narrow(given, out, code(source.dtype), code(wire), variant)
    assert all((edge == 0xAB).all() for edge in around)
    return bits(out, wire)


def rounded(source, wire):
    """By numpy and ml_dtypes: a float64 is made a float32 first."""
    with np.errstate(all="ignore"):
        return bits(source.astype(np.float32).astype(wire), wire)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("wire", HALVES, ids=str)
@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_c_rounds_as_its_twin(variant, dtype, wire):
    for length, misaligned in itertools.product(LENGTHS, [0, 1, 4, 33]):
        source = values(dtype, length, seed=length)
        expected = rounded(source, wire)
        assert narrowed(twins.narrow, source, wire) == expected
        assert narrowed(native.narrow, source, wire, variant, misaligned) == expected, (length, misaligned)


@pytest.mark.parametrize("narrow_variant", [(twins.narrow, ""), *((native.narrow, name) for name in native.variants)])
@pytest.mark.parametrize("wire", HALVES, ids=str)
def test_every_pattern_is_exact_and_values_between_round_to_nearest(narrow_variant, wire):
    """All 2**16 numbers of the wire type; each with its halfway, a little below and above; and every kind of NaN."""
    narrow, variant = narrow_variant
    every = np.arange(2**16, dtype=np.uint16).view(wire)
    with np.errstate(all="ignore"):
        wide = every.astype(np.float32)
        assert narrowed(narrow, wide, wire, variant) == bits(every, wire)
        following = (every.view(np.uint16) + np.uint16(1)).view(wire).astype(np.float64)
        half = ((wide.astype(np.float64) + following) / 2).astype(np.float32)
    for step in (0, -1, 1):
        other = (half.view(np.uint32) + np.uint32(step % 2**32)).view(np.float32)
        assert narrowed(narrow, other, wire, variant) == rounded(other, wire)
    nan = (np.float32(np.nan).view(np.uint32) & np.uint32(0x7F800000)) | np.array(
        [1, 0x7FFF, 0xFFFF, 0x1FFF, 0x7FFFFF, 0x80000001, 0x807FFFFF], np.uint32
    )
    assert narrowed(narrow, nan.view(np.float32), wire, variant) == bits(np.full(7, np.nan, wire), wire)


@pytest.mark.parametrize("narrow", NARROWS)
def test_edges(narrow):
    def of(number, wire):
        out = np.zeros(1, wire)
        narrow(np.array([number], np.float32), out.view(np.uint16), code(np.dtype(np.float32)), code(out.dtype))
        return float(out[0])

    assert [of(x, np.float16) for x in (65504, 65519.99, 65520, 1e9)] == [65504, 65504, np.inf, np.inf]
    assert [of(x, np.float16) for x in (2.0**-24, 2.0**-25, 1.5 * 2.0**-25, -(2.0**-25))] == [2**-24, 0, 2**-24, -0.0]
    assert [of(x, np.float16) for x in (1 + 2**-11, 1 + 3 * 2**-11)] == [1, 1 + 2**-9]  # ties to even
    assert [of(x, ml_dtypes.bfloat16) for x in (1e-40, 3.39e38, 3.4e38)] == [
        float(ml_dtypes.bfloat16(1e-40)), float(ml_dtypes.finfo(ml_dtypes.bfloat16).max), np.inf,
    ]  # fmt: skip


def reduced(reduce, wire, dtype, op, sources, variant="", misaligned=0):
    places = [place(source.nbytes, misaligned)[0] for source in sources]
    for given, source in zip(places, sources, strict=True):
        given[:] = source.view(np.uint8)
    out, around = place(sources[0].size * dtype.itemsize, misaligned)
    reduce(places, out, code(wire), CODES[op], len(sources), variant, code(dtype))
    assert all((edge == 0xAB).all() for edge in around)
    assert all(given.tobytes() == source.tobytes() for given, source in zip(places, sources, strict=True))
    return bits(out, dtype)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("wire", HALVES, ids=str)
@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize("op", ReduceOp)
def test_c_reduces_into_wide_numbers_as_its_twin(variant, wire, dtype, op):
    for count, length in itertools.product([1, 2, 3, 5], LENGTHS):
        sources = [values(wire, length, seed) for seed in range(count)]
        expected = reduced(twins.reduce, wire, dtype, op, sources)
        for misaligned in (0, 1, 4, 33):
            found = reduced(native.reduce, wire, dtype, op, sources, variant, misaligned)
            assert found == expected, (count, length, misaligned)


@pytest.mark.parametrize("reduce", REDUCES)
def test_sums_are_float32s_and_are_not_rounded_again(reduce):
    def of(wire, dtype, op, *sources):
        found = reduced(reduce, np.dtype(wire), np.dtype(dtype), op, [np.array(s, wire) for s in sources])
        return np.frombuffer(found, dtype).tolist()

    assert of(np.float16, np.float32, ReduceOp.SUM, [2048.0], [1.0]) == [2049]
    assert of(np.float16, np.float32, ReduceOp.SUM, [65504.0], [65504.0]) == [131008]
    assert of(ml_dtypes.bfloat16, np.float32, ReduceOp.SUM, [256.0], [1.0], [1.0]) == [258]
    assert of(np.float16, np.float64, ReduceOp.AVERAGE, [1.0], [0.0], [0.0]) == [float(np.float32(1) / np.float32(3))]
    assert of(np.float16, np.float32, ReduceOp.MIN, [-0.0, np.inf], [-0.0, 1]) == [0, 1]


@pytest.mark.parametrize("reduce", REDUCES)
def test_what_does_not_travel_so_is_refused(reduce):
    f16, f32, i32, total = code(np.dtype("f2")), code(np.dtype("f4")), code(np.dtype("i4")), CODES[ReduceOp.SUM]
    halves, out = np.ones(4, np.float16), np.zeros(4, np.float32)
    for dtype, into in [(f16, i32), (f32, f16), (i32, f32)]:
        with pytest.raises(ValueError, match=f"from dtype {dtype} into dtype {into}"):
            reduce([halves], out, dtype, total, 1, "", into)
    with pytest.raises(ValueError, match="source 0 has 6 bytes but out has 16"):
        reduce([halves[:3]], out, f16, total, 1, "", f32)
    with pytest.raises(ValueError, match="out overlaps source 0"):
        reduce([out.view(np.float16)[:4]], out, f16, total, 1, "", f32)
    for narrow in (twins.narrow, native.narrow):
        with pytest.raises(ValueError, match=f"dtype {i32} does not travel as dtype {f16}"):
            narrow(np.zeros(4, np.int32), halves, i32, f16)
        with pytest.raises(ValueError, match="16 bytes cannot be rounded into 6"):
            narrow(out, halves[:3], f32, f16)
    assert (out == 0).all()
    assert (halves == 1).all()
