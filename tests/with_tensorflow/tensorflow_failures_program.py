"""One failure, which the first argument names, while ranks train with Keras on TensorFlow. test_tensorflow_failures.py
runs it."""

import os
import signal
import sys
import threading
import time

import keras
import numpy as np
import tensorflow as tf

import allred
import allred.keras
import allred.tensorflow as hvd

FAILURE = sys.argv[1]
allred.init()
RANK = allred.rank()


class Fails(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch != 2 or RANK != 1:
            return
        if FAILURE == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif FAILURE == "raises":
            raise ArithmeticError("the reason")
        elif FAILURE in ("late", "interrupted"):
            time.sleep(20)
        elif FAILURE == "terminated":
            os.kill(os.getpid(), signal.SIGTERM)


def interrupt_later():
    time.sleep(3)
    os.kill(os.getpid(), signal.SIGINT)


model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="ones")])
model.compile(allred.keras.distributed(keras.optimizers.SGD(0.1)), loss="mse")
x, y = np.ones((40, 4), np.float32) * (RANK + 1), np.ones((40, 1), np.float32)
if FAILURE == "mismatch":
    tf.function(hvd.allreduce)(tf.ones(3 + RANK))
if FAILURE == "interrupted":
    if RANK == 0:
        threading.Thread(target=interrupt_later).start()
    try:
        with allred.keras.raise_allred_errors():
            model.fit(x, y, batch_size=4, verbose=0, callbacks=[Fails()])
    except KeyboardInterrupt:
        print("KeyboardInterrupt in the program", flush=True)
        raise
if FAILURE == "terminated":
    checkpoints = allred.keras.callbacks.Checkpoints(sys.argv[2], model)
    model.fit(
        x, y, batch_size=4, verbose=0, epochs=2, initial_epoch=checkpoints.epoch, callbacks=[Fails(), checkpoints]
    )
    print(f"epoch {checkpoints.epoch}, step {model.optimizer.allred.global_step}", flush=True)
    sys.exit()
model.fit(x, y, batch_size=4, verbose=0, callbacks=[Fails()])
