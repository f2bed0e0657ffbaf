"""Cases of horovod.tensorflow.keras with Keras 2 (the package tf_keras); test_tensorflow_programs.py runs it."""

import allred.compat.horovod  # noqa: F401  (import horovod)

# isort: split

import horovod.tensorflow.keras as hvd
import numpy as np
import pytest
import tensorflow as tf
from optimizer_case_runner import case, run_cases

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
assert hasattr(tf.keras.optimizers.SGD(), "minimize"), "this is Keras 3"


def rows(rank):
    x = np.random.default_rng(rank).normal(size=(48, 8)).astype(np.float32)
    return x, x[:, :2] ** 2


def global_rows():
    parts = [[each.reshape(8, 6, -1) for each in rows(rank)] for rank in range(SIZE)]
    return tuple(np.concatenate(each, axis=1).reshape(48 * SIZE, -1) for each in zip(*parts, strict=True))


def network(seed, **options):
    tf.keras.utils.set_random_seed(seed)
    return tf.keras.Sequential([tf.keras.layers.Dense(16, "tanh", **options), tf.keras.layers.Dense(2)])


def fit(model, optimizer, data, size=6, **options):
    model.compile(optimizer, "mse")
    return model.fit(*data, batch_size=size, shuffle=False, verbose=0, **options)


def weights(model):
    return np.concatenate([each.ravel() for each in model.get_weights()])


def callbacks():
    return [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]


@case
def training_equals_one_process_on_the_global_batches():
    makes = {
        "adam": lambda: tf.keras.optimizers.Adam(0.01),
        "legacy": lambda: tf.keras.optimizers.legacy.SGD(0.05, momentum=0.9),
    }
    for name, make in makes.items():
        model, alone = network(RANK, input_shape=(8,)), network(0, input_shape=(8,))
        found = fit(model, hvd.DistributedOptimizer(make()), rows(RANK), epochs=2, callbacks=callbacks())
        expected = fit(alone, make(), global_rows(), 6 * SIZE, epochs=2)
        np.testing.assert_allclose(weights(model), weights(alone), rtol=0, atol=1e-6, err_msg=name)
        np.testing.assert_allclose(found.history["loss"], expected.history["loss"], rtol=1e-5)
        assert len(set(hvd.allgather_object(weights(model).tobytes()))) == 1


@case
def a_model_that_is_built_in_the_first_batch():
    """Its weights are copied after this batch, as in Horovod."""
    model = network(RANK)
    fit(model, hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.05)), rows(RANK), epochs=2, callbacks=callbacks())
    assert len(set(hvd.allgather_object(weights(model).tobytes()))) == 1


@case
def backward_passes():
    for kind in (tf.keras.optimizers.SGD, tf.keras.optimizers.legacy.SGD):
        model, alone = network(0, input_shape=(8,)), network(0, input_shape=(8,))
        optimizer = hvd.DistributedOptimizer(kind(0.05), backward_passes_per_step=4, average_aggregated_gradients=True)
        fit(model, optimizer, rows(RANK))
        x, y = global_rows()
        fit(alone, kind(0.05), (x, y), 4 * 6 * SIZE)
        np.testing.assert_allclose(weights(model), weights(alone), rtol=0, atol=1e-6)
        assert int(optimizer.iterations) == 8


@case
def learning_rates_and_momentum():
    optimizer = tf.keras.optimizers.legacy.SGD(1.0, momentum=0.9)
    model, seen = network(0, input_shape=(8,)), []

    class Seen(tf.keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            seen.append((float(optimizer.learning_rate), float(optimizer.momentum)))

    schedule = hvd.callbacks.LearningRateScheduleCallback(0.1, 0.5, momentum_correction=True)
    fit(model, hvd.DistributedOptimizer(optimizer), rows(RANK), epochs=2, callbacks=[*callbacks(), schedule, Seen()])
    assert [rate for rate, _ in seen] == pytest.approx([0.1] * 8 + [0.05] * 8)


@case
def collectives_on_values():
    assert np.asarray(hvd.allreduce(np.array([1.0 + RANK]))).tolist() == [(SIZE + 1) / 2]
    assert np.asarray(hvd.allgather([RANK])).tolist() == list(range(SIZE))
    assert np.asarray(hvd.broadcast([RANK], SIZE - 1)).tolist() == [SIZE - 1]


@case
def a_model_is_saved_and_loaded(directory=None):
    import pathlib
    import tempfile

    model = network(0, input_shape=(8,))
    fit(model, hvd.DistributedOptimizer(tf.keras.optimizers.Adam(0.01)), rows(RANK))
    path = pathlib.Path(tempfile.mkdtemp()) / "model.keras"
    model.save(path)
    loaded = hvd.load_model(path)
    assert hasattr(loaded.optimizer, "allred")
    for each in (model, loaded):
        each.fit(*rows(RANK), batch_size=6, shuffle=False, verbose=0)
    assert weights(loaded).tobytes() == weights(model).tobytes()


if __name__ == "__main__":
    run_cases()
