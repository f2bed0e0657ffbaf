"""The callbacks of allred for `model.fit`, without a base class: Keras 3 and Keras 2 (tf_keras) have one each.

callbacks.py derives the classes for Keras 3 from them.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from allred.cluster import topology
from allred.comm import functions
from allred.errors import InputError
from allred.keras.variable_names import names_of, numbers_of


def numpy_value(variable: Any) -> Any:
    """Return the value of a variable, tensor or number as a numpy array."""
    value = getattr(variable, "value", variable)
    value = value() if callable(value) else value  # of a variable of TensorFlow
    if hasattr(value, "detach"):
        from allred.torch.tensors import as_array

        return as_array(value.detach().cpu())
    return np.asarray(value)


def broadcast_variables(names: list[str], variables: list[Any], root: int) -> None:
    """Copy variables of rank `root` to all ranks. Collective."""
    copies = [np.array(numpy_value(variable)) for variable in variables]
    named = zip(copies, names, strict=True)
    works = [functions.current().broadcast(copy, root, name, in_place=True) for copy, name in named]
    for work, variable, copy in zip(works, variables, copies, strict=True):
        work.wait()
        variable.assign(copy)


def mean_of_logs(logs: dict[str, Any]) -> dict[str, float]:
    """Return the means over the ranks. Collective."""
    names = sorted(name for name, value in logs.items() if np.ndim(value) == 0)
    if not names:
        return {}
    means = functions.allreduce(np.array([float(logs[name]) for name in names]), name=f"metrics {', '.join(names)}")
    return dict(zip(names, means.tolist(), strict=True))


class CallbackMixin:
    """Keras sets the attributes before training."""

    model: Any
    params: dict[str, Any]


class BroadcastMixin(CallbackMixin):
    """`BroadcastGlobalVariables` without the base class of Keras."""

    def __init__(self, root_rank: int = 0, device: str = "") -> None:
        super().__init__()
        self.root_rank, self._is_done, self._local = root_rank, False, set[int]()

    def register_local_var(self, var: Any) -> None:
        """Do not copy this variable."""
        self._local.add(id(var))

    def on_train_begin(self, logs: Any = None) -> None:
        if self.model.built:
            self._broadcast()
        elif not self._is_done and hasattr(self.model.optimizer, "allred"):
            self.model.optimizer.allred.compares = False

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # Keras may build the model in the first batch
        self._broadcast()

    def _broadcast(self) -> None:
        if self._is_done:
            return
        self._is_done, optimizer = True, self.model.optimizer
        if hasattr(optimizer, "build") and not getattr(optimizer, "built", True):
            optimizer.build(self.model.trainable_variables)
        state = list(optimizer.variables() if callable(optimizer.variables) else optimizer.variables)
        own = [variable for variable in self.model.weights if id(variable) not in self._local]
        broadcast_variables(names_of(own), own, self.root_rank)
        broadcast_variables(numbers_of(state), state, self.root_rank)
        if hasattr(optimizer, "allred"):
            optimizer.allred.compares = True


class MetricAverageMixin(CallbackMixin):
    """`MetricAverage` without the base class of Keras."""

    def __init__(self, device: str = "") -> None:
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if logs:
            logs.update(mean_of_logs(logs))


class ScheduleMixin(CallbackMixin):
    """`LearningRateSchedule` without the base class of Keras."""

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise InputError(f"{type(self).__name__}: initial_lr is required")
        self.initial_lr, self.start_epoch, self.end_epoch, self.staircase = (
            initial_lr, start_epoch, end_epoch, staircase,
        )  # fmt: skip
        self.momentum_correction, self.steps_per_epoch = momentum_correction, steps_per_epoch
        if not callable(multiplier):
            factor = multiplier
            self.multiplier: Callable[[float], float] = lambda epoch: float(factor ** (epoch - start_epoch))
        else:
            self.multiplier = multiplier
        self._epoch = 0
        self._momentum: Any = None  # before the correction

    def on_train_begin(self, logs: Any = None) -> None:
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise InputError(f"{type(self).__name__}: the number of batches is not known; pass steps_per_epoch")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._epoch < self.start_epoch or (self.end_epoch is not None and self._epoch >= self.end_epoch):
            return
        if self.staircase and batch == 0:
            self._adjust(self._epoch)
        elif not self.staircase:
            assert self.steps_per_epoch
            self._adjust(self._epoch + batch / self.steps_per_epoch)

    def _adjust(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        old, new = float(numpy_value(optimizer.learning_rate)), self.initial_lr * self.multiplier(epoch)
        optimizer.learning_rate = new
        momentum = getattr(optimizer, "momentum", None)
        if self.momentum_correction and momentum is not None and hasattr(momentum, "assign") and old:
            self._momentum = float(numpy_value(momentum))
            momentum.assign(self._momentum * new / old)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._momentum is not None:
            self.model.optimizer.momentum.assign(self._momentum)
            self._momentum = None

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if logs is not None:
            logs["lr"] = float(numpy_value(self.model.optimizer.learning_rate))


class WarmupMixin(ScheduleMixin):
    """`LearningRateWarmup` without the base class of Keras."""

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            assert self.steps_per_epoch
            epoch += 1.0 / self.steps_per_epoch  # the first epochs end with round numbers
            return 1.0 / topology.size() * (epoch * (topology.size() - 1) / warmup_epochs + 1)

        super().__init__(
            initial_lr, multiplier, 0, warmup_epochs, staircase=False, momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )  # fmt: skip
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        assert self.end_epoch is not None
        if epoch == self.end_epoch - 1 and self.verbose and topology.rank() == 0:
            rate = float(numpy_value(self.model.optimizer.learning_rate))
            print(f"\nEpoch {epoch + 1}: the warmup of the learning rate has ended at {rate:g}.")
