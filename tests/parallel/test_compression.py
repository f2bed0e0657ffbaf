"""Numbers that travel as 16-bit floats: what everybody gets, what is not touched, and how many bytes travel."""

import functools
import itertools

import ml_dtypes
import numpy as np
import pytest

import allred
from allred import Compression, native, optim
from allred.errors import InputError, MismatchError, NonFiniteError

pytestmark = pytest.mark.mpi

WIRES = {Compression.fp16: np.float16, Compression.bf16: ml_dtypes.bfloat16}
OPS = {
    allred.Sum: np.add, allred.Average: np.add, allred.Min: np.minimum, allred.Max: np.maximum,
    allred.Product: np.multiply,
}  # fmt: skip
# A chunk of shared memory, of MPI and of two nodes, in 16-bit numbers, and one more; and where ranks share the work.
COUNTS = [0, 1, 1009, 2**16 + 1, 2**19 + 3]
SHAPES = [(), (5, 7), (3, 1009)]


def is_hierarchical(comm):
    """Whether the sums of (pretended) nodes are rounded, and not the numbers of each rank."""
    return comm.name in ("shm_mpi", "tcp")


@functools.cache
def constant(rank, shape, dtype, hard):
    count = int(np.prod(shape, dtype=np.int64))
    rng = np.random.default_rng([rank, count])
    values = rng.normal(size=count).astype(np.float32) * np.float32(10.0) ** rng.integers(-6, 3, count)
    if hard and count > 20:
        values[:20] = np.array([np.nan, np.inf, -np.inf, 1e-40, -0.0, 65504, 65520, 3.4e38, 6e-8, 2e-8] * 2, np.float32)
    with np.errstate(over="ignore"):
        return values.astype(dtype).reshape(shape)


def data(rank, shape, dtype, hard=False):
    return constant(rank, shape, dtype, hard).copy()


def rounded(x, wire):
    return x.astype(np.float32).astype(wire).astype(np.float32)


def reduced(parts, op):
    """In float32, in rank order."""
    total = parts[0]
    for part in parts[1:]:
        total = OPS[op](total, part)
    return total + np.float32(0) if op in (allred.Min, allred.Max) else total


def expected(comm, op, wire, shape, dtype, hard=False):
    """What a backend promises to give, bit for bit; between nodes MPI's order is free, so there it is close."""
    with np.errstate(all="ignore"):
        total = reduced([rounded(data(r, shape, dtype, hard), wire) for r in range(comm.size)], op)
        if op is allred.Average:
            total = total / np.float32(comm.size)
        if comm.name == "mpi":
            total = rounded(np.asarray(total), wire)  # as it came back
        return np.asarray(total).astype(dtype)


def check(comm, got, op, wire, shape, dtype, hard=False):
    want = expected(comm, op, wire, shape, dtype, hard)
    assert (got.dtype, got.shape) == (np.dtype(dtype), shape)
    if is_hierarchical(comm):
        scale = sum(np.abs(data(r, shape, dtype, hard).astype(np.float64)) for r in range(comm.size))
        near = np.abs(got - want) <= 4 * float(ml_dtypes.finfo(wire).eps) * scale + 2.0**-22
        assert near.all()
    else:
        np.testing.assert_array_equal(got, want)
    assert len(set(comm.allgather_object(np.nan_to_num(got, nan=3.0).tobytes()).wait())) == 1


@pytest.mark.parametrize("compression", WIRES)
@pytest.mark.parametrize("count", COUNTS)
def test_everybody_gets_the_sum_of_the_rounded_numbers(comm, compression, count):
    for dtype, op, now in [
        (np.float32, allred.Average, True), (np.float32, allred.Sum, False), (np.float64, allred.Average, True),
    ]:  # fmt: skip
        x = data(comm.rank, (count,), dtype)
        if now:
            y = comm.allreduce_blocking(x, False, op, "w", compression)
        else:
            y = comm.allreduce(x, op, "w", compression).wait()
        check(comm, y, op, WIRES[compression], (count,), dtype)
        np.testing.assert_array_equal(x, data(comm.rank, (count,), dtype))


@pytest.mark.parametrize("compression", WIRES)
@pytest.mark.parametrize("op", OPS)
def test_every_op_and_what_is_not_finite(comm, compression, op):
    if is_hierarchical(comm):
        pytest.skip("a node's sum may be finite where its parts, rounded, are not")
    for dtype, shape in itertools.product((np.float32, np.float64), SHAPES):
        x = data(comm.rank, shape, dtype, hard=True)
        assert comm.allreduce(x, op, "", compression, in_place=True).wait() is x
        check(comm, x, op, WIRES[compression], shape, dtype, hard=True)


