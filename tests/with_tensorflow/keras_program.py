"""Cases of allred.keras on the backend KERAS_BACKEND; test_tensorflow_programs.py runs it on all three.

Expected values come from one process: each rank also trains on the global batches alone.
"""

import functools
import pathlib
import tempfile

import keras
import numpy as np
import pytest
from optimizer_case_runner import case, run_cases

import allred
import allred.keras
from allred.errors import CheckpointError, DriftError, InputError, MismatchError, NonFiniteError
from allred.keras import callbacks, distributed, raise_allred_errors
from allred.keras.callback_mixins import numpy_value
from allred.keras.variable_names import names_of

allred.init(banner=False)
RANK, SIZE = allred.rank(), allred.size()
ROWS, STEPS = 6, 8  # rows of a batch on each rank; batches in an epoch
BROADCAST = callbacks.BroadcastGlobalVariables


def rows(rank, seed=0):
    random = np.random.default_rng(100 * seed + rank)
    x = random.normal(size=(ROWS * STEPS, 8)).astype(np.float32)
    return x, x[:, :2] ** 2 + x[:, 2:3]


def global_rows():
    """The rows of all ranks, so that each global batch is the batches of the ranks."""
    parts = [[each.reshape(STEPS, ROWS, -1) for each in rows(rank)] for rank in range(SIZE)]
    return tuple(np.concatenate(each, axis=1).reshape(STEPS * ROWS * SIZE, -1) for each in zip(*parts, strict=True))


def network(seed, *layers):
    """A model with weights that depend on the seed."""
    keras.utils.set_random_seed(seed)
    inner = layers or (keras.layers.Dense(16, activation="tanh"),)
    return keras.Sequential([keras.Input((8,)), *inner, keras.layers.Dense(2)])


def fit(model, optimizer, data, size=ROWS, **options):
    model.compile(optimizer, loss="mse")
    x, y = data
    return model.fit(x, y, batch_size=size, shuffle=False, verbose=0, **options)


def train(make, epochs=2, seed=RANK, **options):
    """Train on this rank's rows."""
    model = network(seed)
    fit(model, distributed(make(), **options), rows(RANK), epochs=epochs, callbacks=[BROADCAST(0)])
    return model


def weights(model):
    return np.concatenate([np.ravel(each) for each in model.get_weights()])


def equal_on_all_ranks(array):
    return len(set(allred.allgather_object(np.asarray(array).tobytes()))) == 1


def raised(kind, function, *arguments):
    """The text of an error, which must be the same on all ranks."""
    with pytest.raises(kind) as found, raise_allred_errors():
        function(*arguments)
    text = str(found.value)
    assert len(set(allred.allgather_object(text))) == 1
    return text


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.01, clipnorm=0.5),
    "schedule": lambda: keras.optimizers.RMSprop(keras.optimizers.schedules.ExponentialDecay(0.01, 4, 0.9)),
    "average": lambda: keras.optimizers.AdamW(0.01, use_ema=True, ema_overwrite_frequency=4, global_clipnorm=1.0),
}


@case
def training_equals_one_process_on_the_global_batches():
    names = OPTIMIZERS if keras.backend.backend() == "torch" else ("sgd", "average")  # compilation takes seconds
    for name in names:
        make = OPTIMIZERS[name]
        model, alone = train(make, ordered=name != "sgd"), network(0)
        fit(alone, make(), global_rows(), ROWS * SIZE, epochs=2)
        assert equal_on_all_ranks(weights(model)), name
        np.testing.assert_allclose(weights(model), weights(alone), rtol=0, atol=1e-6, err_msg=name)
        assert model.optimizer.allred.global_step == 2 * STEPS


@case
def accumulation_communicates_once_for_several_batches():
    model, alone = train(OPTIMIZERS["sgd"], accumulate=4), network(0)
    x, y = (each.reshape(2 * 4 * ROWS * SIZE, -1) for each in global_rows())
    fit(alone, OPTIMIZERS["sgd"](), (x, y), 4 * ROWS * SIZE, epochs=2)
    np.testing.assert_allclose(weights(model), weights(alone), rtol=0, atol=1e-6)
    assert equal_on_all_ranks(weights(model))
    assert model.optimizer.allred.global_step == 4
    assert int(numpy_value(model.optimizer.iterations)) == 4


