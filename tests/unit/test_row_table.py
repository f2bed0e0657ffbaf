"""Tables of rows, and the ids of a lookup: the C code against its numpy twin, on random sequences of calls."""

import numpy as np
import pytest

from allred import native
from allred.native import row_twins

pytestmark = pytest.mark.skipif(not native.available, reason="the extension was not built")

NONE = (0, 0, 0)
RULES = {
    "sgd": (lambda dim: NONE, (0.1, 0.0, 0.0, 0.01)),
    "sgd momentum": (lambda dim: (dim, 0, 0), (0.1, 0.9, 1.0, 0.0)),
    "adagrad": (lambda dim: (dim, 0, 0), (0.1, 1e-10, 0.0)),
    "row_wise_adagrad": (lambda dim: (1, 0, 0), (0.1, 1e-10, 0.01)),
    "rmsprop": (lambda dim: (dim, dim, dim), (0.1, 0.9, 1e-8, 0.5, 0.0)),
    "rmsprop plain": (lambda dim: (dim, 0, 0), (0.1, 0.9, 1e-8, 0.0, 0.0)),
    "adam": (lambda dim: (dim, dim, 0), (0.1, 0.9, 0.999, 0.5, 1e-8, 0.01)),
    "adamw": (lambda dim: (dim, dim, 0), (0.1, 0.9, 0.999, 0.5, 1e-8, 0.01)),
}


def rows_of(table, dim, slots, since=0):
    """Return the rows used in step `since` or later, as columns sorted by id."""
    numbers = np.empty(table.rows, np.uint32)
    numbers = numbers[: table.select(since, numbers)].copy()
    count = len(numbers)
    ids, seen, steps = np.empty(count, np.uint64), np.empty(count, np.uint32), np.empty(count, np.uint32)
    vectors = np.empty((count, dim), np.float32)
    kept = tuple(np.empty((count, size), np.float32) for size in slots)
    table.read(numbers, ids, seen, steps, vectors, kept)
    order = np.argsort(ids)
    return [column[order] for column in (ids, seen, steps, vectors, *kept)]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("dim", "half"), [(1, False), (5, False), (64, False), (16, True), (67, True)])
