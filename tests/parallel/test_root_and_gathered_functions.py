"""reduce, gather, scatter, argmax, argmin, cumsum, statistics, allreduce_with and SharedCounter, on every backend."""

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import allred
from allred import world
from allred.errors import InputError, MismatchError

pytestmark = pytest.mark.mpi
SHAPES = [(), (0,), (3,), (2, 3), (2, 0)]
DTYPES = [np.float32, np.float64, np.int64, np.uint16, np.complex64, ml_dtypes.bfloat16]


@pytest.fixture(autouse=True)
def everywhere(comm, monkeypatch):
    monkeypatch.setattr(world.current(), "communicator", comm)


def of(rank, shape, dtype=np.float64):
    return ((np.arange(np.prod(shape, dtype=int)) + 3 * rank) % 5).reshape(shape).astype(dtype)


def layouts(array):
    """The same values: as they are, with other strides, read-only, as a list."""
    locked = array.copy()
    locked.flags.writeable = False
    wide = np.repeat(array[..., None], 2, axis=-1)[..., 0]
    return [array, wide, locked, *([array.tolist()] if array.dtype == np.float64 and array.size else [])]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_reduce(rank, size, shape, dtype):
    for root in range(size):
        for value in layouts(of(rank, shape, dtype)):
            got = allred.reduce(value, allred.Sum, root)
            assert (got is None) == (rank != root)
            if got is not None:
                assert (got.shape, got.dtype) == (shape, np.dtype(dtype))
                np.testing.assert_array_equal(got, sum(of(r, shape, dtype) for r in range(size)))
    mean = allred.reduce(of(rank, (4,)))
    assert mean is None or np.allclose(mean, np.mean([of(r, (4,)) for r in range(size)], axis=0))


@pytest.mark.parametrize("dtype", [*DTYPES, "M8[s]", "S3", np.longdouble])
@pytest.mark.parametrize("rest", [(), (3,), (0,)], ids=str)
def test_gather_and_scatter_of_uneven_rows(rank, size, rest, dtype):
    everything = [of(r, (r % 3, *rest), np.int64).astype(dtype) for r in range(size)]  # none on rank 0
    for root in range(size):
        got = allred.gather(everything[rank], root)
        assert (got is None) == (rank != root)
        if got is not None:
            np.testing.assert_array_equal(got, np.concatenate(everything))
        for value in layouts(np.concatenate(everything)):
            splits = [r % 3 for r in range(size)]
            part = allred.scatter(value if rank == root else None, splits if rank == root else None, root)
            np.testing.assert_array_equal(part, everything[rank])
            assert part.dtype == np.asarray(value).dtype
    same = allred.scatter(np.arange(2 * size) if rank == 0 else "ignored")
    assert same.tolist() == [2 * rank, 2 * rank + 1]
    numbers = allred.gather(float(rank))
    assert numbers is None or numbers.tolist() == list(range(size))


@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.uint64, ml_dtypes.bfloat16, np.bool_])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_argmax_and_argmin(rank, size, shape, dtype):
    everything = np.stack([of(r, shape).astype(dtype) for r in range(size)])
    for function, oracle in ((allred.argmax, np.argmax), (allred.argmin, np.argmin)):
        values, ranks = function(everything[rank])
        expected = oracle(everything, axis=0)  # of equal values the first
        np.testing.assert_array_equal(ranks, expected)
        assert (values.shape, values.dtype, ranks.dtype) == (shape, np.dtype(dtype), np.int64)
        np.testing.assert_array_equal(values, np.take_along_axis(everything, expected[None], 0)[0])


def test_a_nan_is_found_by_argmax_and_argmin(rank, size):
    for function in (allred.argmax, allred.argmin):
        value, where = function([np.nan if rank == size - 1 else float(rank), 1.0])
        assert (np.isnan(value[0]), where.tolist()) == (True, [size - 1, 0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cumsum(rank, size, shape, dtype):
    everything = [of(r, shape, dtype) for r in range(size)]
    for value in layouts(everything[rank]):
        got, before = allred.cumsum(value), allred.cumsum(value, exclusive=True)
        assert got.dtype == before.dtype == dtype
        np.testing.assert_array_equal(got, sum(everything[: rank + 1]))
        np.testing.assert_array_equal(before, sum(everything[:rank], np.zeros(shape, dtype)))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, np.bool_, np.float16])
@pytest.mark.parametrize("rest", [(), (3,), (0,), (2, 2)], ids=str)
@pytest.mark.parametrize("empty", ["none", "first", "all but last", "all"])
def test_statistics(rank, size, rest, dtype, empty):
    def samples(r):
        without = {"none": False, "first": r == 0, "all but last": r < size - 1, "all": True}[empty]
        count = 0 if without else 3 + 4 * r
        return (np.random.default_rng(r).normal(size=(count, *rest)) * 3 + 100).astype(dtype)

    got, all_samples = allred.statistics(samples(rank)), np.concatenate([samples(r) for r in range(size)])
    assert got.count == len(all_samples)
    found = got.mean, got.std, got.min, got.max
    if not got.count:
        assert all(np.isnan(value).all() and value.shape == rest for value in found)
        return
    wide = all_samples.astype(np.float64)
    for value, expected in zip(found, (wide.mean(0), wide.std(0), wide.min(0), wide.max(0)), strict=True):
        assert np.shape(value) == rest
        np.testing.assert_allclose(value, expected, rtol=1e-12, atol=1e-9)


