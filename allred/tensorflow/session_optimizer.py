"""Optimizers of TensorFlow 1 (`tf.compat.v1.train.Optimizer`), whose gradients are reduced over the ranks."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from allred.errors import InputError
from allred.tensorflow.tensor_reduction import TensorReduction, name_of, reference_of


class SessionOptimizer(tf.compat.v1.train.Optimizer):
    """An optimizer whose `compute_gradients` reduces the gradients of `optimizer`.

    passes: the number of steps whose gradients are added up, or averaged if `averages`, before they are reduced.
    """

    def __init__(
        self, optimizer: Any, reduction: TensorReduction, use_locking: bool, passes: int, averages: bool
    ) -> None:
        super().__init__(name=reduction.name, use_locking=use_locking)
        if passes > 1 and tf.executing_eagerly():
            raise InputError("backward_passes_per_step > 1 with an optimizer of TensorFlow 1 needs a graph")
        self._optimizer, self.reduction, self._passes, self._averages = optimizer, reduction, passes, averages
        self._count: Any = None  # of the steps since the last reduction, a variable
        self._sums: dict[Any, Any] = {}  # variables, by reference of the variable whose gradients they add up

    def register_local_var(self, var: Any) -> None:
        """Do not reduce the gradients of this variable."""
        self.reduction.local.add(reference_of(var))

    def compute_gradients(self, *arguments: Any, **options: Any) -> list[tuple[Any, Any]]:
        """As of the optimizer, reduced over the ranks."""
        pairs = self._optimizer.compute_gradients(*arguments, **options)
        grads, variables = [grad for grad, _ in pairs], [variable for _, variable in pairs]
        reduced = self.reduction.reduce(grads, variables) if self._passes == 1 else self._accumulate(grads, variables)
        return list(zip(reduced, variables, strict=True))

    def _accumulate(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Add gradients to the sums. Returns the reduced sums in the last of the steps, and zeros before."""
        if self._count is not None:
            raise InputError("backward_passes_per_step > 1: compute_gradients() can be called once for an optimizer")
        present = [(index, tf.convert_to_tensor(grad)) for index, grad in enumerate(grads) if grad is not None]
        self._count = self._new_variable("count", tf.zeros([], tf.int32))
        sums = []
        for index, grad in present:
            made = self._new_variable(name_of(variables[index]).replace("/", "_"), tf.zeros(grad.shape, grad.dtype))
            self._sums[reference_of(variables[index])] = made
            sums.append(made)
        added = [total.assign_add(grad) for total, (_, grad) in zip(sums, present, strict=True)]
        with tf.control_dependencies(added):
            count = self._count.assign_add(1)
        with tf.control_dependencies([count]):
            divisor = self._passes if self._averages else 1
            totals = [total.read_value() / tf.cast(divisor, total.dtype) for total in sums]
            chosen = [variables[index] for index, _ in present]
            found = tf.cond(
                tf.greater_equal(count, self._passes),
                lambda: self.reduction.reduce(totals, chosen),
                lambda: [tf.zeros_like(total) for total in totals],
            )
        results: list[Any] = [None] * len(grads)
        for (index, _), result in zip(present, found, strict=True):
            results[index] = result
        return results

    def _new_variable(self, name: str, value: Any) -> Any:
        collections = [tf.compat.v1.GraphKeys.LOCAL_VARIABLES]
        name = f"{self.reduction.name}_accumulated_{name}"
        return tf.compat.v1.Variable(value, trainable=False, collections=collections, name=name, use_resource=True)

    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: Any = None) -> Any:
        """Apply the gradients in the last of the steps; before, only increment the global step."""
        pairs = list(grads_and_vars)
        if self._passes == 1:
            return self._optimizer.apply_gradients(pairs, global_step=global_step, name=name)

        def apply() -> Any:
            done = self._optimizer.apply_gradients(pairs, global_step=global_step, name=name)
            with tf.control_dependencies([done]):
                resets = [total.assign(tf.zeros_like(total)) for total in [*self._sums.values(), self._count]]
            return tf.group(*resets)

        def count_only() -> Any:
            return tf.no_op() if global_step is None else tf.group(global_step.assign_add(1))

        with tf.control_dependencies([grad for grad, _ in pairs if grad is not None]):
            return tf.cond(tf.greater_equal(self._count.read_value(), self._passes), apply, count_only)

    # The other methods are called on the optimizer.

    def get_slot(self, *arguments: Any, **options: Any) -> Any:
        return self._optimizer.get_slot(*arguments, **options)

    def get_slot_names(self, *arguments: Any, **options: Any) -> Any:
        return self._optimizer.get_slot_names(*arguments, **options)

    def variables(self, *arguments: Any, **options: Any) -> Any:
        return self._optimizer.variables(*arguments, **options)
