"""Cases of allred.tensorflow: collectives, tapes, TensorFlow 1. test_tensorflow_programs.py runs it."""

import functools
import re

import numpy as np
import pytest
import tensorflow as tf
from optimizer_case_runner import case, run_cases

import allred
import allred.tensorflow as hvd

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
TOTAL = SIZE * (SIZE + 1) // 2  # of rank + 1
tf1 = tf.compat.v1
EAGER_AND_GRAPH = (lambda function: function), tf.function


def raised(kind, function, *arguments):
    """The text of an error, which must be the same on all ranks."""
    with pytest.raises(kind) as found, hvd.raise_allred_errors():
        function(*arguments)
    texts = allred.allgather_object(str(found.value))
    assert len(set(texts)) == 1, texts
    return texts[0]


@case
def dtypes_and_operators():
    for dtype in (tf.uint8, tf.int8, tf.int32, tf.int64, tf.float16, tf.bfloat16, tf.float32, tf.float64):
        for shape in ((), (0,), (3,), (2, 1, 4), (70_000,)):  # the last one in the arena
            mine = tf.cast(tf.fill(shape, RANK + 1), dtype)
            expected = {hvd.Sum: TOTAL, hvd.Average: TOTAL / SIZE, hvd.Min: 1, hvd.Max: SIZE}
            expected[hvd.Average] = int(TOTAL / SIZE) if dtype.is_integer else TOTAL / SIZE
            for op, value in expected.items():
                for wrap in EAGER_AND_GRAPH[: 1 + (op is hvd.Average and shape != (0,))]:  # a graph takes 20 ms to make
                    found = wrap(functools.partial(hvd.allreduce, op=op))(mine)
                    assert (found.dtype, found.shape) == (dtype, mine.shape)
                    np.testing.assert_array_equal(found.numpy().astype("f8"), np.full(shape, value, "f8"))
    numbers = tf.constant([1 + 2j, RANK], tf.complex64)
    np.testing.assert_array_equal(hvd.allreduce(numbers, op=hvd.Sum), [SIZE * (1 + 2j), TOTAL - SIZE])
    assert hvd.allreduce(tf.constant([True, RANK == 0]), op=hvd.Max).numpy().tolist() == [True, True]


