"""Embedding tables in mode sync: the rows are spread over the ranks, with the bits of a dense table on every rank."""

import copy
import itertools
import pathlib
import pickle

import numpy as np
import pytest

import allred
from allred import embeddings, optim
from allred.embeddings.row_store import RowStore
from allred.errors import CheckpointError, InputError, MismatchError, NonFiniteError

DIM, ROWS = 5, 40
OPTIMIZERS = {
    "sgd": lambda: optim.SGD(0.1, weight_decay=0.0),
    "momentum": lambda: optim.SGD(0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda: optim.Adagrad(0.1, initial_accumulator=0.1),
    "row-wise": lambda: optim.Adagrad(0.1, row_wise=True),
    "rmsprop": lambda: optim.RMSProp(0.01, momentum=0.5, centered=True),
    "adam": lambda: optim.Adam(0.01),
    "adamw": lambda: optim.AdamW(optim.exponential_decay(0.01, 2, 0.5)),
}
_names = (f"table {number}" for number in itertools.count())


def make(optimizer="row-wise", dim=DIM, rows=ROWS, **options):
    table = allred.Embedding(next(_names), dim, rows, embeddings.Uniform(-1.0, 1.0), OPTIMIZERS[optimizer](), **options)
    opt = allred.distributed(optim.SGD(0.1), tables=[table])
    return table, opt


def step(opt, samples=None):
    opt.step({"w": np.zeros(2, np.float32)}, {"w": np.ones(2, np.float32)}, samples)


def ids_of(rank, number, count=30):
    return np.random.default_rng((rank, number)).integers(0, ROWS, count)


def gradients_of(rank, number, shape):
    return np.random.default_rng((number, rank)).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_steps_have_the_bits_of_a_table_on_one_process(rank, size, name, dtype):
    table, opt = make(name, dtype=dtype)
    whole = RowStore(table.form)
    for number in range(4):
        ids = ids_of(rank, number).reshape(2, 3, 5)
        vectors = table.lookup(ids)
        assert vectors.dtype == np.float32
        assert vectors.shape == (2, 3, 5, DIM)
        for other in range(size):
            found = whole.lookup(np.unique(ids_of(other, number)).astype(np.uint64), True)
            if other == rank:
                expected = dict(zip(np.unique(ids).tolist(), found.astype(np.float32), strict=True))
        for place, vector in zip(ids.ravel().tolist(), vectors.reshape(-1, DIM), strict=True):
            np.testing.assert_array_equal(vector, expected[place])
        table.gradient(gradients_of(rank, number, vectors.shape))
        step(opt)
        for other in range(size):
            distinct, places = np.unique(ids_of(other, number), return_inverse=True)
            sums = np.zeros((len(distinct), DIM), np.float32)
            np.add.at(sums, places, gradients_of(other, number, (30, DIM)))
            whole.add(distinct.astype(np.uint64), sums)
        whole.apply_mean(size)
    assert table.size() == whole.rows
    rows = table.export()
    for column in ("ids", "vectors"):
        np.testing.assert_array_equal(rows[column], whole.columns()[column].astype(rows[column].dtype))


@pytest.mark.parametrize("name", ["sgd", "adagrad", "row-wise"])
def test_steps_have_the_bits_of_dense_gradients(rank, size, name):
    table, opt = make(name)
    everything = np.arange(ROWS)
    dense = {"rows": table.lookup(everything, train=False)}
    dense_opt = allred.distributed(OPTIMIZERS[name]())
    for number in range(3):
        ids = ids_of(rank, number)
        table.lookup(ids)
        gradients = gradients_of(rank, number, (len(ids), DIM))
        table.gradient(gradients)
        step(opt)
        whole = np.zeros((ROWS, DIM), np.float32)
        np.add.at(whole, ids, gradients)
        dense_opt.step(dense, {"rows": whole})
    np.testing.assert_array_equal(table.lookup(everything, train=False), dense["rows"])


@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_bags(rank, pooling, dtype):
    table, opt = make("sgd", dtype=dtype)
    other, other_opt = make("sgd", dtype=dtype)
    ids, starts = ids_of(rank, 0), np.array([0, 0, 4, 5, 5, 29, 30])
    bags = table.lookup(ids, starts, pooling)
    rows = other.lookup(ids)
    ends, gradient = np.append(starts[1:], 30), gradients_of(rank, 0, (7, DIM))
    spread = np.zeros_like(rows)
    for bag, (start, end) in enumerate(zip(starts, ends, strict=True)):
        expected = sum(rows[start:end], np.zeros(DIM, np.float32))
        share = 1 if pooling == "sum" or end == start else end - start
        np.testing.assert_array_equal(bags[bag], expected / np.float32(share))
        spread[start:end] = gradient[bag] / np.float32(share)
    table.gradient(gradient)
    other.gradient(spread)
    step(opt)
    step(other_opt)
    np.testing.assert_array_equal(
        table.lookup(np.arange(ROWS), train=False), other.lookup(np.arange(ROWS), train=False)
    )


@pytest.mark.parametrize("kind", ["int64", "uint64", "int32", "uint8", "int8", "list", "scalar", "empty", "empty list"])
def test_forms_of_ids(rank, kind):
    table, opt = make(rows=None)
    ids = {
        "list": [1, 2, 1], "scalar": 3, "empty": np.empty((0, 4), np.int64), "empty list": [],
        "uint64": np.array([2**64 - 1, 5, rank], np.uint64),
    }.get(kind)  # fmt: skip
    if ids is None:
        ids = np.array([[5, 1], [100, rank]], kind)[:, ::-1]
    vectors = table.lookup(ids)
    assert vectors.shape == (*np.shape(ids), DIM)
    table.gradient(np.ones_like(vectors))
    step(opt)
    after = table.lookup(ids, train=False)
    assert after.shape == vectors.shape
    assert (after < vectors).all()


def test_first_vectors_do_not_depend_on_ranks_or_order(rank, size):
    table, _ = make(rows=None)
    ids = np.array([7, -3, 2**62, 11])
    first = table.lookup(np.roll(ids, rank))
    alone = RowStore(table.form).lookup(ids.view(np.uint64), True)
    np.testing.assert_array_equal(first, np.roll(alone, rank, axis=0))


def test_several_lookups_of_a_step(rank, size):
    table, opt = make("sgd")
    other, other_opt = make("sgd")
    ids = [ids_of(rank, number, 7) for number in range(3)]
    first, second, third = (table.lookup(each) for each in ids)
    for message in ("3 lookups wait", "these vectors are of no lookup"):
        with pytest.raises(InputError, match=message):
            table.gradient(np.ones((7, DIM)), None if message[0] == "3" else np.ones(3))
    gradients = [gradients_of(rank, number, (7, DIM)) for number in range(3)]
    table.gradient(gradients[2], third)
    table.gradient(gradients[0], first)
    step(opt)  # without the gradient of the second
    other.lookup(np.concatenate([ids[0], ids[2]]))
    other.gradient(np.concatenate([gradients[0], gradients[2]]))
    step(other_opt)
    everything = np.arange(ROWS)
    np.testing.assert_allclose(table.lookup(everything, train=False), other.lookup(everything, train=False), rtol=1e-6)
    with pytest.raises(InputError, match="no lookup for training since the last step"):
        table.gradient(gradients[1], second)


def test_ranks_count_by_their_samples(rank, size):
    table, opt = make("sgd")
    before = table.lookup([3])
    table.gradient(np.full((1, DIM), rank + 1.0, np.float32))
    step(opt, samples=rank + 1)
    total = size * (size + 1) / 2
    mean = sum((each + 1) ** 2 for each in range(size)) / total
    np.testing.assert_allclose(table.lookup([3], train=False), before - np.float32(0.1) * mean, rtol=1e-5)


def test_a_rank_without_samples_has_no_gradients(rank, size):
    """A row that only such a rank has looked up rests: it has no update with a gradient of zeros."""
    if size == 1:
        pytest.skip("needs two ranks")
    table, opt = make("momentum")
    ids = [4, 5] if rank == 0 else [4]
    before = table.lookup(ids)
    table.gradient(np.ones_like(before))
    step(opt)
    before = table.lookup([4, 5], train=False)
    table.gradient(np.full_like(table.lookup(ids), np.nan if rank == 0 else 1.0))
    step(opt, samples=int(rank != 0))
    after = table.lookup([4, 5], train=False)
    assert (after[0] < before[0]).all()
    np.testing.assert_array_equal(after[1], before[1])


def test_a_step_without_gradients_counts(rank, size):
    table, opt = make("adam")
    step(opt)
    table.lookup([1])
    step(opt)
    assert table.size() == 1
    whole = RowStore(table.form)
    before = whole.lookup(np.array([1], np.uint64), True)
    for _ in range(2):
        whole.apply_mean(1)
    np.testing.assert_array_equal(table.lookup([1]), before)
    table.gradient(np.ones((1, DIM), np.float32))
    step(opt)
    whole.add(np.array([1], np.uint64), np.ones((1, DIM), np.float32))
    whole.apply_mean(1)
    np.testing.assert_allclose(table.lookup([1]), whole.lookup(np.array([1], np.uint64), False), rtol=1e-6)


@pytest.mark.parametrize("policy", ["raise", "skip", "ignore"])
def test_gradients_that_are_not_finite(rank, size, policy):
    table = allred.Embedding(next(_names), DIM, ROWS, optimizer=optim.SGD(0.1))
    opt = allred.distributed(optim.SGD(0.1), tables=[table], nonfinite=policy)
    params = {"w": np.zeros(2, np.float32)}
    ids = np.array([4, 9])
    before = table.lookup(ids)
    gradient = np.ones((2, DIM), np.float32)
    if rank == size - 1:
        gradient[1, 2] = np.nan
    table.gradient(gradient)
    if policy == "raise":
        with pytest.raises(NonFiniteError) as found:
            opt.step(params, {"w": np.ones(2, np.float32)})
        assert f"'{table.name}' on rank {size - 1} (id 9 has nan)" in str(found.value)
    else:
        opt.step(params, {"w": np.ones(2, np.float32)})
    after = table.lookup(ids, train=False)
    if policy == "ignore":
        assert np.isnan(after[1, 2])
        return
    np.testing.assert_array_equal(after, before)
    assert not params["w"].any()
    assert opt.skipped == (policy == "skip")
    table.lookup(ids)
    table.gradient(np.ones((2, DIM), np.float32))
    opt.step(params, {"w": np.ones(2, np.float32)})
    assert (table.lookup(ids, train=False) < before).all()


def test_dense_gradients_that_are_not_finite_leave_the_rows(rank, size):
    table, opt = make("sgd")
    before = table.lookup([1, 2])
    table.gradient(np.ones((2, DIM), np.float32))
    with pytest.raises(NonFiniteError, match="'w' on rank 0"):
        opt.step({"w": np.zeros(1, np.float32)}, {"w": np.full(1, np.inf if rank == 0 else 1, np.float32)})
    step(opt)
    np.testing.assert_array_equal(table.lookup([1, 2], train=False), before)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (([0.5],), "ids must be integers, but are float64"),
        (([True],), "ids must be integers, but are bool"),
        (([1, ROWS],), f"ids must be 0 to {ROWS - 1}, but id number 1 is {ROWS}"),
        (([-1],), "id number 0 is -1"),
        (([[1], [2, 3]],), "ids cannot be converted to an array"),
        (([1], [1]), "offsets must begin with 0"),
        (([1], [0, 2]), "and not exceed the 1 ids"),
        (([[1]], [0]), "with one axis"),
        (([1], [0.0]), "offsets float64"),
        (([1], [0], "max"), "pooling='max' must be 'sum' or 'mean'"),
    ],
)
def test_wrong_lookups_of_one_rank_are_an_error_on_all(rank, size, wrong, message):
    table, _ = make()
    with pytest.raises(InputError) as found:
        table.lookup(*(wrong if rank == size - 1 else ([1],)))
    assert message in str(found.value)
    assert table.lookup([1]).shape == (1, DIM)