@case
def accumulated_updates_have_the_full_size():
    """Adam and averages of weights depend on the number of updates. An Embedding may have tf.IndexedSlices."""

    def embedded(seed):
        keras.utils.set_random_seed(seed)
        layers = keras.layers.Embedding(20, 4), keras.layers.Flatten(), keras.layers.Dense(2)
        return keras.Sequential([keras.Input((3,), dtype="int32"), *layers])

    def integers(rank):
        random = np.random.default_rng(rank)
        return random.integers(0, 20, size=(24, 3)), random.normal(size=(24, 2)).astype(np.float32)

    def floats(rank):
        return tuple(each[:24] for each in rows(rank))

    adam, sgd = (
        functools.partial(keras.optimizers.Adam, 0.01, use_ema=True),
        functools.partial(keras.optimizers.SGD, 0.1),
    )
    for make, data, optimizer in ((network, floats, adam), (embedded, integers, sgd)):
        model, alone = make(RANK), make(0)
        fit(model, distributed(optimizer(), accumulate=4), data(RANK), callbacks=[BROADCAST(0)])
        everyone = tuple(np.concatenate(each) for each in zip(*map(data, range(SIZE)), strict=True))
        fit(alone, optimizer(), everyone, 24 * SIZE)
        np.testing.assert_allclose(weights(model), weights(alone), rtol=0, atol=1e-6)


@case
def gradients_that_are_not_finite():
    x, y = rows(RANK)
    if RANK == SIZE - 1:
        x[ROWS + 1, 3] = np.nan  # in the second batch
    model = network(0)
    text = raised(NonFiniteError, fit, model, distributed(OPTIMIZERS["sgd"]()), (x, y))
    assert f"'dense/kernel' on rank {SIZE - 1}" in text, text
    model, other = network(0), network(0)
    fit(model, distributed(OPTIMIZERS["sgd"](), nonfinite="skip"), (x, y))
    assert model.optimizer.allred.skipped == 1
    assert int(numpy_value(model.optimizer.iterations)) == STEPS - 1
    keep = np.r_[:ROWS, 2 * ROWS : STEPS * ROWS]
    fit(other, distributed(OPTIMIZERS["sgd"]()), (x[keep], y[keep]))
    assert weights(model).tobytes() == weights(other).tobytes()


@case
def ranks_that_differ():
    if SIZE == 1:
        return
    text = raised(DriftError, fit, network(RANK), distributed(OPTIMIZERS["sgd"]()), rows(RANK))
    assert "parameter 'dense/kernel' differs on rank" in text, text
    model = network(0, keras.layers.Dense(16 + (RANK == 1), activation="tanh"))
    assert "(17,) on rank 1" in raised(MismatchError, fit, model, distributed(OPTIMIZERS["sgd"]()), rows(RANK))
    model, others = network(RANK, keras.layers.Dense(16 + (RANK == 1))), [BROADCAST(0)]

    def fit_with_broadcast():
        fit(model, distributed(OPTIMIZERS["sgd"]()), rows(RANK), callbacks=others)

    assert "'dense/kernel'" in raised(MismatchError, fit_with_broadcast)


@case
def what_is_refused():
    for wrong in (3, keras.optimizers.SGD, "sgd"):
        with pytest.raises(InputError, match="expected an optimizer of Keras"):
            distributed(wrong)
    once = distributed(OPTIMIZERS["sgd"]())
    with pytest.raises(InputError, match="this optimizer was already passed"):
        distributed(once)
    with pytest.raises(InputError, match="pass accumulate="):
        distributed(keras.optimizers.SGD(gradient_accumulation_steps=2))
    if SIZE > 1:
        with pytest.raises(InputError, match="train apart"):
            fit(network(0), OPTIMIZERS["sgd"](), rows(RANK), callbacks=[BROADCAST(0)])
    with pytest.raises(InputError, match="compile the model"):
        callbacks.Checkpoints("unused", network(0))


@case
def a_loss_scale():
    model = network(RANK)
    optimizer = distributed(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01), initial_scale=64.0))
    x, y = rows(RANK)
    if RANK == 0:
        x[1, 1] = np.inf  # of the first batch: the scale is halved on all ranks
    fit(model, optimizer, (x, y), callbacks=[BROADCAST(0)])
    assert equal_on_all_ranks(weights(model))
    assert np.isfinite(weights(model)).all()
    assert float(numpy_value(optimizer.dynamic_scale)) == 32.0
    inner = distributed(keras.optimizers.SGD(0.01))
    with pytest.raises(
        InputError, match=r"allred.keras.distributed\(keras.optimizers.LossScaleOptimizer\(optimizer\)\)"
    ):
        fit(network(0), keras.optimizers.LossScaleOptimizer(inner), rows(RANK))