@case
def negative_integers_are_truncated():
    assert hvd.allreduce(tf.constant([-1 - RANK, 2**62 // SIZE], tf.int64)).numpy()[0] == -(TOTAL // SIZE)
    half = hvd.allreduce(tf.constant([7], tf.int32), op=hvd.Sum, prescale_factor=0.5)
    assert half.numpy() == [3 * SIZE]


@case
def the_arguments_are_not_changed():
    for wrap in EAGER_AND_GRAPH:
        value = tf.random.normal([20_000]) + RANK
        before = value.numpy().copy()
        operation = wrap(lambda x: (hvd.allreduce(x), x * 1.0, hvd.broadcast(x, 0), hvd.allgather(x)))
        _, copy, _, _ = operation(value)
        np.testing.assert_array_equal(copy, before)
        np.testing.assert_array_equal(value, before)


@case
def groups_of_different_dtypes():
    group = [tf.fill([2], RANK + 1.0), tf.fill([3], tf.cast(RANK + 1, tf.float64)), tf.constant(RANK + 1)]
    for wrap in EAGER_AND_GRAPH:
        found = wrap(lambda *each: hvd.grouped_allreduce(list(each), op=hvd.Sum, prescale_factor=2.0))(*group)
        assert [each.numpy().tolist() for each in found] == [[2.0 * TOTAL] * 2, [2.0 * TOTAL] * 3, 2 * TOTAL]
    assert hvd.grouped_allreduce([]) == []
    assert hvd.grouped_reducescatter([]) == []


@case
def rows_of_other_ranks():
    mine = tf.fill([RANK + 1, 2], RANK)
    rows = np.repeat(np.arange(SIZE), np.arange(1, SIZE + 1))
    for wrap in EAGER_AND_GRAPH:
        np.testing.assert_array_equal(wrap(hvd.allgather)(mine)[:, 0], rows)
        assert wrap(hvd.allgather)(tf.constant(RANK)).numpy().tolist() == list(range(SIZE))
        assert wrap(lambda x: hvd.broadcast(x, SIZE - 1))(tf.constant([RANK])).numpy() == [SIZE - 1]
        found, splits = wrap(lambda x: hvd.alltoall(x, splits=[2] * SIZE))(tf.range(2 * SIZE) + 100 * RANK)
        assert found.numpy().tolist() == [100 * rank + 2 * RANK + i for rank in range(SIZE) for i in range(2)]
        assert splits.numpy().tolist() == [2] * SIZE
        half = wrap(hvd.reducescatter)(tf.range(2.0 * SIZE + 1))
        begin = np.array_split(np.arange(2 * SIZE + 1), SIZE)[RANK]
        np.testing.assert_array_equal(half, begin)
    assert [int(each) for each in (hvd.rank_op(), hvd.size_op(), hvd.local_rank_op())] == [RANK, SIZE, hvd.local_rank()]


@case
def gradients_of_collectives():
    weight = tf.Variable([1.0, 2.0])
    factor = RANK + 1.0
    operations = {
        "allreduce": (lambda x: hvd.allreduce(x, op=hvd.Sum), TOTAL),
        "average": (lambda x: hvd.allreduce(x), TOTAL / SIZE),
        "allgather": (lambda x: hvd.allgather(x), TOTAL / SIZE),
        "broadcast": (lambda x: hvd.broadcast(x, 0), TOTAL / SIZE if RANK == 0 else 0.0),
        "group": (lambda x: hvd.grouped_allreduce([x, x])[1], TOTAL / SIZE),
    }
    assert tf.function(lambda: hvd.grouped_allgather([]))() == []
    for name, (operation, expected) in operations.items():
        for wrap in EAGER_AND_GRAPH:

            def gradient(operation=operation):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(operation(weight)) * factor
                return tape.gradient(loss, weight)

            np.testing.assert_allclose(wrap(gradient)(), [expected] * 2, err_msg=name)
    rows = tf.Variable(tf.range(2.0 * SIZE))
    for operation in (hvd.reducescatter, hvd.alltoall):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(operation(rows)) * factor
        expected = np.repeat(np.arange(1.0, SIZE + 1), 2)
        np.testing.assert_allclose(tape.gradient(loss, rows), expected)
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            loss = tf.reduce_sum(hvd.allreduce(weight**3))
        first = inner.gradient(loss, weight)
    np.testing.assert_allclose(outer.gradient(first, weight), 6 * weight, rtol=1e-6)


@case
def gradients_through_branches_and_loops():
    weight = tf.Variable([1.0, 2.0])

    def looped():
        total = 0.0
        for _ in tf.range(3):
            total += tf.reduce_sum(hvd.allreduce(weight * (RANK + 1.0)))
        return total

    losses = {
        "branch": lambda: tf.cond(
            weight[0] > 0, lambda: tf.reduce_sum(hvd.allreduce(weight * (RANK + 1.0))), lambda: 0.0
        ),
        "loop": looped,
        "map": lambda: tf.reduce_sum(tf.map_fn(lambda x: hvd.allreduce(x * weight * (RANK + 1.0)), tf.ones([3, 2]))),
    }
    for name, loss_of in losses.items():

        @tf.function
        def gradient(loss_of=loss_of):
            with tf.GradientTape() as tape:
                loss = loss_of()
            return tape.gradient(loss, weight)

        expected = (1 if name == "branch" else 3) * (RANK + 1.0)
        np.testing.assert_allclose(gradient(), [expected] * 2, err_msg=name)


@case
def a_second_model_with_the_same_names():
    """Its variables are broadcast after the first step, as programs for Horovod do, and are not compared before."""
    for _ in range(2):
        weight = tf.Variable([float(RANK)], name="weight")
        for step in range(3):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(weight * weight)
            weight.assign_sub(0.1 * hvd.DistributedGradientTape(tape).gradient(loss, [weight])[0])
            if step == 0:
                hvd.broadcast_variables([weight], root_rank=0)
        assert len(set(hvd.allgather_object(float(weight[0])))) == 1


@case
def compression():
    value = tf.fill([5], 1.0 + RANK)
    for kind in (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.int8):
        assert hvd.allreduce(value, compression=kind).numpy().tolist() == [TOTAL / SIZE] * 5
    with pytest.raises(ValueError, match="compression=3"):
        hvd.allreduce(value, compression=3)


@case
def tapes():
    weight, table = tf.Variable([1.0, 2.0], name="weight"), tf.Variable(tf.zeros([4 + SIZE, 2]), name="table")
    unused = tf.Variable(1.0)
    for wrap in EAGER_AND_GRAPH:

        @wrap
        def gradients(**options):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(weight * (RANK + 1.0)) + tf.reduce_sum(tf.gather(table, [RANK, SIZE]))
            return hvd.DistributedGradientTape(tape, **options).gradient(loss, [weight, table, unused])

        dense, rows, missing = gradients()
        assert (dense.numpy().tolist(), missing) == ([TOTAL / SIZE] * 2, None)
        assert rows.indices.numpy().tolist() == [each for rank in range(SIZE) for each in (rank, SIZE)]
        np.testing.assert_allclose(rows.values, np.full((2 * SIZE, 2), 1 / SIZE))
        expected = np.zeros((4 + SIZE, 2))
        expected[: SIZE + 1] = 1 / SIZE
        expected[SIZE] = 1
        np.testing.assert_allclose(gradients(sparse_as_dense=True)[1], expected, rtol=1e-6)
        total = gradients(op=hvd.Sum, compression=hvd.Compression.fp16, sparse_as_dense=True)
        np.testing.assert_allclose(total[0], [TOTAL] * 2)
        halves = gradients(gradient_predivide_factor=2.0, sparse_as_dense=True)
        np.testing.assert_allclose(halves[0], [TOTAL / SIZE] * 2)
    with tf.GradientTape(persistent=True) as tape:
        loss = tf.reduce_sum(weight * (RANK + 1.0))
    tape = hvd.DistributedGradientTape(tape)
    assert isinstance(tape, tf.GradientTape)
    tape.register_local_source(weight)
    with pytest.raises(allred.InputError, match="expected layers of Keras, got 3"):
        hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=3)
    np.testing.assert_allclose(tape.gradient(loss, weight), [(RANK + 1) / SIZE] * 2)
    ((_, local),), others = tape.get_local_and_global_gradients(loss, [weight])
    np.testing.assert_allclose(local, [(RANK + 1) / SIZE] * 2, rtol=1e-6)
    assert others == []


@case
def ranks_that_differ():
    if SIZE == 1:
        return
    for wrap in EAGER_AND_GRAPH:
        text = raised(allred.MismatchError, wrap(hvd.allreduce), tf.zeros([2 + RANK]))
        assert "float32 (3,) on rank 1" in text, text
        text = raised(
            allred.MismatchError, wrap(functools.partial(hvd.allreduce, name="a" if RANK else "b")), tf.zeros(2)
        )
        assert {"'a'", "'b'"} <= set(re.findall(r"'\w'", text)), text
    with pytest.raises(tf.errors.FailedPreconditionError) as found:
        hvd.allreduce(tf.zeros([2 + RANK]))
    assert isinstance(found.value, hvd.HorovodInternalError)
    with pytest.raises(tf.errors.InvalidArgumentError, match="splits"):
        hvd.alltoall(tf.zeros(SIZE), splits=[5] * SIZE)
    weight = tf.Variable([1.0 + RANK], name="weight")

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight)
        hvd.DistributedGradientTape(tape).gradient(loss, [weight])

    step()  # programs may copy the variables of one rank after it
    text = raised(allred.DriftError, step)
    assert "parameter 'weight' differs on rank" in text, text
    assert hvd.allreduce(1.0 * RANK).numpy() == (SIZE - 1) / 2  # usable afterwards


@case
def operations_of_a_graph_have_numbers():
    """Two graphs with operations of equal shapes in another order: an error, not a wrong result."""
    if SIZE == 1:
        return

    @tf.function
    def both(x):
        first = hvd.allreduce(x, name="first" if RANK == 0 else "second")
        return first, hvd.allreduce(x * 2, name="second" if RANK == 0 else "first")

    assert "'first'" in raised(allred.MismatchError, both, tf.zeros(2))


@case
def functions_and_branches_run_in_the_order_of_the_program():
    first, second = tf.Variable(tf.fill([3], RANK + 1.0)), tf.Variable(tf.fill([3], 10.0 * (RANK + 1)))

    @tf.function
    def reduce(variable):
        return hvd.allreduce(variable, op=hvd.Sum)

    @tf.function
    def all_of_them():
        branches = [
            tf.cond(first[0] > 0, lambda v=v: hvd.allreduce(v, op=hvd.Sum), lambda v=v: v * 1) for v in (first, second)
        ]
        return [reduce(first), reduce(second), *branches]

    for _ in range(20):
        assert [float(each[0]) for each in all_of_them()] == [TOTAL, 10 * TOTAL] * 2


@case
def values_without_a_dense_array_are_refused():
    with pytest.raises(allred.InputError, match="splits must be integers, but is float32"):
        hvd.alltoall(tf.ones(SIZE), [1.5] * SIZE)
    for value in (tf.constant(["a"]), tf.ragged.constant([[1.0], [2.0, 3.0]]), tf.sparse.from_dense([[1.0, 0.0]])):
        for operation in (hvd.allreduce, hvd.allgather, hvd.reducescatter):
            with pytest.raises(allred.InputError, match="not supported"):
                operation(value)


@case
def jit_compile_is_refused():
    text = raised(allred.InputError, tf.function(hvd.allreduce, jit_compile=True), tf.zeros(2))
    assert "pass jit_compile=False" in text


@case
def variables_and_objects():
    variables = [tf.Variable([1.0 + RANK, 2.0]), tf.Variable(RANK), tf.Variable(RANK > 0)]
    hvd.broadcast_variables(variables, root_rank=SIZE - 1)
    assert [each.numpy().tolist() for each in variables] == [[SIZE, 2.0], SIZE - 1, SIZE > 1]
    found = tf.function(lambda: hvd.broadcast_(variables[:1], 0))()
    assert found[0].numpy().tolist() == [SIZE, 2.0]
    assert hvd.broadcast_object({"rank": RANK}, SIZE - 1) == {"rank": SIZE - 1}
    assert hvd.broadcast_object_fn(0)(RANK) == 0
    assert hvd.allgather_object([RANK]) == [[rank] for rank in range(SIZE)]
    text = raised(allred.InputError, hvd.broadcast_object, (each for each in ()), 0)
    assert "cannot be pickled" in text
    with pytest.raises(allred.InputError, match="expected a variable"):
        hvd.broadcast_variables([3.0], 0)
    with pytest.raises(RuntimeError, match="eager execution"):
        hvd.broadcast_global_variables(0)


@case
def batch_normalization_over_all_ranks():
    images = np.random.default_rng(0).normal(3.0, 2.0, size=(4 * SIZE, 5, 3)).astype(np.float32)
    begin, end = 4 * RANK + (RANK == 1), 4 * RANK + 4 + (RANK == 0 and SIZE > 1)  # ranks have different numbers of rows
    layer, whole = hvd.SyncBatchNormalization(axis=-1, momentum=0.5), tf.keras.layers.BatchNormalization(momentum=0.5)
    found = layer(images[begin:end], training=True)
    np.testing.assert_allclose(found, whole(images, training=True)[begin:end], rtol=0, atol=1e-5)
    for own, expected in zip(layer.weights, whole.weights, strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-5)
    np.testing.assert_allclose(layer(images), whole(images), rtol=1e-5, atol=1e-5)


@case
def process_sets():
    if SIZE == 1:  # the only set exists already
        return
    last = hvd.add_process_set([SIZE - 1])
    if RANK == SIZE - 1:
        assert hvd.allreduce(tf.constant([5.0 + RANK]), process_set=last).numpy() == [5.0 + RANK]
        assert int(hvd.size_op(last.process_set_id)) == 1
    elif SIZE > 1:
        with pytest.raises(ValueError, match="not in"):
            hvd.allreduce(tf.zeros(1), process_set=last)
    weight = tf.Variable([1.0])
    with tf.GradientTape() as tape:
        loss = weight * (RANK + 1.0)
    assert hvd.DistributedGradientTape(tape, process_set=last).gradient(loss, weight).numpy() == [RANK + 1.0]
    hvd.remove_process_set(last)


@case
def ranks_with_fewer_batches_join():
    results = [hvd.allreduce(tf.constant(1.0), name="x").numpy() for _ in range(RANK + 1)]
    last = hvd.join()
    assert last == SIZE - 1
    np.testing.assert_allclose(results, [(SIZE - step) / SIZE for step in range(RANK + 1)])


def session_of(graph_of, steps, *runs, hooks=()):
    """Run a graph of TensorFlow 1."""
    with tf.Graph().as_default():
        fetches = graph_of()
        with tf1.train.MonitoredTrainingSession(hooks=list(hooks)) as session:
            return [session.run(fetches) for _ in range(steps)]


@case
def training_in_a_graph_of_tensorflow_1():
    x = np.random.default_rng(7).normal(size=(SIZE, 8, 3)).astype(np.float32)
    y = x @ np.array([[1.0], [2.0], [3.0]], np.float32)

    def graph(images, labels, distribute):
        weight = tf1.get_variable("weight", initializer=np.full((3, 1), RANK * distribute, np.float32))
        loss = tf.reduce_mean((images @ weight - labels) ** 2)
        optimizer = tf1.train.MomentumOptimizer(0.1, 0.9)
        step = tf1.train.get_or_create_global_step()
        train = (hvd.DistributedOptimizer(optimizer) if distribute else optimizer).minimize(loss, global_step=step)
        with tf.control_dependencies([train]):
            return weight.read_value(), step.read_value()

    hooks = [hvd.BroadcastGlobalVariablesHook(0)]
    found = session_of(lambda: graph(x[RANK], y[RANK], True), 20, hooks=hooks)
    alone = session_of(lambda: graph(x.reshape(-1, 3), y.reshape(-1, 1), False), 20)
    np.testing.assert_allclose(found[-1][0], alone[-1][0], rtol=0, atol=1e-6)
    assert found[-1][1] == 20
    assert len(set(hvd.allgather_object(found[-1][0].tobytes()))) == 1


@case
def two_operations_in_one_run_of_tensorflow_1():
    """They have no order: a result, or an error that names one of them; never a wrong result."""
    with tf.Graph().as_default():
        operations = [hvd.allreduce(tf.constant(1.0 + RANK) * number, op=hvd.Sum) for number in range(1, 5)]
        with tf1.Session() as session:
            try:
                assert session.run(operations) == [TOTAL * number for number in range(1, 5)]
            except tf.errors.OpError as error:
                known = "of the graph" in str(error)
                assert known


@case
def backward_passes_in_a_graph_of_tensorflow_1():
    for averages in (False, True):
        with tf.Graph().as_default():
            weight = tf1.get_variable("weight", initializer=[0.0, 0.0])
            other = tf1.get_variable("other", initializer=0.0)
            optimizer = hvd.DistributedOptimizer(
                tf1.train.AdagradOptimizer(1.0) if averages else tf1.train.GradientDescentOptimizer(1.0),
                backward_passes_per_step=3,
                average_aggregated_gradients=averages,
            )
            optimizer.register_local_var(other)
            step = tf1.train.get_or_create_global_step()
            train = optimizer.minimize(tf.reduce_sum(weight + other) * (RANK + 1.0), global_step=step)
            with tf1.Session() as session:
                session.run([tf1.global_variables_initializer(), tf1.local_variables_initializer()])
                found = []
                for _ in range(7):
                    session.run(train)
                    found.append(session.run([weight, other, step]))
        assert [int(each) for *_, each in found] == [1, 2, 3, 4, 5, 6, 7]
        weights = [float(each[0]) for each, *_ in found]
        assert weights[0] == weights[1] == 0.0
        assert weights[2] == weights[4]
        assert weights[5] == weights[6]
        if not averages:
            np.testing.assert_allclose(weights[::3], [0.0, -3 * TOTAL / SIZE, -6 * TOTAL / SIZE])
            assert found[2][1] == pytest.approx(-3 * 2 * (RANK + 1) / SIZE)


if __name__ == "__main__":
    run_cases()