@pytest.mark.parametrize(
    ("ids", "width", "message"), [([1, 1], DIM, "an id occurs twice"), ([1, 2], DIM + 1, "vectors must be floats of")]
)
def test_wrong_assignments_of_one_rank_are_an_error_on_all(rank, size, ids, width, message):
    table, _ = make()
    wrong = rank == size - 1
    with pytest.raises(InputError) as found:
        table.assign(ids if wrong else [1, 2], np.zeros((2, width if wrong else DIM)))
    assert message in str(found.value)


def test_lookups_that_differ_between_ranks(rank, size):
    if size == 1:
        pytest.skip("needs two ranks")
    table, _ = make()
    with pytest.raises(MismatchError, match=r"train=True.*train=False"):
        table.lookup([1], train=rank == 0)


def test_a_refused_lookup_keeps_the_prefetched_vectors(rank, size):
    table, opt = make("sgd")
    before = table.lookup([1])
    table.gradient(np.ones((1, DIM), np.float32))
    table.prefetch([1])
    step(opt)
    with pytest.raises(InputError, match="ids must be integers"):
        table.lookup([0.5] if rank == 0 else [1])
    np.testing.assert_array_equal(table.lookup([1]), before)
    assert (table.lookup([1], train=False) < before).all()


def test_learning_rates_that_differ_between_ranks(rank, size):
    if size == 1:
        pytest.skip("needs two ranks")
    table, opt = make("sgd")
    before = table.lookup([1])
    table.gradient(np.ones((1, DIM), np.float32))
    table.optimizer.lr = 0.5 + rank
    with pytest.raises(MismatchError, match=r"lr of table '.*': 0\.5.*1\.5"):
        step(opt)
    np.testing.assert_array_equal(table.lookup([1], train=False), before)