@case
def gradients_of_embeddings():
    random = np.random.default_rng(RANK)
    x, y = random.integers(0, 20, size=(32, 3)), random.normal(size=(32, 3, 4)).astype(np.float32)
    keras.utils.set_random_seed(RANK)
    model = keras.Sequential([keras.Input((3,), dtype="int32"), keras.layers.Embedding(20, 4)])
    model.compile(distributed(keras.optimizers.SGD(0.5)), loss="mse")
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=[BROADCAST(0)])
    assert equal_on_all_ranks(weights(model))
    everyone = [np.concatenate(allred.allgather_object(each)) for each in (x, y)]
    order = np.arange(32 * SIZE).reshape(SIZE, 4, 8).transpose(1, 0, 2).ravel()
    keras.utils.set_random_seed(0)
    alone = keras.Sequential([keras.Input((3,), dtype="int32"), keras.layers.Embedding(20, 4)])
    alone.compile(keras.optimizers.SGD(0.5), loss="mse")
    alone.fit(everyone[0][order], everyone[1][order], batch_size=8 * SIZE, shuffle=False, verbose=0)
    np.testing.assert_allclose(weights(model), weights(alone), rtol=0, atol=1e-6)


@case
def a_process_set():
    if SIZE < 2:
        return
    pair = allred.ProcessSet([0, 1])
    model = network(min(RANK, 1) if RANK < 2 else RANK)
    if RANK < 2:
        model.set_weights([np.zeros_like(each) for each in model.get_weights()])
        fit(model, distributed(keras.optimizers.SGD(0.1), process_set=pair), rows(RANK))
    found = allred.allgather_object(weights(model).tobytes())
    assert found[0] == found[1]


@case
def metrics_are_averaged():
    model = network(0)
    seen = []

    class Seen(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append(dict(logs))

    model.compile(distributed(keras.optimizers.SGD(0.0)), loss="mse", metrics=["mae"])
    x, y = rows(RANK)
    local = model.evaluate(x, y, verbose=0, return_dict=True)
    model.fit(x, y, batch_size=ROWS, verbose=0, callbacks=[callbacks.MetricAverage(), Seen()], validation_data=(x, y))
    assert equal_on_all_ranks(np.array([seen[0][name] for name in sorted(seen[0])]))
    expected = np.mean(allred.allgather_object(local["loss"]))
    np.testing.assert_allclose(seen[0]["val_loss"], expected, rtol=1e-5)


@case
def learning_rates():
    model = network(0)
    rates = []

    class Rates(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            rates.append(float(numpy_value(self.model.optimizer.learning_rate)))

    warmup = callbacks.LearningRateWarmup(0.08, warmup_epochs=2)
    later = callbacks.LearningRateSchedule(0.08, multiplier=0.5, start_epoch=3, end_epoch=5)
    found = fit(model, distributed(keras.optimizers.SGD(1.0)), rows(RANK), epochs=5, callbacks=[warmup, later, Rates()])
    steps = np.arange(1, 2 * STEPS + 1) / STEPS
    np.testing.assert_allclose(rates[: 2 * STEPS], 0.08 / SIZE * (steps * (SIZE - 1) / 2 + 1), rtol=1e-5)
    np.testing.assert_allclose(rates[2 * STEPS :], np.repeat([0.08, 0.08, 0.04], STEPS), rtol=1e-6)
    np.testing.assert_allclose(found.history["lr"][-2:], [0.08, 0.04], rtol=1e-6)


@case
def a_model_is_saved_and_loaded_with_and_without_allred():
    model = train(OPTIMIZERS["adam"])
    path = pathlib.Path(tempfile.mkdtemp()) / "model.keras"
    model.save(path)
    loaded = keras.models.load_model(path)
    assert type(loaded.optimizer) is type(OPTIMIZERS["adam"]())
    assert not hasattr(loaded.optimizer, "allred")
    assert weights(loaded).tobytes() == weights(model).tobytes()
    x, y = rows(RANK, 1)
    loaded.compile(distributed(loaded.optimizer), loss="mse")
    for each in (model, loaded):
        each.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0)
    assert weights(loaded).tobytes() == weights(model).tobytes()
    assert int(numpy_value(loaded.optimizer.iterations)) == 3 * STEPS


def checkpointed(directory, epochs, seed=RANK, **options):
    """Train with checkpoints. Returns the model, and the epoch that training began with."""
    model = network(seed)
    model.compile(distributed(OPTIMIZERS["adam"]()), loss="mse")
    checkpoints = callbacks.Checkpoints(directory, model, **options)
    begin = checkpoints.epoch
    x, y = rows(RANK)
    model.fit(
        x, y, batch_size=ROWS, shuffle=False, verbose=0, epochs=epochs, initial_epoch=begin, callbacks=[checkpoints]
    )
    return model, begin


@case
def training_continues_from_a_checkpoint():
    directory = allred.broadcast_object(tempfile.mkdtemp())
    _first, begin = checkpointed(directory, 2)
    second, later = checkpointed(directory, 4, RANK + 10)
    whole, _ = checkpointed(f"{directory}-whole", 4, save_steps=3)
    assert (begin, later) == (0, 2)
    assert second.optimizer.allred.global_step == 4 * STEPS
    assert weights(second).tobytes() == weights(whole).tobytes()
    states = [[numpy_value(each).tobytes() for each in model.optimizer.variables] for model in (second, whole)]
    assert states[0] == states[1]
    wrong = network(0, keras.layers.Dense(7))
    wrong.compile(distributed(OPTIMIZERS["adam"]()), loss="mse")
    assert "of another model" in raised(CheckpointError, callbacks.Checkpoints, directory, wrong)


@case
def a_model_is_copied_saved_and_restored_without_fit():
    directory = allred.broadcast_object(tempfile.mkdtemp())
    model, other = network(RANK), network(RANK + 10)
    for each in (model, other):
        each.compile(distributed(OPTIMIZERS["adam"]()), loss="mse")
    model.optimizer.allred.broadcast(model)
    assert equal_on_all_ranks(weights(model))
    x, y = rows(RANK)
    model.train_on_batch(x[:ROWS], y[:ROWS])
    model.optimizer.allred.save(directory, model)
    allred.barrier()
    assert other.optimizer.allred.restore(directory, other) == 1
    assert weights(other).tobytes() == weights(model).tobytes()
    pairs = zip(model.optimizer.variables, other.optimizer.variables, strict=True)
    assert all(numpy_value(one).tobytes() == numpy_value(two).tobytes() for one, two in pairs)


@case
def names_do_not_depend_on_earlier_models():
    model = network(0, keras.layers.Dense(3), keras.layers.Dense(3, name="head_2"), keras.layers.Dense(3))
    expected = [f"{layer}/{part}" for layer in ("dense", "head_2", "dense_1", "dense_2") for part in ("kernel", "bias")]
    assert names_of(model.weights) == expected
    with tempfile.TemporaryDirectory() as directory:
        model.save(f"{directory}/m.keras")
        assert names_of(keras.models.load_model(f"{directory}/m.keras").weights) == expected


@case
def moving_averages_of_weights_are_not_trained_on():
    directory = allred.broadcast_object(tempfile.mkdtemp())

    def train_to(epochs, path):
        model = network(RANK)
        model.compile(distributed(keras.optimizers.SGD(0.05, momentum=0.9, use_ema=True)), loss="mse")
        checkpoints = callbacks.Checkpoints(path, model)
        x, y = rows(RANK)
        options = {"initial_epoch": checkpoints.epoch, "callbacks": [checkpoints]}
        model.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0, epochs=epochs, **options)
        return weights(model)

    train_to(2, directory)
    assert train_to(4, directory).tobytes() == train_to(4, f"{directory}-whole").tobytes()


