"""Handwritten digits with Keras 3, on TensorFlow, JAX or PyTorch: `model.fit` with averaged gradients.

    KERAS_BACKEND=tensorflow mpirun -np 2 python examples/keras_digits.py

Each rank trains on its share of the rows. The last lines are:

    parameters equal on all ranks: yes
    test accuracy: 0.9...
"""

import keras  # pip install keras, and tensorflow-cpu, jax or torch

try:
    from sklearn.datasets import load_digits
except ImportError:
    raise SystemExit("this example needs scikit-learn: pip install scikit-learn") from None

import allred
import allred.keras

EPOCHS, BATCH, TRAINING = 20, 60, 1440


def main():
    allred.init()
    digits = load_digits()
    x, y = (digits.data / 16).astype("float32"), digits.target
    mine = slice(allred.rank(), TRAINING, allred.size())  # every rank has the same number of rows

    model = keras.Sequential(
        [keras.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10, activation="softmax")]
    )
    optimizer = allred.keras.distributed(keras.optimizers.Adam(0.003))  # averages the gradients
    model.compile(optimizer, loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    callbacks = [allred.keras.callbacks.BroadcastGlobalVariables(0), allred.keras.callbacks.MetricAverage()]
    model.fit(x[mine], y[mine], batch_size=BATCH // allred.size(), epochs=EPOCHS, verbose=0, callbacks=callbacks)

    digests = allred.allgather_object(allred.digest(model.get_weights()))
    if allred.rank() == 0:
        accuracy = model.evaluate(x[TRAINING:], y[TRAINING:], verbose=0, return_dict=True)["accuracy"]
        print(f"parameters equal on all ranks: {'yes' if len(set(digests)) == 1 else 'no'}")
        print(f"test accuracy: {accuracy:.3f}")


if __name__ == "__main__":
    main()