def test_a_wrong_learning_rate_of_one_rank_changes_nothing(rank, size):
    table, opt = make("sgd")
    before = table.lookup([1])
    table.gradient(np.ones((1, DIM), np.float32))
    table.optimizer.lr = -1.0 if rank == size - 1 else 0.1
    with pytest.raises(InputError, match="the learning rate of step 0 must be a finite number >= 0"):
        step(opt)
    table.optimizer.lr = 0.5
    table.lookup([1])
    table.gradient(np.ones((1, DIM), np.float32))
    step(opt)
    np.testing.assert_array_equal(table.lookup([1], train=False), before - np.float32(0.5))


def test_sums_that_may_overflow_are_refused(rank, size):
    if size == 1:
        pytest.skip("needs two ranks")
    table, opt = make("sgd")
    before = table.lookup([1, 2])
    table.gradient(np.array([[1.0] * DIM, [3e38] * DIM], np.float32))
    with pytest.raises(NonFiniteError, match=r"id 2 has 3e\+38, and the sum over . ranks may exceed float32"):
        step(opt)
    np.testing.assert_array_equal(table.lookup([1, 2], train=False), before)


def test_a_table_cannot_be_copied():
    table, _ = make()
    for copied in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(
            TypeError, match="cannot be copied or pickled: the ranks or parameter servers hold its rows"
        ):
            copied(table)