@case
def a_model_that_is_built_in_the_first_batch():
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = keras.layers.Dense(2)

        def call(self, x):
            return self.inner(x)

    class NotBuilt(BROADCAST):  # Keras builds the model before `fit`, but not if it has its own train_step
        def on_train_begin(self, logs=None):
            built, self.model.built = self.model.built, False
            super().on_train_begin(logs)
            self.model.built = built

    keras.utils.set_random_seed(RANK)
    model = Model()
    fit(model, distributed(OPTIMIZERS["sgd"]()), rows(RANK), epochs=2, callbacks=[NotBuilt(0)])
    assert equal_on_all_ranks(weights(model))


@case
def weights_of_bfloat16():
    directory = allred.broadcast_object(tempfile.mkdtemp())
    model = network(RANK, keras.layers.Dense(3, dtype="bfloat16"))
    fit(model, distributed(OPTIMIZERS["sgd"]()), rows(RANK), callbacks=[BROADCAST(0)])
    before = [numpy_value(each).copy() for each in model.weights]
    model.optimizer.allred.save(directory, model)
    allred.barrier()
    for each in model.weights:
        each.assign(keras.ops.zeros(each.shape))
    model.optimizer.allred.restore(directory, model)
    after = [numpy_value(each) for each in model.weights]
    assert all(one.tobytes() == two.tobytes() and one.any() for one, two in zip(before, after, strict=True))


@case
def a_summary_names_keras():
    model = train(OPTIMIZERS["sgd"], epochs=1)
    assert f"{SIZE} rank" in model.optimizer.allred.summary()


if __name__ == "__main__":
    run_cases()
