"""Callbacks for `model.fit` of Keras 3."""

from typing import Any

import keras

from allred.errors import InputError
from allred.keras.callback_mixins import BroadcastMixin, MetricAverageMixin, ScheduleMixin, WarmupMixin
from allred.keras.model_checkpoints import Checkpoints


class BroadcastGlobalVariables(BroadcastMixin, keras.callbacks.Callback):
    """Copies the weights of the model and the variables of its optimizer from rank `root_rank` to all ranks before
    the first batch. The seeds of random layers are not copied.

    Raises InputError if the optimizer was not passed to `allred.keras.distributed`.

    Example: `model.fit(x, y, callbacks=[allred.keras.callbacks.BroadcastGlobalVariables(0)])`.
    """

    def on_train_begin(self, logs: Any = None) -> None:
        if not hasattr(self.model.optimizer, "allred"):
            raise InputError(
                "BroadcastGlobalVariables: the model was not compiled with an optimizer of allred.keras.distributed, "
                "so the ranks would train apart"
            )
        super().on_train_begin(logs)


class MetricAverage(MetricAverageMixin, keras.callbacks.Callback):
    """Replaces the metrics of an epoch, such as `loss` and `val_loss`, by their means over the ranks. Put it before
    callbacks that use them.

    Example: `callbacks=[allred.keras.callbacks.MetricAverage(), keras.callbacks.EarlyStopping()]`.
    """


class LearningRateSchedule(ScheduleMixin, keras.callbacks.Callback):
    """Sets the learning rate to `initial_lr` times a factor in the epochs from `start_epoch` to before `end_epoch`;
    later the last one stays. `logs["lr"]` is the learning rate at the end of an epoch.

    multiplier: a function that returns the factor of an epoch; or a number m, for the factor
        m ** (epoch - start_epoch), which decays in each epoch.
    staircase: True: at the beginning of each epoch. False: before each batch, with a fraction as the epoch.
    momentum_correction: multiplies the momentum by the new divided by the old learning rate, for one batch. It has no
        effect with Keras 3, where the momentum of an optimizer is not a variable.
    steps_per_epoch: batches in an epoch; needed without staircase if Keras does not know it.

    Raises ValueError without an initial learning rate or number of steps.

    Example: `LearningRateSchedule(0.1, lambda epoch: 0.1, start_epoch=30, end_epoch=60)`.
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