def test_tables_that_differ_between_ranks(rank, size):
    if size == 1:
        pytest.skip("needs two ranks")
    name = next(_names)
    table = allred.Embedding(name, DIM + (rank == 1), ROWS, optimizer=optim.SGD(0.1))
    allred.distributed(optim.SGD(0.1), tables=[table])
    with pytest.raises(MismatchError, match=f"dim={DIM}.*dim={DIM + 1}"):
        table.lookup([1])


def test_wrong_gradients(rank, size):
    table, opt = make()
    with pytest.raises(InputError, match="no lookup for training"):
        table.gradient(np.zeros((1, DIM)))
    table.lookup([1, 2])
    for wrong in (np.zeros((2, DIM + 1)), np.zeros((2, DIM), np.int64), np.zeros(2 * DIM)):
        with pytest.raises(InputError, match="expected a float array of the shape"):
            table.gradient(wrong)
    step(opt)


def test_vectors_are_assigned_and_exported(rank, size):
    table, _ = make(rows=None)
    ids = np.random.default_rng(0).permutation(np.arange(-50, 50))
    values = np.random.default_rng(1).normal(size=(100, DIM)).astype(np.float32)
    table.assign(ids, values)
    np.testing.assert_array_equal(table.lookup(ids, train=False), values)
    rows = table.export()
    order = np.argsort(ids)
    np.testing.assert_array_equal(rows["ids"], ids[order])
    np.testing.assert_array_equal(rows["vectors"], values[order])
    table.assign([], [])
    with pytest.raises(InputError, match="the vector of id 7 is not finite in float32"):
        table.assign([7], np.full((1, DIM), np.nan))