def test_statistics_of_numbers_and_of_numbers_far_from_zero(rank, size):
    assert allred.statistics(float(rank)).mean == (size - 1) / 2
    got = allred.statistics(1e9 + np.arange(4) + 4 * rank)
    np.testing.assert_allclose(got.std, np.arange(4 * size).std(), rtol=1e-12)
    assert np.isnan(allred.statistics([np.nan if rank == 0 else 1.0]).mean)


def test_statistics_of_infinity_and_of_an_empty_list_beside_integers(rank, size):
    assert allred.statistics([np.inf, 1.0]).mean == np.inf
    assert np.isnan(allred.statistics([np.inf, -np.inf]).mean)
    assert allred.statistics([3, 5] if rank == 0 else []).mean == 4  # an empty list is float64
    with pytest.raises(InputError, match=r"allgather .*name=array.* must be a string"):
        allred.allgather(np.ones(3), np.ones(3))


def test_a_function_of_two_arrays(rank, size):
    def last_and_sum(a, b):  # neither commutative nor symmetric
        return np.array([b[0], a[1] + b[1]])

    assert allred.allreduce_with([rank, 1.0], last_and_sum).tolist() == [size - 1, size]
    merged = allred.allreduce_with(np.array([1 << rank]), np.bitwise_or)
    assert merged.tolist() == [2**size - 1]
    own = np.full(3, float(rank))
    first = allred.allreduce_with(own, lambda a, b: a)
    assert first.tolist() == [0.0] * 3
    assert not np.shares_memory(first, own)
    if size > 1:
        with pytest.raises(ZeroDivisionError):
            allred.allreduce_with(1.0, lambda a, b: 1 // 0)
        with pytest.raises(
            InputError, match=r"<lambda> returned float64 \(2,\); expected float64 \(\), as its arguments"
        ):
            allred.allreduce_with(1.0, lambda a, b: np.ones(2))
    with pytest.raises(InputError, match="function=3 is not a function of two arrays"):
        allred.allreduce_with(1.0, 3 if rank == size - 1 else np.add)
    assert allred.allreduce(1.0, allred.Sum) == size


def test_operators_of_mpi4py(rank, size):
    x = np.arange(3.0) + rank
    for theirs, own in (
        (MPI.SUM, allred.Sum),
        (MPI.MAX, allred.Max),
        (MPI.MIN, allred.Min),
        (MPI.PROD, allred.Product),
    ):
        expected = allred.allreduce(x, own).tolist()
        assert allred.allreduce(x, theirs if rank else own).tolist() == expected  # also beside ranks that use ours
        assert allred.allreduce_(x.copy(), theirs).tolist() == expected
        assert allred.allreduce_async(x, theirs).wait().tolist() == expected
        assert allred.grouped_allreduce([x], theirs)[0].tolist() == expected
        reduced = allred.reduce(x, theirs)
        assert reduced is None or reduced.tolist() == expected
    assert allred.reducescatter(np.ones(size), MPI.SUM).tolist() == [size]
    for other in (MPI.MAXLOC, MPI.LAND, np.add):
        with pytest.raises(InputError, match=r"is not a reduction; .* for MPI.MAXLOC and MINLOC allred.argmax"):
            allred.allreduce(x, other)
    with pytest.raises(InputError, match=r"the second argument is op, and not an array for the result"):
        allred.allreduce(x, np.empty_like(x))


def test_mistakes_are_the_same_error_on_all_ranks(rank, size):
    for call, words in (
        (lambda: allred.reduce(1.0, root=size), rf"reduce: root={size} is not a rank"),
        (lambda: allred.reduce(1, root=0), "reduce: Average of int64 is not defined"),
        (lambda: allred.gather(1.0, root="chief"), "gather: root='chief' is not a rank"),
        (lambda: allred.gather([object()]), r"gather: .*expected an array or a number|has no bytes"),
        (
            lambda: allred.scatter(np.arange(size + 1), [1] * size),
            r"scatter: .*splits=.* that add up to 3 rows|scatter: .*add up to \d rows",
        ),
        (lambda: allred.argmax(1j), "argmax: the order of complex128 is not defined"),
        (lambda: allred.cumsum(True), "cumsum: the sum of bool is not defined"),
        (lambda: allred.statistics([1j]), "statistics: the order of complex128 is not defined"),
        (lambda: allred.statistics(["a"]), "statistics: dtype <U1 cannot be reduced"),
    ):
        with pytest.raises(InputError, match=words):
            call()
    if size > 1:
        with pytest.raises(MismatchError, match=r"gather\(root=0\) float64 \(any, 2\) on rank 0; .*\(any, 3\) on rank"):
            allred.gather(np.ones((1, 3 if rank else 2)))
        with pytest.raises(MismatchError, match=r"cumsum\(exclusive\) .* on rank 0; cumsum\(\) "):
            allred.cumsum(1, exclusive=rank == 0)
        with pytest.raises(MismatchError, match=r"gather\(root=0\).* on rank 0; gather\(root=1\)"):
            allred.gather(1.0, root=min(rank, 1))


def test_counter(rank, size):
    counter, mine = allred.SharedCounter("items"), []
    start = allred.broadcast_object(counter.value)
    allred.barrier()
    while (item := counter.add(1) - start) < 20:
        mine.append(item)
    everything = sorted(item for items in allred.allgather_object(mine) for item in items)
    assert everything == list(range(20))
    assert counter.value == start + 20 + size
    for bad in (1.5, "1", None):
        with pytest.raises(InputError, match=r"SharedCounter\('items'\).add\(.*\): expected a whole number"):
            counter.add(bad)
    with pytest.raises(InputError, match="the name must be text of at most"):
        allred.SharedCounter(3)
