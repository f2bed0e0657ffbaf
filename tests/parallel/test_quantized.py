"""int8, int4 and 16-bit floats between hosts: the results bit for bit, error feedback, and what is not compressed."""

import itertools
import math

import ml_dtypes
import numpy as np
import pytest

import allred
from allred import Compression
from allred.comm.backends.tcp import window_bytes
from allred.errors import InputError

pytestmark = pytest.mark.mpi

QUANTIZED = [Compression.int8, Compression.int4]
ENCODED = [*QUANTIZED, Compression.fp16, Compression.bf16]
HALVES = {Compression.fp16: np.float16, Compression.bf16: ml_dtypes.bfloat16}
LINE, EXEMPT = 64, 65536


# ---- a model of csrc/encode.h and csrc/network_compressed.c, for one array


def decoded(numbers, compression):
    """What a run of numbers is after it was encoded and decoded."""
    if compression in HALVES:
        with np.errstate(over="ignore"):
            return numbers.astype(HALVES[compression]).astype(np.float32)
    steps, out = np.float32(127 if compression is Compression.int8 else 7), np.empty_like(numbers)
    for start in range(0, numbers.size, 256):
        block = numbers[start : start + 256]
        largest = np.abs(block).max()
        if not largest < 2.0**127:
            out[start : start + 256] = np.nan
        elif largest < 2.0**-120:
            out[start : start + 256] = 0
        else:
            out[start : start + 256] = np.rint(block * (steps / largest)) * (largest / steps)
    return out


def parts(nbytes, count):
    """Where `count` parts of so many bytes begin and end: whole lines."""
    each = math.ceil(math.ceil(nbytes / count) / LINE) * LINE
    ends = [min(each * index, nbytes) for index in range(count + 1)]
    return list(itertools.pairwise(ends))


def model(sums, hosts, compression, divisor, residuals=None):
    """Return the result of an allreduce of one array. sums: of each host, flat float32. residuals: of each host."""
    with np.errstate(all="ignore"):
        sums = [each / np.float32(divisor) for each in sums]
    result, window = np.empty_like(sums[0]), window_bytes(hosts)
    slices = min(map(len, hosts))
    with np.errstate(all="ignore"):
        for start in range(0, result.nbytes, window):
            for slice_start, slice_end in parts(min(window, result.nbytes - start), slices):
                for owner, (begin, end) in enumerate(parts(slice_end - slice_start, len(hosts))):
                    at = slice((start + slice_start + begin) // 4, (start + slice_start + end) // 4)
                    blocks = []
                    for host, numbers in enumerate(sums):
                        kept = 0 if residuals is None else residuals[host][at]
                        block = numbers[at] if host == owner else decoded(numbers[at] + kept, compression)
                        if residuals is not None and host != owner:
                            residuals[host][at] = numbers[at] + kept - block
                        blocks.append(block)
                    total = blocks[0].copy()
                    for block in blocks[1:]:
                        total += block
                    if residuals is not None:
                        total = total + residuals[owner][at]
                    result[at] = decoded(total, compression)
                    if residuals is not None:
                        residuals[owner][at] = total - result[at]
    return result


def hosts_of(comm):
    return comm.backend._hosts if comm.name == "tcp" else [list(range(comm.size))]


def data(rank, shape, dtype=np.float32, seed=0):
    rng = np.random.default_rng([rank, seed])
    return (rng.normal(size=shape) * 10.0 ** rng.integers(-3, 3)).astype(dtype)


def host_sums(comm, shape, dtype=np.float32, seed=0, weights=None):
    """In the order of the ranks of a host."""
    sums = []
    for ranks in hosts_of(comm):
        total = np.zeros(shape, np.float32)
        for index, rank in enumerate(ranks):
            one = data(rank, shape, dtype, seed).astype(np.float32)
            if weights is not None:
                one = one * np.float32(weights[rank])
            total = one if index == 0 else total + one
        sums.append(total.ravel())
    return sums


def same_on_all(comm, array):
    return len(set(comm.allgather_object(array.tobytes()).wait())) == 1


# ---- results


@pytest.mark.parametrize("compression", ENCODED)
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((300, 70), "f4"), ((1000, 1001), "f4"), ((EXEMPT + 1,), "f4"), ((130, 2, 77), "f8"), ((90, 100), "f2")],
)
def test_results_are_those_of_the_model_bit_for_bit(comm, compression, shape, dtype):
    x = data(comm.rank, shape, dtype)
    plain = comm.allreduce(x, allred.Average).wait()
    for got in (comm.allreduce(x, allred.Average, "w", compression).wait(),
                comm.allreduce_blocking(x, False, allred.Average, "w", compression)):  # fmt: skip
        assert (got.dtype, got.shape) == (x.dtype, x.shape)
        if comm.name == "tcp" and (dtype != "f2" or compression.is_quantized):
            want = model(host_sums(comm, shape, dtype), hosts_of(comm), compression, comm.size)
            np.testing.assert_array_equal(got, want.reshape(shape).astype(dtype))
        elif compression.is_quantized or dtype == "f2":  # nothing is compressed
            np.testing.assert_array_equal(got, plain)
    assert same_on_all(comm, got)
    np.testing.assert_array_equal(x, data(comm.rank, shape, dtype))