def test_rows_are_admitted_after_some_lookups(rank, size):
    table, opt = make("sgd", admit_after=2 * size)
    first = table.lookup([5])
    table.gradient(np.ones((1, DIM), np.float32))
    step(opt)
    assert table.size() == 0
    np.testing.assert_array_equal(table.lookup([5]), first)
    table.gradient(np.ones((1, DIM), np.float32))
    step(opt)
    assert table.size() == 1
    assert (table.lookup([5]) < first).all()


def test_a_restore_forgets_the_lookups_of_ids_without_a_row(rank, size, tmp_path):
    directory = allred.broadcast_object(str(tmp_path))
    table, opt = make("sgd", admit_after=2 * size)
    params = {"w": np.zeros(2, np.float32)}
    opt.save(directory, params)
    for _ in range(2):  # ids that had a row, too
        table.lookup([5])
        opt.restore(directory, params)
        table.lookup([5])
        assert table.size() == 0
        table.lookup([5])
        assert table.size() == 1
        opt.restore(directory, params)
        assert table.size() == 0


def test_what_cannot_be_combined_with_tables():
    table = allred.Embedding("a", 2, optimizer=optim.SGD(0.1))
    with pytest.raises(InputError, match="admit_after must be less than"):
        allred.Embedding("a", 2, optimizer=optim.SGD(0.1), admit_after=2**32 + 1)
    for options in ({"accumulate": 2}, {"clip_norm": 1.0}, {"scaler": allred.GradScaler()}):
        with pytest.raises(InputError, match="cannot be used with tables"):
            allred.distributed(optim.SGD(0.1), tables=[table], **options)
    with pytest.raises(InputError, match="must be a list of allred"):
        allred.distributed(optim.SGD(0.1), tables=table)
    with pytest.raises(InputError, match="have the same name"):
        allred.distributed(optim.SGD(0.1), tables=[table, allred.Embedding("a", 2, optimizer=optim.SGD(0.1))])
    with pytest.raises(InputError, match="belongs to no optimizer"):
        table.lookup([1])
    allred.distributed(optim.SGD(0.1), tables=[table])
    with pytest.raises(InputError, match="belongs to another optimizer"):
        allred.distributed(optim.SGD(0.1), tables=[table])


def train(table, opt, params, rank, first, last):
    for number in range(first, last):
        table.lookup(ids_of(rank, number))
        table.gradient(gradients_of(rank, number, (30, DIM)))
        opt.step(params, {"w": np.full(2, number, np.float32)})


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_checkpoint_continues_with_the_same_bits(rank, size, dtype, tmp_path):
    directory = allred.broadcast_object(str(tmp_path))
    name, made = next(_names), []
    for _ in range(2):
        table = allred.Embedding(name, DIM, ROWS, optimizer=optim.Adam(0.1), dtype=dtype)
        made.append((table, allred.distributed(optim.Adam(0.1), tables=[table]), {"w": np.zeros(2, np.float32)}))
    train(*made[0], rank, 0, 3)
    path = made[0][1].save(directory, made[0][2])
    assert (path is not None) == (rank == 0)
    train(*made[0], rank, 3, 5)
    made[1][0].lookup(ids_of(rank, 99))  # its rows are replaced
    assert made[1][1].restore(directory, made[1][2]) == 3
    train(*made[1], rank, 3, 5)
    one, two = (table.export() for table, _, _ in made)
    np.testing.assert_array_equal(one["ids"], two["ids"])
    np.testing.assert_array_equal(one["vectors"], two["vectors"])
    np.testing.assert_array_equal(made[0][2]["w"], made[1][2]["w"])