@pytest.mark.parametrize("compression", WIRES)
@pytest.mark.parametrize("in_place", [True, False])
def test_a_group_of_all_dtypes_narrows_only_wide_floats(comm, compression, in_place):
    dtypes = ["f4", "i4", "f8", "f2", "f4", "?", ml_dtypes.bfloat16, "f8", "i8", "u4"]
    shapes = [(30_001,), (5,), (70_000,), (7,), (0, 3), (4,), (9,), (), (70_001,), (9,)]
    wire = WIRES[compression]
    for now in (True, False):
        group = [np.asarray(data(comm.rank, s, "f8") * 10).astype(d) for s, d in zip(shapes, dtypes, strict=True)]
        if now:
            results = comm.grouped_allreduce_blocking(group, in_place, allred.Max, "g", compression)
        else:
            results = comm.grouped_allreduce(group, allred.Max, "g", compression, in_place).wait()
        for got, x, s, d in zip(results, group, shapes, dtypes, strict=True):
            parts = [np.asarray(data(r, s, "f8") * 10).astype(d) for r in range(comm.size)]
            if np.dtype(d).kind == "f" and np.dtype(d).itemsize > 2:
                parts = [rounded(part, wire) for part in parts]
            want = parts[0]
            for part in parts[1:]:
                want = np.maximum(want, part)
            if is_hierarchical(comm) and np.dtype(d).itemsize > 2 and np.dtype(d).kind == "f":
                np.testing.assert_allclose(got, want, rtol=float(ml_dtypes.finfo(wire).eps))
            else:
                np.testing.assert_array_equal(got, want)
            assert (got is x) == in_place


@pytest.mark.parametrize("compression", WIRES)
def test_complex_numbers_are_never_narrowed(comm, compression):
    numbers = (np.arange(9) * 1e-9 + 1) * (1 + 1j)
    for dtype in ("c8", "c16"):
        group = [numbers.astype(dtype), np.ones(3, np.float32)]
        found, _ = comm.grouped_allreduce(group, allred.Sum, "g", compression).wait()
        assert found.tolist() == comm.allreduce(group[0], allred.Sum).wait().tolist()
        assert found.tolist() == comm.allreduce(group[0], allred.Sum, "", compression).wait().tolist()


@pytest.mark.parametrize("layout", ["strided", "fortran", "unaligned"])
def test_any_layout(comm, layout):
    shape = (300, 70)
    x = data(comm.rank, shape, np.float32)
    if layout == "strided":
        wide = np.zeros((300, 140), np.float32)
        wide[:, ::2] = x
        x = wide[:, ::2]
    elif layout == "fortran":
        x = np.asfortranarray(x)
    else:
        memory = np.frombuffer(bytearray(x.nbytes + 1), np.uint8)[1:].view(np.float32).reshape(shape)
        memory[...] = x
        x = memory
    comm.allreduce_blocking(x, True, allred.Sum, "", Compression.fp16)
    check(comm, np.ascontiguousarray(x), allred.Sum, np.float16, shape, np.float32)


def test_without_the_c_extension_it_is_the_same(comm, monkeypatch):
    if comm.name in ("shm", "shm_mpi"):
        pytest.skip("it has no other arithmetic")
    x = data(comm.rank, (10_001,), np.float32, hard=True)
    wanted = comm.allreduce(x, allred.Average, "", Compression.bf16).wait()
    for name in ("narrow", "reduce"):
        monkeypatch.setattr(native, name, getattr(native.twins, name))
    np.testing.assert_array_equal(comm.allreduce(x, allred.Average, "", Compression.bf16).wait(), wanted)


def test_half_or_a_quarter_of_the_bytes_travel(comm):
    def sent(dtype, compression):
        before = comm.sent_bytes
        comm.allreduce_blocking(np.ones(300_000, dtype), True, allred.Sum, "", compression)
        comm.allreduce(np.ones(3, dtype), allred.Sum, "", compression).wait()
        return comm.sent_bytes - before

    for compression in WIRES:
        full, half = (sent(np.float32, each) for each in (Compression.none, compression))
        if comm.name == "tcp":  # the three numbers travel with the headers, as they are
            assert (full, half) == (1_200_012, 600_012)
            continue
        assert full == 2 * half
        assert sent(np.float64, compression) == half
        assert sent(np.float64, Compression.none) == 4 * half
        assert sent(np.int32, compression) == full
        if comm.name == "shm_mpi":  # slices of each node's sum
            nodes, rest = divmod(sum(comm.allgather_object(half).wait()), 600_006)
            assert rest == 0
            assert 1 < nodes < comm.size
        else:
            assert half == 600_006 * (comm.name != "single")


def test_ranks_that_differ_raise_an_error_that_names_it(comm):
    if comm.size == 1:
        pytest.skip("one rank cannot differ")
    last = comm.rank == comm.size - 1
    one = Compression.fp16 if last else Compression.none
    other = Compression.fp16 if last else Compression.bf16
    x = np.ones(3, np.float32)
    for compression, now in itertools.product((one, other), (True, False)):
        start = comm.allreduce_blocking if now else lambda x, _, *rest: comm.allreduce(x, *rest, in_place=True).wait()
        with pytest.raises(MismatchError, match=r"allreduce\(Sum, compression=fp16\) .*'w' float32 \(3,\) on rank"):
            start(x, True, allred.Sum, "w", compression)
        with pytest.raises(MismatchError, match=r"grouped_allreduce\(Sum, compression=fp16\)"):
            comm.grouped_allreduce_blocking([x], True, allred.Sum, "w", compression)
        assert x.tolist() == [1, 1, 1]