@pytest.mark.parametrize("compression", QUANTIZED)
@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
def test_a_block_that_is_not_finite_is_nan_and_others_are_not(comm, compression, special):
    x = data(comm.rank, (400, 300))
    if comm.rank == comm.size - 1:
        x[200, 100] = special
    found = comm.allreduce(x, allred.Sum, "", compression).wait()
    if comm.name == "tcp":
        assert 0 < np.isnan(found).sum() <= 256
        assert np.isnan(found[200, 100])
    assert not np.isfinite(found[200, 100])
    assert np.isfinite(found).sum() >= found.size - 256
    assert same_on_all(comm, np.isnan(found))


@pytest.mark.parametrize("compression", QUANTIZED)
def test_zeros_and_denormal_numbers(comm, compression):
    for value in (0.0, -0.0, 1e-40, 2.0**-121, 1e-30, 1e38, 3e38):
        x = np.full((100, 100), value, np.float32)
        found = comm.allreduce(x, allred.Average, "", compression).wait()
        if comm.name == "tcp":
            with np.errstate(over="ignore"):
                sums = [x.ravel() * np.float32(len(ranks)) for ranks in hosts_of(comm)]
            want = model(sums, hosts_of(comm), compression, comm.size)
            np.testing.assert_array_equal(found.ravel(), want)
        assert value > 1e37 or np.isfinite(found).all()


@pytest.mark.parametrize("compression", QUANTIZED)
def test_a_group_of_all_kinds_of_arrays(comm, compression):
    """Order, shapes and dtypes stay; 1-D arrays, integers, bools and complex numbers are as without compression."""
    kinds = [
        ((50, 60), "f4"), ((10,), "i8"), ((100,), "f4"), ((), "f4"), ((700, 80), "f8"), ((0, 5), "f4"),
        ((40, 50), "f2"), ((9, 9), "c8"), ((70_000,), "f4"), ((1, 1), "f4"), ((3, 0), "f8"),
        ((31, 33), ml_dtypes.bfloat16), ((5,), "u2"),
    ]  # fmt: skip
    for in_place in (False, True):
        group = [np.asarray(data(comm.rank, shape, np.float64) * 50).astype(dtype) for shape, dtype in kinds]
        plain = comm.grouped_allreduce([x.copy() for x in group], allred.Sum).wait()
        before = comm.sent_bytes
        found = comm.grouped_allreduce_blocking(group, in_place, allred.Sum, "g", compression)
        sent = comm.sent_bytes - before
        for got, right, x in zip(found, plain, group, strict=True):
            assert (got.dtype, got.shape) == (right.dtype, right.shape)
            assert (got is x) == in_place
            exempt = x.ndim < 2 and x.size <= EXEMPT
            if exempt or x.dtype.kind not in "fV" or comm.name != "tcp":  # V: bfloat16
                np.testing.assert_allclose(got, right, rtol=1e-5)
            elif x.size:
                a, b = got.astype(np.float64), right.astype(np.float64)
                assert np.linalg.norm(a - b) <= (0.03 if compression is Compression.int8 else 0.35) * np.linalg.norm(b)
        if comm.name == "tcp":
            assert sent < sum(x.nbytes for x in group) / (2.5 if compression is Compression.int8 else 4)


def test_bytes_that_travel(comm):
    def sent(shape, dtype, compression):
        before = comm.sent_bytes
        comm.allreduce_blocking(np.ones(shape, dtype), True, allred.Sum, "", compression)
        return comm.sent_bytes - before

    if comm.name != "tcp":
        for compression in QUANTIZED:
            assert sent((1000, 256), np.float32, compression) == sent((1000, 256), np.float32, Compression.none)
        return
    elements = 1000 * 256
    for dtype in (np.float32, np.float64, np.float16):
        assert sent((1000, 256), dtype, Compression.int8) == elements * 260 // 256
        assert sent((1000, 256), dtype, Compression.int4) == elements * 132 // 256
    assert sent((1000, 256), np.int32, Compression.int4) == 4 * elements
    assert sent((EXEMPT,), np.float32, Compression.int8) == 4 * EXEMPT
    assert sent((32, 32), np.float32, Compression.int8) == 4096  # it travels with the headers