def test_a_session_saves_and_restores_tables(rank, size, tmp_path):
    directory = allred.broadcast_object(str(tmp_path))
    name, exported = next(_names), []
    for last in (4, 7, 0):
        table = allred.Embedding(name, DIM, ROWS, optimizer=optim.Adagrad(0.1))
        opt = allred.distributed(optim.SGD(0.1), tables=[table])
        params = {"w": np.zeros(2, np.float32)}
        if not last:  # without a session
            opt.broadcast(params)
            train(table, opt, params, rank, 0, 7)
        else:
            with allred.Session(directory, save_steps=2) as session:
                session.track(params=params, optimizer=opt)
                for _ in session.steps(range(last - session.step)):
                    train(table, opt, params, rank, session.step, session.step + 1)
        exported.append(table.export())
    for column in ("ids", "vectors"):
        np.testing.assert_array_equal(exported[1][column], exported[2][column])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"dim": DIM + 1}, "the rows of table"),
        ({"optimizer": optim.Adam(0.1)}, "the rows of table"),
        ({"name": "another"}, "it has no table 'another'"),
    ],
)
def test_a_checkpoint_of_other_tables(changed, message, tmp_path):
    directory = allred.broadcast_object(str(tmp_path))
    options = {"name": next(_names), "dim": DIM, "optimizer": optim.SGD(0.1)}
    params = {"w": np.zeros(2, np.float32)}
    table, other = allred.Embedding(**options), allred.Embedding(**options | changed)
    opt, other_opt = (allred.distributed(optim.SGD(0.1), tables=[each]) for each in (table, other))
    table.lookup([1])
    step(opt)
    opt.save(directory, params)
    allred.barrier()
    with pytest.raises(CheckpointError, match=message):
        other_opt.restore(directory, params)


def test_rows_expire_when_a_checkpoint_is_written(rank, size, tmp_path):
    directory = allred.broadcast_object(str(tmp_path))
    table, opt = make("sgd", expire_after=2)
    for ids in ([1, 2], [2], [3]):
        table.lookup(ids)
        step(opt)
    assert table.size() == 3
    opt.save(directory, {"w": np.zeros(2, np.float32)})
    assert table.export()["ids"].tolist() == [2, 3]


def test_a_damaged_file_of_rows_is_found(rank, size, tmp_path):
    directory = allred.broadcast_object(str(tmp_path))
    table, opt = make("sgd")
    table.lookup(ids_of(rank, 0))
    step(opt)
    rows, params = table.size(), {"w": np.ones(2, np.float32)}
    path = opt.save(directory, {"w": np.zeros(2, np.float32)})
    if rank == 0:
        (file,) = pathlib.Path(path).glob("rows-*")
        assert allred.checkpoint.verify(path) == []
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        assert "is damaged: its checksum" in allred.checkpoint.verify(path)[0]
    allred.barrier()
    with pytest.raises(CheckpointError, match="is damaged"):
        opt.restore(directory, params)
    assert (params["w"] == 1).all()
    assert table.size() == rows


def test_prefetched_vectors_lack_the_steps_between(rank, size):
    table, opt = make("sgd")
    for number in range(3):
        ids = ids_of(rank, number).reshape(6, 5)
        before = table.lookup(ids, train=False)
        table.prefetch(ids)
        vectors = table.lookup(np.arange(ROWS), train=False)
        np.testing.assert_array_equal(table.lookup(ids), before)
        table.gradient(gradients_of(rank, number, before.shape))
        table.prefetch(ids)
        step(opt)
        stale = table.lookup(ids)
        np.testing.assert_array_equal(stale, before)
        fresh = table.lookup(ids, train=False)
        assert not np.array_equal(fresh, before)
        table.prefetch(ids, staleness=0)
        table.gradient(gradients_of(rank, number, before.shape), stale)
        step(opt)
        assert not np.array_equal(table.lookup(ids), fresh)  # the prefetched ones were too old
        step(opt)
    assert vectors.shape == (ROWS, DIM)


def test_all_ranks_use_prefetched_vectors_or_none(rank, size):
    table, opt = make("sgd")
    ids = ids_of(rank, 0)
    table.lookup(ids)
    table.gradient(np.ones((len(ids), DIM), np.float32))
    table.prefetch(ids)
    step(opt)
    vectors = table.lookup(ids[::-1] if rank == size - 1 else ids)
    fresh = table.lookup(ids, train=False)
    np.testing.assert_array_equal(vectors, fresh[::-1] if rank == size - 1 else fresh)


def test_wrong_prefetch_of_one_rank_is_an_error_on_all(rank, size):
    table, _ = make()
    with pytest.raises(InputError, match=r"prefetch\(\): rank 0|ids must be integers"):
        table.prefetch([0.5] if rank == size - 1 else [1])
    with pytest.raises(InputError, match="staleness must be an integer"):
        table.prefetch([1], staleness=-1)
