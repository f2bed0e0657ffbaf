"""An optimizer of Keras with Horovod's arguments, for horovod.keras and horovod.tensorflow."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from allred.arrays import Array
from allred.horovod.process_sets import ProcessSet
from allred.keras.keras_optimizer import check, replace_apply
from allred.tensorflow.host_functions import call, copy_of
from allred.tensorflow.tensor_reduction import TensorReduction, reference_of


class AccumulatedGradients:
    """Adds up the gradients of `passes` steps, or averages them."""

    def __init__(self, passes: int, averages: bool) -> None:
        self.passes, self._averages, self.counter = passes, averages, 0
        self._sums: list[Array] = []

    def add(self, grads: Sequence[Any]) -> tuple[list[Any], Any]:
        """Return the sums, and whether this is the last of the steps."""
        tensors = [tf.convert_to_tensor(grad) for grad in grads]

        def run(arrays: list[Array]) -> list[Array]:
            self.counter += 1
            if self.counter == 1:
                self._sums = [array.copy() for array in arrays]
            else:
                for total, array in zip(self._sums, arrays, strict=True):
                    total += array
            if self.counter < self.passes:
                return [*map(copy_of, arrays), np.array(False)]
            self.counter = 0
            divisor = self.passes if self._averages else 1
            return [*(total / total.dtype.type(divisor) for total in self._sums), np.array(True)]

        specs = [*(tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors), tf.TensorSpec([], tf.bool)]
        *sums, is_last = call(run, tensors, specs)
        return sums, is_last


def horovod_keras_optimizer(
    optimizer: Any,
    name: str | None,
    compression: Any,
    sparse_as_dense: bool,
    op: Any,
    gradient_predivide_factor: float,
    passes: int,
    averages: bool,
    process_set: ProcessSet,
    scale_local_gradients: bool,
    local_layers: Sequence[Any] = (),
) -> Any:
    """Make an optimizer of Keras reduce its gradients. Returns it."""
    check(optimizer)
    reduction = TensorReduction(
        name or f"Distributed{type(optimizer).__name__}", compression, sparse_as_dense, op, gradient_predivide_factor,
        process_set, scale_local_gradients,
    )  # fmt: skip
    accumulated = AccumulatedGradients(passes, averages)

    def reduce(names: list[str], grads: list[Any], values: list[Any] | None) -> tuple[list[Any], Any]:
        assert values is not None  # on TensorFlow they are known
        if passes == 1:
            return reduction.reduce(grads, values, names), None
        sums, is_last = accumulated.add(grads)
        found = tf.cond(is_last, lambda: reduction.reduce(sums, values, names), lambda: sums)
        return found, is_last

    def register_local_var(variable: Any) -> None:
        reduction.local.add(reference_of(variable))

    optimizer.allred, optimizer.register_local_var = reduction, register_local_var
    for layer in local_layers:
        for variable in layer.trainable_weights:
            register_local_var(variable)
    replace_apply(optimizer, reduce, counts=passes > 1)
    return optimizer
