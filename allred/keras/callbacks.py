"""Callbacks for `model.fit` of Keras 3."""

import keras

from allred.keras.keras_callbacks import BroadcastMixin, MetricAverageMixin, ScheduleMixin, WarmupMixin
from allred.keras.model_checkpoints import Checkpoints


class BroadcastGlobalVariables(BroadcastMixin, keras.callbacks.Callback):
    """Copies the weights of the model and the variables of its optimizer from rank `root_rank` to all ranks before
    the first batch.

    Example: `model.fit(x, y, callbacks=[allred.keras.callbacks.BroadcastGlobalVariables(0)])`.
    """


class MetricAverage(MetricAverageMixin, keras.callbacks.Callback):
    """Replaces the metrics of an epoch, such as `loss` and `val_loss`, by their means over the ranks. Put it before
    callbacks that use them.

    Example: `callbacks=[allred.keras.callbacks.MetricAverage(), keras.callbacks.EarlyStopping()]`.
    """


class LearningRateSchedule(ScheduleMixin, keras.callbacks.Callback):
    """Multiplies the initial learning rate by `multiplier` in the epochs from `start_epoch` to before `end_epoch`.

    initial_lr: the learning rate that is multiplied.
    multiplier: a number m, for m ** (epoch - start_epoch); or a function of the epoch.
    staircase: whether the rate changes at the beginning of epochs only; else before each batch, and the epoch is a
        fraction.
    momentum_correction: multiplies the momentum by new / old learning rate for the batch that follows a change.
        It has an effect where the momentum of the optimizer is a variable.
    steps_per_epoch: batches in an epoch; needed without staircase if Keras does not know it.

    Raises ValueError without an initial learning rate or number of steps.

    Example: `LearningRateSchedule(0.1, multiplier=0.1, start_epoch=30, end_epoch=60)`.
    """


class LearningRateWarmup(WarmupMixin, keras.callbacks.Callback):
    """Raises the learning rate from initial_lr / size to `initial_lr` during the first epochs, before each batch.

    initial_lr: the learning rate for all ranks together, such as 0.001 * allred.size(). verbose: 1 to print the end
    of the warmup. Other arguments: see `LearningRateSchedule`.

    Example: `LearningRateWarmup(0.001 * allred.size(), warmup_epochs=5)`.
    """


__all__ = [
    "BroadcastGlobalVariables",
    "Checkpoints",
    "LearningRateSchedule",
    "LearningRateWarmup",
    "MetricAverage",
]
