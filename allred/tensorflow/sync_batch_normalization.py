"""`SyncBatchNormalization`: a layer of Keras that normalizes with the mean and variance of the inputs of all ranks."""

from typing import Any

import tensorflow as tf

from allred.errors import InputError
from allred.horovod.operators import Sum
from allred.tensorflow.tensorflow_collectives import allreduce


@tf.keras.utils.register_keras_serializable(package="allred")
class SyncBatchNormalization(tf.keras.layers.BatchNormalization):
    """A `BatchNormalization` whose mean and variance, in training, are of the inputs of all ranks, which may have
    different numbers of rows. Collective. fused: must be False.

    Raises ValueError for fused=True and renorm=True.

    Example: `hvd.SyncBatchNormalization(axis=-1)` in place of `keras.layers.BatchNormalization(axis=-1)`.
    """

    def __init__(self, fused: bool = False, **options: Any) -> None:
        if fused in (True, None) or options.get("renorm"):
            raise InputError("SyncBatchNormalization: fused=True and renorm=True are not available")
        super().__init__(**options)

    def call(self, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        if not training or not self.trainable:
            return super().call(inputs, training=training, mask=mask)
        values = tf.cast(inputs, tf.float32 if inputs.dtype.size < 4 else inputs.dtype)
        rank = values.shape.rank
        axes = self.axis if isinstance(self.axis, (list, tuple)) else [self.axis]
        kept = {axis % rank for axis in axes}
        others = [axis for axis in range(rank) if axis not in kept]
        weights = (
            tf.ones_like(values) if mask is None else tf.cast(mask[..., None], values.dtype) * tf.ones_like(values)
        )
        sums = tf.stack([tf.reduce_sum(each, others) for each in (values * weights, weights)])
        total, count = tf.unstack(allreduce(sums, op=Sum))
        shape = [values.shape[axis] if axis in kept else 1 for axis in range(rank)]
        mean = total / count
        deviations = weights * tf.square(values - tf.reshape(mean, shape))
        variance = allreduce(tf.reduce_sum(deviations, others), op=Sum) / count
        for moving, new in ((self.moving_mean, mean), (self.moving_variance, variance)):
            moving.assign(moving * self.momentum + tf.cast(new, moving.dtype) * (1.0 - self.momentum))
        offset, scale = (
            None if each is None else tf.reshape(tf.cast(each, values.dtype), shape) for each in (self.beta, self.gamma)
        )
        mean, variance = tf.reshape(mean, shape), tf.reshape(variance, shape)
        result = tf.nn.batch_normalization(values, mean, variance, offset, scale, self.epsilon)
        return tf.cast(result, inputs.dtype)
