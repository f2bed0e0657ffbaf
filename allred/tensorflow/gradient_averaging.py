"""Averages of gradients of TensorFlow, with the checks of mode sync (allred/modes/gradient_averager.py)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from allred import world
from allred.arrays import Array
from allred.errors import InputError
from allred.horovod.process_sets import global_process_set
from allred.modes.gradient_averager import GradientAverager
from allred.tensorflow.array_reductions import ArrayReduction
from allred.tensorflow.host_functions import call, copy_of, label
from allred.tensorflow.tensorflow_collectives import gathered_slices


class _WritableMemory:
    """The memory of an array, without its flag that forbids writing: mode sync takes writable parameters."""

    def __init__(self, array: Array) -> None:
        self.array = array
        self.__array_interface__ = array.__array_interface__ | {"data": (array.ctypes.data, False)}


def _writable(array: Array) -> Array:
    if array.flags.writeable or not array.dtype.isnative or array.dtype.type.__module__ != "numpy":
        return array if array.flags.writeable else array.copy()
    return np.asarray(_WritableMemory(array))


@tf.autograph.experimental.do_not_convert
def average(
    averager: GradientAverager,
    names: Sequence[str],
    grads: Sequence[Any],
    params: Sequence[Any] | None = None,
    checks_first: bool = True,
) -> tuple[list[Any], Any]:
    """Return the averaged gradients; and a boolean tensor, False if the update is skipped, or None if no update can be
    skipped. Collective.

    grads: tensors, or tf.IndexedSlices, whose rows of all ranks are returned. params: the variables of the gradients,
    which are compared between the ranks. checks_first: whether also in the first step.
    """
    if (mode := world.config().mode) != "sync":
        raise InputError(
            f"{averager.name}: gradients of TensorFlow are averaged in mode sync; this job is in mode {mode}"
        )
    if averager.micro_steps > 1:
        grads = [tf.convert_to_tensor(grad) for grad in grads]
    results = list(grads)
    sparse = [index for index, grad in enumerate(grads) if isinstance(grad, tf.IndexedSlices)]
    dense = [index for index in range(len(results)) if index not in set(sparse)]
    used = None
    if dense:
        chosen = None if params is None else [params[index] for index in dense]
        found, used = _dense(averager, [names[i] for i in dense], [grads[i] for i in dense], chosen, checks_first)
        for index, result in zip(dense, found, strict=True):
            results[index] = result
    if sparse:
        process_set = averager.process_set or global_process_set
        with tf.control_dependencies([results[index] for index in dense]):  # see `reduced`
            slices, name = [grads[index] for index in sparse], ", ".join(names[index] for index in sparse)
            rows = gathered_slices(slices, ArrayReduction(averager.op), process_set, name)
        for index, result in zip(sparse, rows, strict=True):
            results[index] = result
    return results, used


def _dense(
    averager: GradientAverager,
    names: list[str],
    grads: Sequence[Any],
    params: Sequence[Any] | None,
    checks_first: bool,
) -> tuple[list[Any], Any]:
    tensors = [tf.convert_to_tensor(grad) for grad in grads]
    values = [] if params is None else [tf.convert_to_tensor(param) for param in params]
    title, has_params, skips = label("gradients", None) or averager.name, params is not None, averager.skips

    def run(arrays: list[Array]) -> list[Array]:
        copies = [copy_of(array) for array in arrays[: len(names)]]
        is_compared = has_params and (checks_first or averager.global_step > 0)
        mine = dict(zip(names, map(_writable, arrays[len(names) :]), strict=True)) if is_compared else None
        used = averager.average(title, dict(zip(names, copies, strict=True)), mine, None)
        if not used and not skips:
            raise InputError(
                f"{title}: a step is skipped, but the function was made for nonfinite='raise'; make it again"
            )
        return [*copies, np.array(used)]

    specs = [*(tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors), tf.TensorSpec([], tf.bool)]

    @tf.custom_gradient
    def operation(*given: Any) -> Any:
        return call(run, given, specs), _no_derivative

    *found, used = operation(*tensors, *values)
    return found, used if skips else None


def _no_derivative(*upstream: Any) -> Any:
    raise InputError("averaged gradients have no derivative; use allred.tensorflow.allreduce")