@pytest.mark.parametrize("odd", [None, 6, "fp16", np.float16])
def test_what_is_no_compression_is_an_error_on_all(comm, odd):
    mine = odd if comm.rank == 0 else Compression.fp16
    for call in (
        lambda: comm.allreduce_blocking(np.ones(3), True, allred.Sum, "", mine),
        lambda: comm.grouped_allreduce_blocking([np.ones(3)], True, allred.Sum, "", mine),
        lambda: comm.allreduce(np.ones(3), allred.Sum, "", mine).wait(),
    ):
        with pytest.raises(
            InputError, match=r"compression=.*: expected allred.Compression.none, .fp16, .bf16, .int8, .int4"
        ):
            call()


def test_the_header_says_it():
    from allred.comm.arguments import array_descriptor

    call = array_descriptor("allreduce", np.ones(3, np.float32), "w", allred.Sum, compression=Compression.bf16)
    assert call.pack(1)[9:11] == bytes([2 | 7 << 4, 8])  # Sum as bfloat16, and float32


# ---- the public functions and the decorator


def test_the_public_functions(size):
    x = np.full(3, 1 + 2.0**-11, np.float32)
    assert allred.allreduce(x, compression=Compression.fp16).tolist() == [1, 1, 1]
    assert allred.grouped_allreduce([x], compression=Compression.fp16)[0].tolist() == [1, 1, 1]
    assert allred.grouped_allreduce_([x.copy()], compression=Compression.bf16)[0].tolist() == [1, 1, 1]
    assert allred.allreduce_(x, compression=Compression.fp16) is x
    assert x.tolist() == [1, 1, 1]


@pytest.mark.parametrize("compression", WIRES)
@pytest.mark.parametrize("samples", [None, "uneven"])
def test_the_decorator(rank, size, compression, samples):
    """Gradients that are exact in the wire type give what they give without; others what is near."""
    params = {"w": np.zeros(5000, np.float32), "b": np.zeros(3), "h": np.zeros(4, np.float16)}
    opt = allred.distributed(optim.SGD(lr=1.0), compression=compression)
    counts = [r % 2 + 1 for r in range(size)]
    opt.step(
        params, {k: np.full_like(v, rank + 1) for k, v in params.items()}, samples=counts[rank] if samples else None
    )
    weights = np.array(counts if samples else [1] * size) / (sum(counts) if samples else size)
    mean = (weights * np.arange(1, size + 1)).sum()
    for name, value in params.items():
        np.testing.assert_allclose(value, -mean, rtol=2**-7)
        assert name != "h" or not samples or (value == -np.float16(np.float32(mean))).all()
    assert len(set(allred.allgather_object(allred.digest(params)))) == 1
    if size > 1:
        assert f"as {compression.name}" in opt.summary()
        assert " a step" in opt.summary()


def test_ranks_whose_decorators_differ(rank, size):
    if size == 1:
        pytest.skip("one rank cannot differ")
    opt = allred.distributed(optim.SGD(), compression=Compression.fp16 if rank else Compression.none)
    params = [np.ones(3)]
    with pytest.raises(MismatchError, match=r"compression=none .*on rank 0; .*compression=fp16"):
        opt.step(params, [np.ones(3)])
    assert params[0].tolist() == [1, 1, 1]


def test_gradient_functions(rank):
    @allred.distributed.gradients(compression=Compression.fp16)
    def grads():
        return [np.full(3, 1 + 2.0**-11, np.float32)]

    assert grads()[0].tolist() == [1, 1, 1]
    with pytest.raises(InputError, match="compression='fp16': expected allred"):
        allred.distributed.gradients(compression="fp16")(lambda: 0)
    with pytest.raises(InputError, match="compression='fp16': expected allred"):
        allred.distributed(optim.SGD(), compression="fp16")


@pytest.mark.parametrize(("dtype", "large"), [(np.float32, 1e5), (np.float64, 1e5), (np.float64, 1e300)])
def test_finite_gradients_that_do_not_fit_the_wire_are_found(rank, size, dtype, large):
    for compression in [Compression.fp16] + [Compression.bf16] * (large > 1e38):
        params = [np.ones(4, dtype)]
        grads = [np.full(4, large if rank == size - 1 else 1.0, dtype)]
        opt = allred.distributed(optim.SGD(), compression=compression)
        words = {Compression.fp16: "float16", Compression.bf16: "bfloat16"}[compression]
        with pytest.raises(
            NonFiniteError, match=rf"of '0' is not: it exceeds the largest number of {words}, the wire dtype"
        ):
            opt.step(params, grads)
        assert params[0].tolist() == [1] * 4