def test_table_has_the_rows_of_its_twin(rule, dim, half):
    rng = np.random.default_rng(dim)
    make_slots, numbers = RULES[rule]
    form = dim, half, make_slots(dim), (0.5, 0.0, 0.0), 1, -0.5, 0.25, 2**63 + 5, int(rng.integers(0, 4))
    tables = [native.RowTable(*form), row_twins.RowTable(*form)]
    for step in range(1, 13):
        ids = rng.integers(-30, 30, size=rng.integers(0, 60)) * 2**40
        gradients = rng.normal(size=(len(ids), dim)).astype(np.float32)
        found = [np.empty((len(ids), dim), np.float16 if half else np.float32) for _ in tables]
        for table, vectors in zip(tables, found, strict=True):
            table.lookup(ids, vectors, step if step % 4 else 0)
        assert np.array_equal(*found)
        done = [table.update(ids, gradients, rule.split()[0], numbers, step) for table in tables]
        assert done[0] == done[1]
        if step == 9:
            removed = [table.remove_older(7) for table in tables]
            assert removed[0] == removed[1]
        for a, b in zip(*(rows_of(table, dim, form[2], since=step // 2) for table in tables), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dim", [1, 64])
def test_mean_of_sums(dim):
    rng = np.random.default_rng(1)
    results = []
    for kind in (native.RowTable, row_twins.RowTable):
        table = kind(dim, False, (dim, 0, 0), (0.0, 0.0, 0.0), 0, 0.25, 0.0, 0, 0)
        sums = kind(dim, False, NONE, (0.0, 0.0, 0.0), 0, 0.0, 0.0, 0, 0)
        rng = np.random.default_rng(1)
        for step in (1, 2, 3):
            for weight in (1.0, 0.5, 3.0):
                ids = rng.integers(0, 50, size=30)
                table.lookup(ids, np.empty((30, dim), np.float32), step)
                sums.add(ids, rng.normal(size=(30, dim)).astype(np.float32), weight)
            sums.add(np.array([1000]), np.ones((1, dim), np.float32), 1.0)  # it has no row in the table
            assert table.update_mean(sums, 4.5, "adagrad", (0.1, 1e-10, 0.0), step) == sums.rows - 1
            sums.clear()
            assert sums.rows == 0
        results.append(rows_of(table, dim, (dim, 0, 0)))
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)


def test_first_vectors_depend_on_seed_and_id_only():
    tables = [native.RowTable(8, False, NONE, (0.0,) * 3, 1, -1.0, 1.0, seed, 0) for seed in (3, 3, 4)]
    ids = np.arange(1000)
    orders = [ids, ids[::-1], ids]
    vectors = []
    for table, order in zip(tables, orders, strict=True):
        for part in np.array_split(order, 7):
            table.lookup(part.copy(), np.empty((len(part), 8), np.float32), 1)
        vectors.append(np.empty((1000, 8), np.float32))
        table.lookup(ids, vectors[-1], 0)
    assert np.array_equal(vectors[0], vectors[1])
    assert not np.array_equal(vectors[0], vectors[2])
    assert abs(vectors[0].mean()) < 0.02
    assert vectors[0].min() < -0.99
    assert 0.99 < vectors[0].max() < 1.0
    assert np.unique(vectors[0]).size > 7990


def test_normal_first_vectors():
    form = 50, False, NONE, (0.0,) * 3, 2, 1.0, 0.5, 9, 0
    ids = np.arange(4000)
    found = [np.empty((4000, 50), np.float32) for _ in range(2)]
    native.RowTable(*form).lookup(ids, found[0], 1)
    row_twins.RowTable(*form).lookup(ids[:50], found[1][:50], 1)
    np.testing.assert_allclose(found[0][:50], found[1][:50], rtol=3e-7)
    assert abs(found[0].mean() - 1.0) < 0.01
    assert abs(found[0].std() - 0.5) < 0.01
    assert abs(np.mean(np.abs(found[0] - 1.0) > 1.0) - 0.0455) < 0.003  # beyond two deviations


def test_memory_of_a_large_table():
    table = native.RowTable(64, False, (1, 0, 0), (0.0,) * 3, 0, 0.0, 0.0, 0, 0)
    for start in range(0, 300_000, 50_000):
        table.lookup(np.arange(start, start + 50_000), np.empty((50_000, 64), np.float32), 1)
        row_bytes = 64 * 4 + 4
        assert table.nbytes <= 1.15 * table.rows * row_bytes + 16 * table.rows + 2**21
    table.update(np.arange(0, 300_000, 1000), np.ones((300, 64), np.float32), "row_wise_adagrad", (0.1, 0.0, 0.0), 5)
    assert table.remove_older(5) == 299_700
    assert table.rows == 300
    assert table.nbytes < 2**23
    table.clear()
    assert rows_of(table, 64, (1, 0, 0))[0].size == 0


def test_rows_are_written_and_read_again():
    form = 3, True, (3, 3, 0), (0.0,) * 3, 1, 0.0, 1.0, 0, 5
    rng = np.random.default_rng(2)
    columns = [
        rng.permutation(2**40 + np.arange(500)).astype(np.uint64), rng.integers(0, 9, 500).astype(np.uint32),
        rng.integers(0, 9, 500).astype(np.uint32), rng.normal(size=(500, 3)).astype(np.float16).astype(np.float32),
        rng.normal(size=(500, 3)).astype(np.float32), rng.normal(size=(500, 3)).astype(np.float32),
    ]  # fmt: skip
    for kind in (native.RowTable, row_twins.RowTable):
        table = kind(*form)
        table.write(*columns[:4], tuple(columns[4:]))
        table.write(columns[0][:5], None, None, None, (None, None))
        order = np.argsort(columns[0])
        for a, b in zip(rows_of(table, 3, form[2]), columns, strict=False):
            assert np.array_equal(a, b[order])


@pytest.mark.parametrize("owners", [1, 2, 7])
@pytest.mark.parametrize("count", [0, 1, 1000])
def test_distinct_ids(owners, count):
    rng = np.random.default_rng(count)
    ids = rng.integers(-(2**62), 2**62, size=max(count // 3, 1))[rng.integers(0, max(count // 3, 1), count)]
    results = []
    for module in (native, row_twins):
        distinct, positions = np.empty(count, np.int64), np.empty(count, np.uint32)
        counts = np.empty(owners, np.int64)
        found = module.distinct_ids(ids, distinct, positions, counts)
        assert counts.sum() == found == len(set(ids.tolist()))
        assert np.array_equal(distinct[positions], ids)
        results.append((distinct[:found], positions, counts))
    for a, b in zip(*results, strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("bags", [None, False, True])
@pytest.mark.parametrize("dim", [1, 70])
def test_rows_of_a_lookup_and_their_gradients(half, bags, dim):
    rng = np.random.default_rng(3)
    positions = rng.integers(0, 20, 200).astype(np.uint32)
    rows = rng.normal(size=(20, dim)).astype(np.float16 if half else np.float32)
    offsets = None if bags is None else np.sort(np.concatenate([[0, 200], rng.integers(0, 200, 30)]))
    size = 200 if offsets is None else len(offsets) - 1
    gradients = rng.normal(size=(size, dim)).astype(np.float32)
    results = []
    for module in (native, row_twins):
        out, sums = np.empty((size, dim), np.float32), np.empty((20, dim), np.float32)
        module.spread_rows(out, rows, half, positions, dim, offsets, bool(bags))
        module.sum_gradients(sums, gradients, positions, dim, offsets, bool(bags))
        results.append((out, sums))
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: t.lookup(np.arange(3), np.empty((2, 4), np.float32), 1), "vectors has 32 bytes; 3 times 16"),
        (lambda t: t.lookup(np.arange(3)[::2], np.empty((2, 4), np.float32), 1), "contiguous"),
        (lambda t: t.lookup(np.arange(3), None, 1), "NoneType"),
        (lambda t: t.update(None, None, "sgd", (0.1, 0.0, 0.0, 0.0), 1), "NoneType"),
        (lambda t: t.update(np.arange(1), np.ones((1, 4), np.float32), "adam", (0.1,) * 6, 1), "slot 0 of the table"),
        (lambda t: t.update(np.arange(1), np.ones((1, 4), np.float32), "sgd", (0.1,), 1), "sgd takes 4 numbers, got 1"),
        (lambda t: t.update(np.arange(1), np.ones((1, 4), np.float32), "sgd", (np.inf, 0.0, 0.0, 0.0), 1), "finite"),
        (lambda t: t.read(np.array([0], np.uint32), None, None, None, None, ()), "there is no row 0"),
        (lambda t: t.update_mean(t, 1.0, "sgd", (0.1, 0.0, 0.0, 0.0), 1), "the table of sums"),
        (lambda t: native.RowTable(0, False, NONE, (0.0,) * 3, 0, 0.0, 0.0, 0, 0), "dim must be 1"),
        (lambda t: native.RowTable(4, False, (2, 0, 0), (0.0,) * 3, 0, 0.0, 0.0, 0, 0), "0, 1 or 4 elements, not 2"),
        (lambda t: native.spread_rows(np.empty(4), np.empty(4), False, np.array([2], np.uint32), 4), "position 2"),
        (lambda t: native.spread_rows(np.empty(4), np.empty(4), False, np.array([0], np.uint32), 2**62), "dim must be"),
        (lambda t: native.distinct_ids(np.arange(1), np.empty(1), np.empty(1, np.uint32), b"12345678"), "writable"),
        (
            lambda t: native.sum_gradients(
                np.empty((1, 4), np.float32), np.empty((1, 4), np.float32), np.zeros(3, np.uint32), 4, np.array([0, 2])
            ),
            "offsets must grow from 0 to 3",
        ),
    ],
)
def test_arguments_are_checked(call, message):
    table = native.RowTable(4, False, NONE, (0.0,) * 3, 0, 0.0, 0.0, 0, 0)
    with pytest.raises((BufferError, TypeError, ValueError), match=message):
        call(table)
    assert table.rows == 0
