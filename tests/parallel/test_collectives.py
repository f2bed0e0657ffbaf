"""The contract of a communicator, the same for every backend. Expected values are closed forms of rank and size."""

import re

import ml_dtypes
import numpy as np
import pytest

import allred
from allred import nest
from allred.errors import InputError, MismatchError

FLOATS = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
COMPLEX = [np.complex64, np.complex128]
INTS = [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64]
ALL = [np.dtype(t) for t in (*FLOATS, *COMPLEX, *INTS, np.bool_)]
REDUCED = [np.dtype(t) for t in (*FLOATS, *COMPLEX, *INTS)]
CHUNK = 2**20  # bytes of a chunk of the mpi backend
SHAPES = [(), (0,), (0, 3), (1,), (7,), (2, 3), (1009,), (3, CHUNK // 8 + 5)]

pytestmark = [pytest.mark.mpi, pytest.mark.cover(2)]  # every dtype with every shape, on one of the backends


PERIOD = 5


def repeated(pattern, shape):
    """An array of this shape that repeats the pattern: much cheaper than to compute each element."""
    count = int(np.prod(shape, dtype=np.int64))
    return np.tile(pattern, -(-count // len(pattern)))[:count].reshape(shape).copy()


def data(rank, shape, dtype):
    """Small whole numbers, different on every rank and in every place: exact in all dtypes, sums too."""
    numbers = (np.arange(PERIOD) + 3 * rank) % PERIOD
    if np.dtype(dtype).kind == "c":
        numbers = numbers + 1j * ((numbers + rank) % 3)
    return repeated(numbers.astype(dtype), shape)


def expected(op, size, shape, dtype):
    dtype = np.dtype(dtype)
    wide = np.complex128 if dtype.kind == "c" else np.float64
    ranks = [data(r, (PERIOD,), wide) for r in range(size)]
    if op is allred.Average:
        parts = np.stack(ranks).view(np.float64).sum(axis=0) / size
        means = np.asarray(parts, np.float64 if dtype in (np.float64, np.complex128) else np.float32)
        return repeated(means.view(np.result_type(dtype, np.float32)).astype(dtype), shape)
    reduce = {allred.Sum: np.add, allred.Min: np.minimum, allred.Max: np.maximum, allred.Product: np.multiply}[
        op
    ].reduce
    return repeated(reduce(np.stack(ranks), axis=0).astype(dtype), shape)


def twice(function):
    """Each check runs twice: a protocol's second use is not its first."""
    for _ in range(2):
        function()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", REDUCED, ids=str)
def test_allreduce_sum(comm, dtype, shape):
    def check():
        x = data(comm.rank, shape, dtype)
        y = comm.allreduce(x, allred.Sum).wait()
        assert y.dtype == dtype
        assert y.shape == shape
        np.testing.assert_array_equal(y, expected(allred.Sum, comm.size, shape, dtype))
        np.testing.assert_array_equal(x, data(comm.rank, shape, dtype))
        assert not np.shares_memory(x, y)

    twice(check)


@pytest.mark.parametrize("op", [allred.Min, allred.Max, allred.Product])
@pytest.mark.parametrize("dtype", REDUCED, ids=str)
def test_every_op_on_every_dtype_in_place(comm, op, dtype):
    if dtype.kind == "c" and op is not allred.Product:
        with pytest.raises(
            InputError, match=f"allreduce: {op.value} of {dtype} is not defined: complex numbers have no order"
        ):
            comm.allreduce(data(comm.rank, (3,), dtype), op, in_place=True).wait()
    else:
        check_in_place(comm, op, dtype)


@pytest.mark.parametrize("dtype", FLOATS + COMPLEX)
def test_average_in_place(comm, dtype):
    check_in_place(comm, allred.Average, np.dtype(dtype))


def check_in_place(comm, op, dtype):
    def check():
        x = data(comm.rank, (1009,), dtype)
        y = comm.allreduce(x, op, in_place=True).wait()
        assert y is x
        np.testing.assert_array_equal(x, expected(op, comm.size, (1009,), dtype))

    twice(check)


def test_bool_is_any_and_all(comm):
    one = np.array([True, comm.rank == 0, False])
    np.testing.assert_array_equal(comm.allreduce(one, allred.Max).wait(), [True, True, False])
    np.testing.assert_array_equal(comm.allreduce(one, allred.Min).wait(), [True, comm.size == 1, False])
    np.testing.assert_array_equal(comm.allreduce(one, allred.Product).wait(), [True, comm.size == 1, False])


@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_and_infinity(comm, dtype):
    """A NaN on any rank, whichever, makes the element NaN; zero and infinities compare as usual."""
    last = comm.size - 1
    x = np.array([np.nan if comm.rank == last else 1, np.nan if comm.rank == 0 else 1, np.inf, -np.inf], dtype)
    for op in (allred.Min, allred.Max, allred.Sum, allred.Product, allred.Average):
        y = comm.allreduce(x, op).wait().astype(np.float64)
        assert np.isnan(y[:2]).all(), op
    np.testing.assert_array_equal(comm.allreduce(x, allred.Min).wait().astype(np.float64)[2:], [np.inf, -np.inf])
    np.testing.assert_array_equal(comm.allreduce(x, allred.Max).wait().astype(np.float64)[2:], [np.inf, -np.inf])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_16_bit_sums_are_formed_in_float32(comm, dtype):
    """2048 + 1 + 1 ... is 2048 in float16 and 256 + 1 ... is 256 in bfloat16, unless the sum has more digits."""
    start = 2048 if dtype is np.float16 else 256
    x = np.full(3, start if comm.rank == 0 else 1, dtype)
    total = np.float32(start + comm.size - 1).astype(dtype)
    np.testing.assert_array_equal(comm.allreduce(x, allred.Sum).wait(), np.full(3, total))


@pytest.mark.parametrize("dtype", INTS)
@pytest.mark.parametrize("op", [allred.Sum, allred.Product])
def test_integers_wrap_around(comm, dtype, op):
    """As numpy's do; 31 elements, since Open MPI's vector and scalar code differ."""
    largest = np.iinfo(dtype).max
    result, one = np.array([1 if op is allred.Product else 0], dtype), np.array([largest], dtype)
    for _ in range(comm.size):
        result = result * one if op is allred.Product else result + one
    assert comm.allreduce(np.full(31, largest, dtype), op).wait().tolist() == [int(result[0])] * 31
    assert comm.reducescatter(np.full(comm.size, largest, dtype), op).wait().tolist() == [int(result[0])]


def layouts(x):
    """The same 2-d values in other layouts."""
    wide = np.zeros((x.shape[0], 2 * x.shape[1]), x.dtype)
    wide[:, ::2] = x
    return [np.asfortranarray(x), wide[:, ::2], x[::-1, ::-1].copy()[::-1, ::-1]]


@pytest.mark.parametrize("which", range(3))
def test_any_layout(comm, which):
    shape = (5, 7)
    result = expected(allred.Sum, comm.size, shape, np.float32)
    x = layouts(data(comm.rank, shape, np.float32))[which]
    assert not x.flags.c_contiguous
    np.testing.assert_array_equal(comm.allreduce(x, allred.Sum).wait(), result)
    np.testing.assert_array_equal(comm.allreduce(x, allred.Sum, in_place=True).wait(), result)
    np.testing.assert_array_equal(x, result)
    y = layouts(data(comm.rank, shape, np.float32))[which]
    np.testing.assert_array_equal(
        comm.broadcast(y, comm.size - 1, in_place=True).wait(), data(comm.size - 1, shape, np.float32)
    )
    z = layouts(data(comm.rank, shape, np.float32))[which]
    gathered = np.concatenate([data(r, shape, np.float32) for r in range(comm.size)])
    np.testing.assert_array_equal(comm.allgather(z).wait(), gathered)
    np.testing.assert_array_equal(
        comm.alltoall(z, [5] + [0] * (comm.size - 1)).wait()[0], gathered[: 5 * comm.size if comm.rank == 0 else 0]
    )


def test_read_only_and_numbers_are_inputs_but_no_targets(comm):
    locked = np.full(3, comm.rank, np.float64)
    locked.flags.writeable = False
    total = sum(range(comm.size))
    assert comm.allreduce(locked, allred.Sum).wait().tolist() == [total] * 3
    assert comm.allreduce(float(comm.rank), allred.Sum).wait() == total
    assert comm.allreduce([comm.rank, 1.0], allred.Sum).wait().tolist() == [total, comm.size]
    with pytest.raises(InputError, match="the array is read-only; use the form without the underscore"):
        comm.allreduce(locked, in_place=True).wait()
    with pytest.raises(InputError, match="in place needs a numpy array, got float"):
        comm.allreduce(1.0, in_place=True).wait()


@pytest.mark.parametrize("in_place", [False, True])
def test_grouped_allreduce(comm, in_place):
    shapes = [(3,), (), (0,), (1009,), (2, 2), (1009,), (), (5, 3), (7,), (0,)]
    dtypes = [np.float32, np.float64, np.float32, np.float16, np.int32]
    dtypes += [np.complex64, np.complex128, np.uint16, np.uint64, np.uint32]

    def check():
        group = [data(comm.rank, s, d) for s, d in zip(shapes, dtypes, strict=True)]
        results = comm.grouped_allreduce(group, allred.Sum, in_place=in_place).wait()
        for x, y, s, d in zip(group, results, shapes, dtypes, strict=True):
            np.testing.assert_array_equal(y, expected(allred.Sum, comm.size, s, d))
            assert (x is y) == in_place
        assert comm.grouped_allreduce([], allred.Sum).wait() == []

    twice(check)
    for op, dtype, words in (
        (allred.Average, np.uint32, "it would round"),
        (allred.Max, np.complex64, "have no order"),
    ):
        values = [np.ones(3, np.float32), np.ones(2, dtype if comm.rank == comm.size - 1 else np.float32)]
        words = f"grouped_allreduce: .*array 1 of the group: {op.value} of {np.dtype(dtype)} is not defined.*{words}"
        with pytest.raises(InputError, match=words):
            comm.grouped_allreduce(values, op, in_place=in_place).wait()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_broadcast_from_every_root(comm, dtype, shape):
    for root in range(comm.size):
        x = data(comm.rank, shape, dtype)
        y = comm.broadcast(x, root).wait()
        np.testing.assert_array_equal(y, data(root, shape, dtype))
        np.testing.assert_array_equal(x, data(comm.rank, shape, dtype))
        assert comm.broadcast(x, root, in_place=True).wait() is x
        np.testing.assert_array_equal(x, data(root, shape, dtype))


RECORD = np.dtype([("key", "<u4"), ("weights", "<f4", (2,)), ("name", "S3")])
COPIED = [np.dtype(t) for t in (np.longdouble, "M8[ns]", "m8[s]", "S5", "<U4")] + [RECORD]


@pytest.mark.parametrize("dtype", COPIED, ids=str)
def test_elements_that_are_only_copied(comm, dtype):
    def of(rank):
        numbers = np.arange(3 + rank) + 10 * rank + 1
        if dtype is not RECORD:
            return numbers.astype(np.int64).astype(dtype)
        return np.array([(n, (n, -n), b"%d" % n) for n in numbers.tolist()], dtype)

    mine, last = of(comm.rank), comm.size - 1
    np.testing.assert_array_equal(comm.allgather(mine).wait(), np.concatenate([of(r) for r in range(comm.size)]))
    first, gathered = np.concatenate([of(r)[:3] for r in range(comm.size)]), allred.empty(3 * comm.size, dtype)
    assert np.shares_memory(comm.allgather(mine[:3], out=gathered).wait(), gathered)
    np.testing.assert_array_equal(gathered, first)
    np.testing.assert_array_equal(comm.broadcast(mine[:3], last).wait(), of(last)[:3])
    np.testing.assert_array_equal(comm.broadcast(mine[:1].reshape(()), 0).wait(), of(0)[0])
    strided = np.repeat(mine[:3], 2)[::2]
    assert comm.broadcast(strided, last, in_place=True).wait() is strided
    np.testing.assert_array_equal(strided, of(last)[:3])
    rows, _ = comm.alltoall(mine, [1] * last + [len(mine) - last]).wait()
    np.testing.assert_array_equal(
        rows,
        np.concatenate([of(r)[comm.rank : None if comm.rank == last else comm.rank + 1] for r in range(comm.size)]),
    )
    for reduce in (comm.allreduce, comm.reducescatter):
        with pytest.raises(InputError, match=r": dtype .* cannot be reduced; use one of bool, uint8"):
            reduce(mine[:3] if comm.rank == last else np.ones(3), allred.Sum).wait()
    if comm.size > 1:
        other = mine[:3] if comm.rank else np.zeros(3, "S9")
        with pytest.raises(MismatchError, match=r"broadcast\(root=0\) .*S9 \(3,\) on rank 0"):
            comm.broadcast(other, 0).wait()


@pytest.mark.parametrize("rest", [(), (3,), (0,), (CHUNK // 16,)], ids=str)
@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_allgather_with_other_first_dimensions(comm, dtype, rest):
    def rows(r):
        return (2 * r + 1) % 4 if r else 0  # none on rank 0

    def check():
        y = comm.allgather(data(comm.rank, (rows(comm.rank), *rest), dtype)).wait()
        np.testing.assert_array_equal(y, np.concatenate([data(r, (rows(r), *rest), dtype) for r in range(comm.size)]))

    twice(check)


def test_allgather_of_numbers(comm):
    assert comm.allgather(np.float32(comm.rank)).wait().tolist() == list(range(comm.size))


@pytest.mark.parametrize("rows", [0, 1, 6, 7, CHUNK // 4 + 3])
@pytest.mark.parametrize("dtype", REDUCED, ids=str)
def test_reducescatter(comm, dtype, rows):
    shape = (rows, 2)

    def check():
        y = comm.reducescatter(data(comm.rank, shape, dtype), allred.Sum).wait()
        np.testing.assert_array_equal(
            y, np.array_split(expected(allred.Sum, comm.size, shape, dtype), comm.size)[comm.rank]
        )

    twice(check)


@pytest.mark.parametrize("op", [allred.Average, allred.Min, allred.Max, allred.Product])
def test_reducescatter_ops(comm, op):
    y = comm.reducescatter(data(comm.rank, (11,), np.float32), op).wait()
    np.testing.assert_array_equal(y, np.array_split(expected(op, comm.size, (11,), np.float32), comm.size)[comm.rank])


@pytest.mark.parametrize("dtype", ALL, ids=str)
@pytest.mark.parametrize("rows", [0, 3, CHUNK // 4 + 1])
def test_a_result_in_an_array_of_the_caller(comm, dtype, rows):
    mine, size = data(comm.rank, (rows, 2), dtype), comm.size
    out = np.zeros((rows * size, 2), dtype)
    assert np.shares_memory(comm.allgather(mine, out=out).wait(), out) or rows == 0
    np.testing.assert_array_equal(out, np.concatenate([data(r, (rows, 2), dtype) for r in range(size)]))
    if dtype != np.bool_:
        whole, part = data(comm.rank, (rows * size, 2), dtype), np.zeros((rows, 2), dtype)
        assert comm.reducescatter(whole, allred.Sum, out=part).wait() is part
        total = expected(allred.Sum, size, (rows * size, 2), dtype)
        np.testing.assert_array_equal(part, total[rows * comm.rank : rows * (comm.rank + 1)])


def test_a_result_array_that_does_not_fit(comm):
    x, wrong = np.zeros(comm.size, np.float32), np.zeros(comm.size + 1, np.float32)
    words = rf"out is float32 \({comm.size + 1},\); expected a contiguous array, float32"
    with pytest.raises(InputError, match=words):
        comm.allgather(x[:1], out=wrong if comm.rank == 0 else x).wait()
    with pytest.raises(InputError, match=words):
        comm.reducescatter(x, out=wrong if comm.rank == 0 else x[:1]).wait()
    if comm.size > 1:
        rows = 1 if comm.rank == 0 else 2
        with pytest.raises(MismatchError, match=r"allgather\(\) float32 \(1,\) on rank 0"):
            comm.allgather(np.zeros(rows, np.float32), out=np.zeros(rows * comm.size, np.float32)).wait()


@pytest.mark.parametrize("rest", [(), (3,), (CHUNK // 8,)], ids=str)
@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_alltoall_with_splits(comm, dtype, rest):
    size, me = comm.size, comm.rank

    def rows(source, target):
        return (source + 2 * target) % 3

    def sent(source):
        return data(source, (sum(rows(source, t) for t in range(size)), *rest), dtype)

    def check():
        y, received = comm.alltoall(sent(me), [rows(me, t) for t in range(size)]).wait()
        parts = []
        for source in range(size):
            start = sum(rows(source, t) for t in range(me))
            parts.append(sent(source)[start : start + rows(source, me)])
        np.testing.assert_array_equal(y, np.concatenate(parts))
        assert received.tolist() == [rows(source, me) for source in range(size)]

    twice(check)


def test_alltoall_in_equal_parts(comm):
    y, received = comm.alltoall(np.arange(2 * comm.size) + 100 * comm.rank).wait()
    assert y.tolist() == [100 * r + 2 * comm.rank + i for r in range(comm.size) for i in range(2)]
    assert received.tolist() == [2] * comm.size


def test_barrier_holds_everyone_until_the_last_is_there(comm):
    for last in range(comm.size):
        if comm.rank != last:
            works = comm.barrier()
            early = works.done() and comm.size > 1
            comm_last = works
        else:
            early, comm_last = False, None
        # Rank `last` has not started its barrier before everyone else has looked: the report comes before it.
        seen = allred.allgather_object(early)
        if comm_last is None:
            comm_last = comm.barrier()
        comm_last.wait()
        assert not any(seen)


def test_work_started_together_completes_in_order(comm):
    works = [comm.allreduce(np.full(CHUNK // 4 + i, 1.0), allred.Sum) for i in range(4)]
    last = works[3].wait()
    assert all(work.done() for work in works)
    assert last.shape == (CHUNK // 4 + 3,)
    assert all((work.wait() == comm.size).all() for work in works)


@pytest.mark.parametrize("dtype", FLOATS)
def test_results_are_bitwise_equal_on_all_ranks_and_from_run_to_run(comm, dtype):
    x = np.random.default_rng(comm.rank).normal(size=300_001).astype(dtype)
    first = comm.allreduce(x, allred.Average).wait()
    second = comm.allreduce(x, allred.Average).wait()
    assert first.tobytes() == second.tobytes()
    assert len(set(allred.allgather_object(allred.digest(first)))) == 1


def test_memory_of_the_communicator_reduces_without_a_copy_and_lasts(comm):
    mine = comm.backend.allocate(1000, np.dtype(np.float32))
    mine[:] = comm.rank + 1
    comm.allreduce(mine, allred.Sum, in_place=True).wait()
    comm.allreduce(mine[100:200], allred.Sum, in_place=True).wait()
    total = comm.size * (comm.size + 1) / 2
    assert set(mine[:100]) == {total}
    assert set(mine[100:200]) == {total * comm.size}


def halves(array):
    """Two views that share some elements."""
    return [array[: len(array) // 2 + 1], array[len(array) // 2 :]]


def columns(matrix):
    """Three columns, of which the first and the last one are the same."""
    return [matrix[:, 0], matrix[:, 1], matrix[:, 0]]


def windows(array):
    return np.lib.stride_tricks.sliding_window_view(array, 3, writeable=True)


BAD = [
    (lambda c: c.allreduce(np.ones(3, int)), "allreduce: Average of int64 is not defined"),
    (lambda c: c.allreduce(np.ones(3, bool), allred.Sum), "allreduce: Sum of bool is not defined; use allred.Max for"),
    (lambda c: c.allreduce(np.ones(3), None), "allreduce: op=None is not a reduction"),
    (lambda c: c.allreduce(np.ones(3), "sum"), "allreduce: op='sum' is not a reduction; use allred.Average"),
    (lambda c: c.allreduce(np.ones(3), ["sum"]), r"allreduce: op=\['sum'\] is not a reduction"),
    (lambda c: c.allreduce(np.ones(3), name=7), "allreduce '7': name=7 must be a string"),
    (lambda c: c.broadcast_object({}, name=7), "broadcast_object '7': name=7 must be a string"),
    (lambda c: c.allgather_object({}, name=7), "allgather_object '7': name=7 must be a string"),
    (lambda c: c.grouped_allreduce([], "sum"), "grouped_allreduce: op='sum' is not a reduction"),
    (
        lambda c: c.grouped_allreduce([np.zeros(3)] * 2, in_place=True),
        "grouped_allreduce: arrays 0 and 1 of the group share memory; pass a copy of one",
    ),
    (
        lambda c: c.grouped_allreduce(halves(np.zeros(9)), in_place=True),
        "grouped_allreduce: arrays 0 and 1 of the group share memory; pass a copy of one",
    ),
    (
        lambda c: c.grouped_allreduce([np.zeros(2), *columns(np.zeros((4, 3)))], in_place=True),
        "grouped_allreduce: arrays 1 and 3 of the group share memory; pass a copy of one",
    ),
    (
        lambda c: c.grouped_allreduce([windows(np.zeros(9))], in_place=True),
        "grouped_allreduce: array 0 of the group: the array has several elements in the same memory; pass a copy",
    ),
    (lambda c: c.allreduce(windows(np.zeros(9)), in_place=True), "allreduce: the array has several elements in the"),
    (lambda c: c.grouped_allreduce_blocking([], True, "Sum", ""), "grouped_allreduce: op='Sum' is not a reduction"),
    (lambda c: c.grouped_allreduce_blocking([], True, None, ""), "grouped_allreduce: op=None is not a reduction"),
    (lambda c: c.grouped_allreduce_blocking([], True, allred.Sum, 7), "grouped_allreduce '7': name=7 must be a string"),
    (
        lambda c: c.grouped_allreduce_blocking(halves(np.zeros(9)), True, allred.Sum, ""),
        "grouped_allreduce: arrays 0 and 1 of the group share memory",
    ),
    (lambda c: c.alltoall(np.zeros(4), [2**63] * c.size), "alltoall: .* must be .* whole numbers"),
    (lambda c: c.allreduce(np.ones(3, "M8[s]")), r"allreduce: dtype datetime64\[s\] cannot be reduced"),
    (lambda c: c.allreduce(np.ones(3, complex), allred.Max), "allreduce: Max of complex128 is not defined"),
    (lambda c: c.allreduce(None), "allreduce: expected an array or a number, got NoneType"),
    (lambda c: c.broadcast(np.ones(3), c.size), r"broadcast: root=\d is not a rank; expected 0 to"),
    (lambda c: c.broadcast(np.ones(3), "chief"), "broadcast: root='chief' is not a rank"),
    (lambda c: c.alltoall(np.ones(3), [1] * (c.size + 1)), "alltoall: splits=.* must be"),
    (lambda c: c.alltoall(np.ones(3), [[1], [1, 2]]), "alltoall: splits=.* must be"),
    (lambda c: c.alltoall(np.ones(3), [-1] * c.size), "alltoall: .* must be .* whole numbers"),
    (lambda c: c.reducescatter(np.float64(3)), "reducescatter: a 0-d array has no first dimension"),
    (lambda c: c.grouped_allreduce([np.ones(3), "x"]), "grouped_allreduce: array 1 of the group: dtype <U1"),
    (lambda c: c.grouped_allreduce(3), "grouped_allreduce: expected a list of arrays, got int"),
    (lambda c: c.grouped_allreduce({"w": np.ones(2)}), "grouped_allreduce: expected a list of arrays, got dict"),
    (
        lambda c: c.broadcast(np.array([{}], object)),
        "broadcast: dtype object holds Python objects or no bytes; use broadcast_object",
    ),
    (lambda c: c.allgather_object(lambda: 0), "allgather_object: a function cannot be pickled"),
    (lambda c: c.broadcast_object(lambda: 0, c.size - 1), "broadcast_object: a function cannot be pickled"),
    (lambda c: c.broadcast_object(0, -1), "broadcast_object: root=-1 is not a rank"),
]


@pytest.mark.parametrize(("operation", "message"), BAD)
def test_bad_input_is_the_same_error_on_all_ranks_and_the_communicator_goes_on(comm, operation, message):
    kind, _, words = message.partition(": ")
    with pytest.raises(
        InputError, match=rf"^{message}|^{kind}: rank {comm.size - 1}: {words}"
    ):  # a root alone is at fault
        operation(comm).wait()
    if comm.size > 1:
        odd = comm.size - 1
        with pytest.raises(InputError, match=rf"^{kind}: rank {odd}: {words}") as error:
            (operation(comm) if comm.rank == odd else comm.allreduce(np.ones(3))).wait()
        assert len(set(allred.allgather_object(str(error.value)))) == 1
    assert comm.allreduce(np.ones(3), allred.Sum).wait().tolist() == [comm.size] * 3


class RaisesOn:
    """An object that raises an exception where rank `rank` unpickles it."""

    def __init__(self, rank, error):
        self.state = rank, error

    def __reduce__(self):
        return raise_on, self.state


def raise_on(rank, error):
    if allred.rank() == rank:
        raise error
    return "unpickled"


def test_objects_with_large_arrays_are_equal_on_all_ranks_and_their_own(comm):
    line = np.arange(30_000.0)
    frozen = line.copy()
    frozen.flags.writeable = False
    value = {
        "twice": [line, line],
        "frozen": frozen,
        "layouts": (line.reshape(200, 150).T, line[::2], line[::-1], np.asfortranarray(line.reshape(200, 150))),
        "bfloat16": np.ones(40_000, ml_dtypes.bfloat16),
        "objects": np.array([line, None, "x"], object),
        "small": [np.zeros((0, 3)), np.float32(1), np.array(2), 3, b"x" * 100_000],
    }
    for root in (0, comm.size - 1):
        found = comm.broadcast_object(value if comm.rank == root else None, root).wait()
        assert (found is value) == (comm.rank == root)
        assert found["twice"][0] is found["twice"][1]
        for (name, got), (_, expected) in zip(nest.leaves(found), nest.leaves(value), strict=True):
            if isinstance(expected, np.ndarray) and not expected.dtype.hasobject:
                assert got.dtype == expected.dtype, name
                assert np.array_equal(got, expected), name
        found["twice"][0] += 1  # a copy that can be changed
        if comm.rank == root:
            line -= 1
        assert np.array_equal(found["twice"][0], line + (comm.rank != root))


@pytest.mark.parametrize("error", [KeyError("name"), MemoryError("large"), InputError("of the program")])
@pytest.mark.parametrize("way", ["broadcast_object", "allgather_object", "after others"])
def test_an_exception_of_unpickling_fails_only_this_call_on_this_rank(comm, way, error):
    value, odd = RaisesOn(comm.size - 1, error), comm.rank == comm.size - 1
    before = comm.allreduce(np.ones(3), allred.Sum) if way == "after others" else None
    if way == "allgather_object":
        work, unpickles, expected = comm.allgather_object(value), True, ["unpickled"] * comm.size
    else:
        work, unpickles, expected = comm.broadcast_object(value, 0), comm.rank != 0, "unpickled"
    after = comm.allreduce(np.ones(3), allred.Sum)
    if odd and unpickles:
        for _ in range(2):
            with pytest.raises(type(error), match=re.escape(str(error))):
                work.wait()
    else:
        assert work.wait() == expected if unpickles else work.wait() is value
    for each in filter(None, (before, after)):
        assert each.wait().tolist() == [comm.size] * 3
    assert comm.allgather_object(comm.rank).wait() == list(range(comm.size))


def test_an_error_of_allred_is_an_object_like_others(comm):
    error = comm.broadcast_object(InputError("as a value")).wait()
    assert (type(error), str(error)) == (InputError, "as a value")


def test_a_mismatch_names_an_earlier_error(comm):
    """Which the program may have caught on some ranks without knowing it: it is a ValueError."""
    if comm.size == 1:
        pytest.skip("one rank agrees with itself")
    with pytest.raises(ValueError, match="got NoneType"):
        comm.allreduce(None).wait()
    with pytest.raises(MismatchError) as error:
        comm.allreduce(np.ones(3 + comm.rank)).wait()
    earlier = r"\n  (an earlier operation failed|\d+ earlier operations failed, the last one): InputError: allreduce: "
    assert re.search(earlier + "expected an array or a number, got NoneType$", str(error.value))


def ones(*shape, dtype=np.float64):
    return np.ones(shape, dtype)


# Two calls that must not pass for the same: for every kind of operation with itself, one thing changed, and across.
DIFFERENT = {
    "shape": [lambda c: c.allreduce(ones(3)), lambda c: c.allreduce(ones(3, 1))],
    "dtype": [lambda c: c.allreduce(ones(3)), lambda c: c.allreduce(ones(3, dtype=np.float32))],
    "op": [lambda c: c.allreduce(ones(3)), lambda c: c.allreduce(ones(3), allred.Max)],
    "name": [lambda c: c.allreduce(ones(3), name="w"), lambda c: c.allreduce(ones(3), name="v")],
    "group shape": [
        lambda c: c.grouped_allreduce([ones(3), ones(2)]),
        lambda c: c.grouped_allreduce([ones(3), ones(1)]),
    ],
    "group length": [lambda c: c.grouped_allreduce([ones(3)]), lambda c: c.grouped_allreduce([ones(3), ones(1)])],
    "group op": [lambda c: c.grouped_allreduce([ones(3)]), lambda c: c.grouped_allreduce([ones(3)], allred.Sum)],
    "root": [lambda c: c.broadcast(ones(3), 0), lambda c: c.broadcast(ones(3), 1)],
    "broadcast shape": [lambda c: c.broadcast(ones(3)), lambda c: c.broadcast(ones(4))],
    "object root": [lambda c: c.broadcast_object(0, 0), lambda c: c.broadcast_object(0, 1)],
    "allgather rows": [lambda c: c.allgather(ones(3, 2)), lambda c: c.allgather(ones(3, 3))],
    "allgather dtype": [lambda c: c.allgather(ones(3)), lambda c: c.allgather(ones(3, dtype=np.int64))],
    "alltoall rows": [lambda c: c.alltoall(ones(c.size, 2)), lambda c: c.alltoall(ones(c.size, 3))],
    "reducescatter shape": [lambda c: c.reducescatter(ones(3)), lambda c: c.reducescatter(ones(4))],
    "reducescatter op": [lambda c: c.reducescatter(ones(3)), lambda c: c.reducescatter(ones(3), allred.Sum)],
    "broadcast": [lambda c: c.allreduce(ones(3)), lambda c: c.broadcast(ones(3))],
    "allgather": [lambda c: c.allreduce(ones(3)), lambda c: c.allgather(ones(3))],
    "objects": [lambda c: c.allgather_object(5), lambda c: c.allgather(np.array([5]))],
    "barrier": [lambda c: c.allreduce(ones(3)), lambda c: c.barrier()],
}


@pytest.mark.parametrize("which", DIFFERENT)
def test_ranks_that_differ_raise_the_same_error(comm, which):
    if comm.size == 1:
        pytest.skip("one rank cannot differ")
    odd = comm.size - 1
    with pytest.raises(MismatchError, match=rf" on ranks? 0.*; .* on rank {odd};") as error:
        DIFFERENT[which][comm.rank == odd](comm).wait()
    assert len(set(allred.allgather_object(str(error.value)))) == 1
    assert comm.allreduce(np.ones(3), allred.Sum).wait().tolist() == [comm.size] * 3


IN_PLACE = {  # on an array of three numbers; the first three are the fast path
    "step": lambda c, x: c.step_allreduce([x], allred.Sum, "", 0, True, 0, 0, 1) or c.check("step", "").wait(),
    "blocking": lambda c, x: c.allreduce_blocking(x, True, allred.Sum, ""),
    "grouped blocking": lambda c, x: c.grouped_allreduce_blocking([x], True, allred.Sum, ""),
    "asynchronous": lambda c, x: c.allreduce(x, in_place=True).wait(),
    "broadcast": lambda c, x: c.broadcast(x, c.size - 1, in_place=True).wait(),
}


@pytest.mark.parametrize("which", [*IN_PLACE, *DIFFERENT])
def test_a_rank_in_an_older_world_is_an_error_and_no_result(comm, which):
    if comm.size == 1:
        pytest.skip("one rank is in one world")
    odd, x = comm.size - 1, np.full(3, float(comm.rank))
    comm.generation = 5 if comm.rank == odd else 6
    words = rf"different generations of the world: generation 6 on ranks? 0.*; generation 5 on rank {odd};"
    try:
        with pytest.raises(MismatchError, match=words):
            IN_PLACE[which](comm, x) if which in IN_PLACE else DIFFERENT[which][0](comm).wait()
    finally:
        comm.generation = 0
    assert x.tolist() == [comm.rank] * 3
    assert comm.allreduce(np.ones(3), allred.Sum).wait().tolist() == [comm.size] * 3


def test_zeros_of_both_signs_are_the_same_bits_on_all_ranks(comm):
    x = np.array([0.0, -0.0], np.float32) if comm.rank % 2 else np.array([-0.0, 0.0], np.float32)
    for op in (allred.Min, allred.Max):
        assert len(set(allred.allgather_object(comm.allreduce(x, op).wait().tobytes()))) == 1


def test_float16_overflows_to_infinity_quietly(comm):
    if comm.size > 1:
        assert np.isinf(comm.allreduce(np.full(3, 60_000, np.float16), allred.Sum).wait()).all()


def test_mpi_never_sees_the_users_memory(comm, monkeypatch):
    """An MPI operation cannot be withdrawn: after a time limit it may go on writing. All its buffers are allred's."""
    if comm.name != "mpi":
        pytest.skip("about the mpi backend")
    seen = []

    class Spy:
        def __init__(self, inner):
            self.inner = inner

        def __getattr__(self, name):
            def call(*args):
                for arg in args:
                    for item in arg if isinstance(arg, list) else [arg]:
                        if isinstance(item, np.ndarray):
                            seen.append(item)
                return getattr(self.inner, name)(*args)

            return call

    monkeypatch.setattr(comm.backend, "_comm", Spy(comm.backend._comm))
    mine = np.ones((1000, 4))
    comm.allreduce(mine, allred.Sum, in_place=True).wait()
    comm.grouped_allreduce([mine, mine.copy()], allred.Max, in_place=True).wait()
    comm.broadcast(mine, in_place=True).wait()
    comm.allgather(mine).wait()
    comm.reducescatter(mine).wait()
    comm.alltoall(np.ones((comm.size, 5))).wait()
    assert len(seen) >= 10
    owned = comm.backend._owned
    assert all(any(np.shares_memory(buffer, piece) for piece in owned) for buffer in seen)
    assert not any(np.shares_memory(buffer, mine) for buffer in seen)
    seen.clear()
    born = comm.backend.allocate(1000, np.dtype(np.float32))
    comm.allreduce(born[10:20], allred.Sum, in_place=True).wait()
    assert any(np.shares_memory(buffer, born) for buffer in seen)  # and what is allred's is not copied
    monkeypatch.undo()


def test_in_place_is_untouched_by_an_operation_that_fails(comm):
    x = np.full(3, comm.rank)
    with pytest.raises(InputError):
        comm.allreduce(x, in_place=True).wait()
    assert x.tolist() == [comm.rank] * 3


@pytest.mark.limit(240)
def test_more_than_2_to_the_31_elements(comm, request):
    """Costs 4 s with tcp, 7 s with shm, 13 s with mpi, which moves chunks of 1 MiB."""
    if comm.size != 2:
        pytest.skip("2 ranks are enough for 2 GiB each")
    if comm.name != "tcp" and not request.config.getoption("--full"):
        pytest.skip("with --full only")
    count = 2**31 + 11
    x = np.ones(count, np.int8)
    x[-1] = comm.rank
    comm.allreduce(x, allred.Sum, in_place=True).wait(timeout_s=200)
    assert x[-4:].tolist() == [2, 2, 2, 1]
    words = x[: count // 8 * 8].view(np.uint64)  # compared in place of 2 GiB of elements
    assert int(np.count_nonzero(words == 0x0202020202020202)) == len(words)