@pytest.mark.parametrize("op", [allred.Min, allred.Max, allred.Product])
def test_only_sums_can_be_quantized(comm, op):
    x = np.ones((200, 200), np.float32)
    for call in (
        lambda: comm.allreduce_blocking(x, True, op, "", Compression.int8),
        lambda: comm.allreduce(x, op, "", Compression.int4).wait(),
        lambda: comm.grouped_allreduce_blocking([x], True, op, "", Compression.int8),
    ):
        with pytest.raises(InputError, match=r"compression=allred.Compression.int\d: use allred.Average or Sum, or no"):
            call()
    assert (x == 1).all()


# ---- error feedback


@pytest.mark.parametrize("compression", ENCODED)
@pytest.mark.parametrize("op", [allred.Sum, allred.Average])
def test_what_was_sent_and_the_residuals_are_what_was_given(comm, compression, op):
    """The residuals are those of the model bit for bit, and nothing is lost but the rounding of float32."""
    if comm.name != "tcp":
        pytest.skip("nothing is encoded")
    shape, steps = (230, 301), 12
    residual = np.zeros(shape[0] * shape[1], np.float32)
    hosts = hosts_of(comm)
    kept = [np.zeros_like(residual) for _ in hosts]
    divisor = comm.size if op is allred.Average else 1
    given, received, scale = np.zeros(shape), np.zeros(shape), 0.0
    for step in range(steps):
        sums = host_sums(comm, shape, seed=step)
        want = model(sums, hosts, compression, divisor, kept)
        found = comm.grouped_allreduce_blocking(
            [data(comm.rank, shape, seed=step)], False, op, "", compression, residual=residual
        )[0]
        np.testing.assert_array_equal(found.ravel(), want)
        given += sum(each.astype(np.float64) for each in sums).reshape(shape) / divisor
        received += found
        scale = max(scale, float(np.abs(given).max()))
    every = comm.allgather_object(residual).wait()
    for ranks, right in zip(hosts, kept, strict=True):  # each rank of a host has its own part
        np.testing.assert_array_equal(np.sum([every[rank] for rank in ranks], axis=0), right)
        assert right.any()
    lost = np.sum(kept, axis=0, dtype=np.float64)
    np.testing.assert_allclose(received.ravel() + lost, given.ravel(), atol=scale * steps * 2.0**-22)


@pytest.mark.parametrize("steps_of", [(Compression.int8, 127), (Compression.int4, 7)])
def test_sums_that_float32_can_represent_are_exact(comm, steps_of):
    """Whole numbers with a largest one that makes the scale a power of two: the sums have no rounding."""
    if comm.name != "tcp":
        pytest.skip("nothing is encoded")
    compression, largest = steps_of
    rng, shape = np.random.default_rng(comm.rank), (64, 256)
    residual, given, received = np.zeros(64 * 256, np.float32), np.zeros(shape), np.zeros(shape)
    for _ in range(10):
        x = (rng.integers(-largest * 8, largest * 8 + 1, shape) / 8).astype(np.float32)
        x[:, ::16] = 64 * largest  # in each block, wherever it begins
        given += np.sum(comm.allgather_object(x.astype(np.float64)).wait(), axis=0)
        received += comm.grouped_allreduce_blocking([x], False, allred.Sum, "", compression, residual=residual)[0]
    everywhere = np.sum([each.astype(np.float64) for each in comm.allgather_object(residual).wait()], axis=0)
    np.testing.assert_array_equal(received + everywhere.reshape(shape), given)


@pytest.mark.parametrize("compression", QUANTIZED)
def test_a_residual_stays_where_a_block_is_not_finite(comm, compression):
    if comm.name != "tcp":
        pytest.skip("nothing is encoded")
    residual, x = np.zeros(200 * 256, np.float32), data(comm.rank, (200, 256))
    comm.grouped_allreduce_blocking([x], False, allred.Sum, "", compression, residual=residual)
    before = residual.copy()
    x[:] = np.nan
    comm.grouped_allreduce_blocking([x], False, allred.Sum, "", compression, residual=residual)
    np.testing.assert_array_equal(residual, before)


def test_a_residual_that_does_not_fit_is_an_error(comm):
    if comm.size == 1 or comm.name == "mpi" or comm.name == "shm_mpi":
        pytest.skip("the backend has no fast path")
    x = np.ones((300, 300), np.float32)
    for odd in (np.zeros(300 * 300 - 1, np.float32), np.zeros(300 * 300, np.int32)):
        with pytest.raises(ValueError, match="the residual is no buffer of 90000 float32"):
            comm.grouped_allreduce_blocking([x], True, allred.Sum, "", Compression.int8, residual=odd)
    assert (comm.allreduce(x, allred.Sum).wait() == comm.size).all()
