"""The names of horovod.keras.callbacks, for Keras 3."""

from typing import Any

import keras

from allred.keras.callback_mixins import BroadcastMixin, MetricAverageMixin, ScheduleMixin, WarmupMixin


class HorovodBroadcastMixin(BroadcastMixin):
    """As in `allred.keras.callbacks.BroadcastGlobalVariables`; local_variables are not copied."""

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = ()) -> None:
        super().__init__(root_rank, device)
        for variable in local_variables if isinstance(local_variables, (list, tuple)) else [local_variables]:
            self.register_local_var(variable)


class BestModelMixin:
    """Saves the model with the best value of `monitor`. The program sets `filepath` on one rank."""

    def __init__(self, monitor: str = "val_loss", verbose: int = 0, mode: str = "auto", **options: Any) -> None:
        given: Any = {"filepath": "best.keras", **options, "save_best_only": True}
        base: Any = super()  # ModelCheckpoint
        base.__init__(monitor=monitor, verbose=verbose, mode=mode, **given)


def callbacks_of(module: Any) -> dict[str, type]:
    """Return the classes by Horovod's names. module: `keras.callbacks` of Keras 3, or of Keras 2."""
    bases = {
        "BroadcastGlobalVariablesCallback": (HorovodBroadcastMixin, module.Callback),
        "MetricAverageCallback": (MetricAverageMixin, module.Callback),
        "LearningRateScheduleCallback": (ScheduleMixin, module.Callback),
        "LearningRateWarmupCallback": (WarmupMixin, module.Callback),
        "BestModelCheckpoint": (BestModelMixin, module.ModelCheckpoint),
    }
    return {name: type(name, own, {}) for name, own in bases.items()}


globals().update(callbacks_of(keras.callbacks))

__all__ = [*callbacks_of(keras.callbacks)]
