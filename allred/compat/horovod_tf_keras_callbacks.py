"""The names of horovod.tensorflow.keras.callbacks, for tf.keras, which is Keras 3 or 2."""

import tensorflow as tf

from allred.compat.horovod_keras_callbacks import callbacks_of

globals().update(callbacks_of(tf.keras.callbacks))

__all__ = [*callbacks_of(tf.keras.callbacks)]
